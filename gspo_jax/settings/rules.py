"""Relations between keys, before any device is touched: one door to all of them."""

from gspo_jax.settings.checks import check, check_devices
from gspo_jax.settings.doubts import Facts as DataFacts
from gspo_jax.settings.doubts import check as warnings

__all__ = ["DataFacts", "check", "check_devices", "warnings"]
