"""The examples in the docstrings of all public functions, as `help` and the site show them."""

import doctest
import inspect
import sys

import jax
import pytest
from support.cases import long

from gspo_jax import objectives as O

TREES = {"merge", "collapse", "psum", "compute", "reduced"}  # Reductions share one example.
PUBLIC = {
  name: inspect.unwrap(function)
  for name, function in (vars(O) | O.POLICY_LOSSES).items()
  if inspect.isfunction(function) and name not in TREES
}

# Half a second and more each; other tests compare them with references.
SLOW = """
  distillation_advantages gae turn_gae turn_advantages constrained_advantages gdpo_advantages
  soft_value soft_advantages mismatch segment_ratio off_policy_mask dapo_loss gmpo_loss value_loss
""".split()
MARKED = [
  *(name for name in PUBLIC if name not in SLOW),
  *long(SLOW),
]


@pytest.mark.parametrize("name", MARKED)
def test_example(name):
  function = PUBLIC[name]
  scope = vars(sys.modules[function.__module__]) | dict(jnp=jax.numpy)
  (example,) = doctest.DocTestFinder(recurse=False).find(function, name, False, globs=scope)
  assert example.examples, f"{name} has no example: add `Example:` and >>> lines to its docstring"
  output = []
  runner = doctest.DocTestRunner(verbose=False)
  runner.run(example, out=output.append)
  assert not runner.failures, "".join(output)
