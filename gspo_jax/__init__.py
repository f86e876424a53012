"""Group Sequence Policy Optimization (GSPO, arXiv:2507.18071) in JAX."""

__version__ = "0.1.0"
