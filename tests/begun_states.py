"""States to begin steps with, without a program that makes them."""

from typing import Any

import jax
import numpy as np

from maxbatch.training.state import TrainState, shardings
from maxbatch.training.step import Trainer


def begun_state(trainer: Trainer, parameters: Any) -> TrainState:
  """These parameters, in their places; all the rest is zeros, as SGD and Adam begin."""
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trainer.abstract)
  return jax.device_put(zeros._replace(params=parameters), shardings(trainer.abstract))
