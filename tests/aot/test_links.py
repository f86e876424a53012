"""Which chips a collective joins, and what share of an axis of the torus it has."""

import itertools

import numpy as np
import pytest

from gspo_jax.aot import hlo_costs, links


def torus(*sides):
  """All chips of a slice, the last coordinate first."""
  return links.Torus(sides, tuple(itertools.product(*map(range, sides))))


@pytest.mark.parametrize(
  "groups, members",
  [
    ("replica_groups={{0,1,2},{3,4,5}}", [0, 1, 2]),
    ("replica_groups=[16,4]<=[64]", [0, 1, 2, 3]),
    ("replica_groups=[4,16]<=[16,4]T(1,0)", [*range(0, 64, 4)]),
    ("replica_groups=[8,4]<=[2,4,4]T(0,2,1)", [0, 4, 8, 12]),
    ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_0'}", [*range(0, 64, 4)]),
    ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_0','axis_1'}", [*range(64)]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", [0, 2]),
    ("source_target_pairs={{3,5},{5,3}}", [3, 5]),
    ("no groups", []),
  ],
)
def test_the_first_group_of_a_collective(groups, members):
  assert links.members(f"%x), channel_id=1, {groups}, dimensions={{0}}") == members


def row(sides, axis, places):
  """The partitions of a row of chips along one side."""
  order = np.moveaxis(np.arange(np.prod(sides)).reshape(sides), axis, 0)
  return order.reshape(sides[axis], -1)[list(places), 0].tolist()


@pytest.mark.parametrize(
  "sides, axis, places, share",
  [
    ((4, 4, 4), 0, range(4), 1.0),
    ((4, 4, 4), 2, range(2), 0.5),  # half of a side
    ((4, 4, 4), 1, (0, 2), 0.5),  # Two chips with another between them.
    ((4, 4, 8), 2, range(8), 1.0),
    ((4, 4, 8), 2, range(4), 0.5),
    ((2, 2, 4), 2, range(4), 0.5),  # less than a cube: the ends are not joined
    ((8, 8), 0, range(8), 0.5),
    ((16, 16), 0, range(16), 1.0),
    ((8, 16), 1, range(16), 1.0),
    ((8, 16), 0, range(8), 0.5),
    ((4, 4, 4), 0, range(1), 1.0),  # nothing is sent
  ],
)
def test_a_row_has_both_links_if_its_ends_are_joined(sides, axis, places, share):
  assert torus(*sides).share(row(sides, axis, places)) == share


def test_a_ring_may_run_over_several_sides():
  assert torus(2, 2).share([0, 1, 2, 3]) == 1.0
  assert torus(4, 4, 4).share([*range(64)]) == 1.0


def test_two_cores_of_a_chip_need_no_link():
  cores = links.Torus((2, 2, 1), tuple(xy for xy in [(0, 0, 0), (1, 0, 0)] for _ in range(2)))
  assert cores.share([0, 1]) == 1.0 and cores.share([0, 2]) == 0.5
  assert cores.share([0, 1], one_way=True) == 1.0
  assert cores.share([1, 2], one_way=True) == 0.5
  assert torus(4, 4, 4).share([0, 21], one_way=True) == 0.5


PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[8,4]) -> f32[16,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %g = f32[16,4]{1,0} all-gather(%p), replica_groups=[32,2]<=[64], dimensions={0}
}
"""


def test_what_runs_over_half_of_a_side_takes_twice_as_long():
  whole, half = hlo_costs.costs(PROGRAM), hlo_costs.costs(PROGRAM, torus=torus(4, 4, 4))
  assert whole.wire == half.wire == whole.ring_wire == 16 * 4 * 4 / 2
  assert half.ring_wire == 2 * half.wire and half.ring_hidden == half.hidden == 0
