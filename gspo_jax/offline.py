"""What job=offline asks of a configuration."""

from gspo_jax.data.recorded import Limits
from gspo_jax.settings.run import RunConfig


def limits(config: RunConfig) -> Limits:
  """What recorded responses must keep to."""
  return Limits(
    config.rl.group_size,
    config.data.max_prompt_tokens,
    config.sampling.max_new_tokens,
    config.model.vocab_size,
  )
