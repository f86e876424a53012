"""What a run has cost goes on, to the last digit, from what a checkpoint says."""

import json

from gspo_jax.runs.totals import Totals


def test_totals_go_on_from_what_was_saved():
  saved = Totals().plus(3, 2.5e20).plus(4, 1 / 3)
  restored = Totals(**json.loads(json.dumps(saved.get_state())))
  assert restored.plus(1, 0.1) == saved.plus(1, 0.1)
  assert restored.metrics() == {"total/tokens": 7.0, "total/flops": 2.5e20 + 1 / 3}
