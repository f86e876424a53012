"""The jitted functions of an RL iteration, which compile while the first responses are sampled."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from gspo_jax import minibatches, sharding
from gspo_jax.learner.step import make_old_policy, make_rl_step, make_score
from gspo_jax.models import transformer
from gspo_jax.run import Context
from gspo_jax.structs import TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Programs:
  update: Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]
  old_policy: Callable[[Any, TrainBatch], dict[str, jax.Array]]
  score: Callable[[Any, TrainBatch], jax.Array]
  publish: Callable[[Any], Any]

  @staticmethod
  def of(context: Context, tx: optax.GradientTransformation) -> "Programs":
    c, learner = context.config, context.config.learner("rl")
    layout = transformer.shardings(c.model, sharding.ROLLOUT, context.mesh)
    return Programs(
      make_rl_step(learner, c.objective, tx),
      make_old_policy(learner, c.objective),
      make_score(learner),
      sharding.publisher(layout, np.dtype(c.compute.dtype)),
    )


def ahead(programs: Programs, context: Context, state: TrainState) -> Programs:
  """The same functions, which another thread compiles from now on for the mini-batches of this run.

  The first call of each waits for that. The sampler, which comes first, has to be compiled as well,
  and XLA leaves most cores of a large host idle. (A process that ends sooner, as when the machine
  is taken away, saves what it has to and then waits too: a compilation cannot be broken off.)
  """
  pool = concurrent.futures.ThreadPoolExecutor(1)
  objective = context.config.objective
  recompute = objective.old_logp == "recompute"

  def like(tree: Any) -> Any:
    """Shapes, types and layouts of arrays, which hold no memory."""
    layout = lambda x: NamedSharding(context.mesh, x.sharding.spec)  # noqa: E731
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout(x)), tree)

  def result(function: Callable, batch: TrainBatch) -> Any:
    return like(jax.eval_shape(function, state.params, batch))

  state = like(state)

  @functools.cache
  def batch() -> TrainBatch:
    batch = like(minibatches.blank(context))
    if objective.kl_coef:
      batch = batch.replace(ref_logp_BT=result(programs.score, batch))
    return batch

  @functools.cache
  def prepared() -> TrainBatch:
    return batch().replace(**result(programs.old_policy, batch()) if recompute else {})

  def begin(function: Callable, arguments: Callable[[], tuple[Any, ...]]) -> Callable:
    def work() -> None:
      with jax.set_mesh(context.mesh):  # each thread has its own
        function.lower(*arguments()).compile()

    job = pool.submit(work)

    def call(*arguments):
      concurrent.futures.wait([job])  # what failed there fails here again, where it is seen
      return function(*arguments)

    return call

  compiled = {}
  if recompute:  # else the old policy is asked for in reports alone
    compiled["old_policy"] = begin(programs.old_policy, lambda: (state.params, batch()))
  compiled["update"] = begin(programs.update, lambda: (state, prepared()))
  pool.shutdown(wait=False)  # the thread ends with its last job
  return dataclasses.replace(programs, **compiled)
