"""Functions as one compiled program each, shared by tests of the same shapes and options."""

import functools

import jax
import numpy as np


def compiled(function, *arguments, **options):
  """Calls a function as one program: arrays and lists of them are its inputs, what else
  it has are constants."""
  values = dict(enumerate(arguments)) | options
  arrays = {key: x for key, x in values.items() if isinstance(x, (np.ndarray, jax.Array, list))}
  constants = tuple((key, x) for key, x in values.items() if key not in arrays)
  return _program(function, len(arguments), constants)(
    [arrays.get(i) for i in range(len(arguments))],
    {key: x for key, x in arrays.items() if isinstance(key, str)},
  )


@functools.cache
def _program(function, count, constants):
  constants = dict(constants)

  @jax.jit
  def program(arguments, options):
    positions = [constants.get(i, x) for i, x in enumerate(arguments)]
    further = {key: x for key, x in constants.items() if isinstance(key, str)}
    return function(*positions, **further, **options)

  return program


@functools.cache
def value_and_grad(loss):
  """Returns a loss with its metrics and its gradient by the first argument."""
  return jax.value_and_grad(loss, has_aux=True)
