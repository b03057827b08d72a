"""Every seed that is accepted is another one, up to the largest."""

import functools
import itertools

import jax
import numpy as np
import pytest
from support import TINY, config, mesh

from maxbatch.config.load import load_config
from maxbatch.data.mixture import SampleStream
from maxbatch.errors import UserError
from maxbatch.models.registry import build_model
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import Trainer

SEEDS = (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


@functools.cache
def trainer() -> Trainer:
  """The seed is an argument of its program."""
  settings = config()
  model = build_model(settings.model, TINY["max_target_length"])
  optimizer = make_optimizer(settings.optimizer, model.axes(), 1)
  return Trainer(model, optimizer, mesh(), jax.random.key(0))


def first_weights(seed: int) -> np.ndarray:
  chosen = config(init_weights_seed=seed).model.init_weights_seed
  return np.asarray(trainer().init(chosen).params["embedding"])


def order(seed: int) -> np.ndarray:
  return SampleStream(100, config(data_shuffle_seed=seed).data.data_shuffle_seed)(np.arange(150))


@pytest.mark.parametrize("drawn", [first_weights, order])
def test_every_seed_draws_something_else(drawn):
  for one, other in itertools.combinations(map(drawn, SEEDS), 2):
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("key", ["init_weights_seed", "data_shuffle_seed"])
@pytest.mark.parametrize("seed", [2**32, 2**64 + 1, -1])
def test_what_would_wrap_around_is_refused(key, seed):
  with pytest.raises(UserError, match=f"{key} must be at least 0 and at most 4294967295"):
    load_config(["config=base", f"{key}={seed}"])
