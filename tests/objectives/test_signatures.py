"""Signatures of losses, as `help` prints them."""

import inspect

from gspo_jax import objectives as O


def test_types_are_short_and_results_are_arrays():
  text = str(inspect.signature(O.gspo_loss))
  assert text.startswith("(logp_BT: ArrayLike, old_logp_BT: ArrayLike, advantage_B: ArrayLike, ")
  assert "clip_low: float | Array = 0.0003" in text
  assert text.endswith("**options: Unpack[Options]) -> tuple[Array, dict[str, Array]]")
  assert "aggregate: Literal['sequence', 'token', 'constant']" in str(
    inspect.signature(O.grpo_loss)
  )
  assert str(inspect.signature(O.mismatch)).endswith(
    "response_BT: ArrayLike | None = None) -> dict[str, Array]"
  )
