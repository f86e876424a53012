"""What the cold start and the policy's training have in common; test_main.py has whole runs."""

from types import SimpleNamespace

import jax.numpy as jnp

from gspo_jax.objectives.reductions import Mean
from gspo_jax.runs import phase


def test_a_row_is_written_when_the_next_one_is_there():
  rows = []
  part = SimpleNamespace(
    latest_whole=lambda: None, metrics=dict, truncate=dict, start=bool, check=lambda *_: None,
    write=rows.append,
  )  # fmt: skip
  running = phase.Phase("rl", 2, part, part, part)
  running.resume(like=None, start=dict)
  running.stand(0, None, dict)
  running.flush()
  running.report(dict(step=1, loss=Mean(jnp.float32(3), jnp.float32(2))))
  assert rows == []
  running.report(dict(step=2, loss=Mean(jnp.float32(5), jnp.float32(2))))
  assert rows == [dict(phase="rl", step=1, loss=1.5)]
  running.flush()
  running.flush()
  assert rows[1:] == [dict(phase="rl", step=2, loss=2.5)]
