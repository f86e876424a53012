"""An environment for the tests: the other side of small models' conversations."""

from gspo_jax.settings.sampling import EnvironmentConfig

TALK = EnvironmentConfig(max_turns=3, discount=0.5)


class Teacher:
  """Three words to everything; rewards short turns, and large numbers."""

  def __init__(self, prompt):
    self.prompt = prompt

  def reset(self):
    return self.prompt

  def step(self, response):
    return [20, 21, 22], response[0] / 64 - len(response) / 8, response[0] % 3 == 0
