"""Whole runs with a ratio for each step: interrupted, put aside, packed, dumped."""

import json

import jax
import numpy as np
import pytest
from learner.test_epochs import rewards, run, run_interrupted  # noqa: F401 (used by name)
from support.command_line import figures, rows_of

ENDS = tuple(map(chr, range(32, 80)))  # Two in five tokens of a random model.
STEPS = dict(
  objective__name="segment",
  objective__segment_unit="step",
  objective__segment_delimiters=ENDS,
  objective__adaptive_clip__target=0.0,
  objective__adaptive_clip__gain=1.0,
  objective__clip_low=0.001,
  objective__clip_high=0.001,
  sampling__max_new_tokens=6,
  engine__steps=2,
  engine__slots=24,
  rl__prompts=8,
  rl__epochs=1,
  rl__dump_every=1,
  rl__extra_prompts=8,
  rl__microbatches=2,
  rl__packed=True,
)


def dumps(workdir, step):
  path = workdir / "rollouts" / f"rl_{step:06d}.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
def test_resumed_run_by_steps_equals_an_uninterrupted_run(tmp_path, monkeypatch):
  _, params = run(tmp_path / "whole", **STEPS)
  rows = rows_of(tmp_path / "whole", "rl")[1:]
  assert any(row["partial/stale_tokens"] > 0 for row in rows)
  for row in rows:
    assert 1.5 < row["segment/count"] < 5 and row["segment/length"] < 4
    assert 0 < row["segment/clip_fraction/1"] < 1 and row["segment/gradient/1"] > 0
  same = run_interrupted(tmp_path / "again", monkeypatch, **STEPS)
  assert jax.tree.all(jax.tree.map(np.array_equal, same, params))
  assert figures(tmp_path / "again") == figures(tmp_path / "whole")
  assert dumps(tmp_path / "again", 3) == dumps(tmp_path / "whole", 3)

  # A dump has each token's segment, and of each segment what its tokens say.
  several = clipped = 0
  for record in dumps(tmp_path / "whole", 2):
    numbers, texts = np.array(record["segments"]), record["tokens"]
    ends = [text in ENDS for text in texts]
    if len(texts) > 1 and texts[-1] == "" and ends[-2]:  # the stop token, behind an end
      ends[-2] = False
    assert numbers.tolist() == [0, *np.cumsum(ends)[:-1]]
    several += numbers[-1] > 0
    sizes = []  # |Â| / K of all that are not clipped
    for n, (ratio, gradient) in enumerate(
      zip(record["segment_ratio"], record["segment_gradient"], strict=True)
    ):
      mine = numbers == n
      mean = np.mean(np.array(record["log_ratio"])[mine])
      assert ratio == pytest.approx(np.exp(mean), abs=1e-4)
      cut = np.array(record["clipped_tokens"])[mine].all()
      clipped += cut
      assert (gradient == 0) == cut
      sizes += [] if cut else [gradient / ratio]
    assert not sizes or np.ptp(sizes) < 1e-2 * max(sizes)
  assert several > 5 and clipped > 3
