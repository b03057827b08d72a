"""Groups of parameters with a batch of their own: the mean over several steps, however these are split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import config, uneven_rows
from test_core import assert_close, batch, in_microbatches, loss, mesh, parameters
from test_step import ROWS, T, fresh, fused, streamed, trainer

from maxbatch.core.accumulate import accumulate
from maxbatch.core.train_step import init_state, step_optimizer, train_step
from maxbatch.errors import UserError
from maxbatch.training.optimizer import make_optimizer

STEPS = {"w": 1, "v": 2}
RULES = optax.sgd(0.1, 0.9)
SIZES = (16, 16, 32, 48, 48)
"""Rows of each step: a ramp."""


def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
  del keys_B
  return {"square": loss(params, rows, None)[0]["square"]}, {}


def rows_of(size: int) -> Any:
  return jax.tree.map(lambda x: x[:size], batch())


def by_hand(clip: float) -> Any:
  """v is updated every second step, by the mean over the weights of both, each group clipped alone."""

  def summed(params: Any, rows: Any) -> Any:
    term = one_term(params, rows, None)[0]["square"]
    return term.numerator, term.denominator

  rule = optax.chain(optax.clip_by_global_norm(clip or 1e9), RULES)
  params: dict[str, Any] = {name: {name: jnp.asarray(x)} for name, x in parameters().items()}
  states = {name: rule.init(params[name]) for name in params}
  sums = {name: [jnp.zeros_like(x[name]), 0.0] for name, x in params.items()}
  history = []
  for number, size in enumerate(SIZES, 1):
    flat = {name: x[name] for name, x in params.items()}
    gradient, weight = jax.grad(summed, has_aux=True)(flat, rows_of(size))
    for name, every in STEPS.items():
      sums[name] = [sums[name][0] + gradient[name], sums[name][1] + weight]
      if number % every == 0:
        mean = {name: sums[name][0] / sums[name][1]}
        updates, states[name] = rule.update(mean, states[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)
        sums[name] = [jnp.zeros_like(gradient[name]), 0.0]
    history.append({name: np.asarray(x[name]) for name, x in params.items()})
  return history


def optimizer(clip: float, dispatches: Any = 1) -> Any:
  def steps_of(tree: Any) -> Any:
    return {name: STEPS[name] for name in tree}

  groups = steps_of, sorted({*STEPS.values()})
  return step_optimizer(RULES, clip_norm=clip, dispatches=dispatches, groups=groups)


def in_one_dispatch(clip: float, micro_batch: int, axes: dict[str, int]) -> Any:
  made = optimizer(clip)
  step = jax.jit(train_step(accumulate(one_term, mesh(**axes) if axes else None), made))
  state, history = init_state(parameters(), made), []
  for size in SIZES:
    rows = in_microbatches(rows_of(size), size // micro_batch, 48 // micro_batch)
    state, result = step(state, rows, np.int32(size // micro_batch))
    assert result.grad_norm > 0
    history.append(jax.device_get(state.params))
  return history


def in_dispatches(micro_batch: int) -> Any:
  counts = jnp.array([size // micro_batch for size in SIZES])
  made = optimizer(0.0, lambda step: counts[step])
  step = jax.jit(train_step(accumulate(one_term), made, streamed=True))
  state = init_state(parameters(), made, one_term, rows_of(micro_batch))
  history = []
  for size in SIZES:
    for at in range(0, size, micro_batch):
      rows = jax.tree.map(lambda x, at=at: x[None, at : at + micro_batch], batch())
      state, _ = step(state, rows, np.int32(1))
    history.append(jax.device_get(state.params))
  return history


@pytest.mark.parametrize(
  ("split", "clip"), [("16", 0.5), ("16", 0.0), ("8", 0.0), ("mesh", 0.0), ("streamed", 0.0)]
)
def test_a_group_s_update_is_the_mean_over_its_steps(split, clip):
  if split == "streamed":
    history = in_dispatches(8)
  else:
    axes = {"data": 2} if split == "mesh" else {}
    history = in_one_dispatch(clip, 8 if split == "8" else 16, axes)
  for made, expected in zip(history, by_hand(clip), strict=True):
    assert_close(made, expected)
  # It stays where it is in between, and the others go on.
  assert (history[2]["v"] == history[1]["v"]).all()
  assert (history[2]["w"] != history[1]["w"]).any()


@pytest.mark.parametrize("opt_type", ["sgd", "adamw", "muon"])
def test_a_model_s_groups_are_the_same_in_any_split(opt_type):
  keys = {
    "opt_type": opt_type,
    "dropout_rate": 0.0,
    "batch_by_group": "[[embedding,2],[head,2]]",
  }
  steps = [(uneven_rows(ROWS, T, seed), 4) for seed in range(3)]
  one, _ = fused(trainer((2, 1, 1), **keys), steps)
  start = jax.device_get(trainer_params(**keys))
  moved = {name: leaves_differ(one.params[name], start[name]) for name in one.params}
  assert all(moved.values())
  if opt_type == "sgd":
    other, _ = streamed(trainer((2, 1, 1), 4, **keys), steps)
    assert_close(other.params, one.params)
  first, _ = fused(trainer((2, 1, 1), **keys), steps[:1])
  still = {name: not leaves_differ(first.params[name], start[name]) for name in one.params}
  assert {name for name, same in still.items() if same} == {"embedding", "head"} & one.params.keys()


def trainer_params(**keys: Any) -> Any:
  return fresh(trainer((2, 1, 1), **keys)).params


def leaves_differ(one: Any, other: Any) -> bool:
  return any(
    (a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


@pytest.mark.parametrize(
  ("groups", "words"),
  [
    (
      "[[embeding,2]]",
      "batch_by_group: 'embeding' matches no parameter that trains; nearest: embedding",
    ),
    ("[['*',2]]", "all parameters that train have 2 steps, which is a batch 2 times as large"),
  ],
)
def test_what_is_refused(groups, words):
  with pytest.raises(UserError) as caught:
    trainer(batch_by_group=groups)
  assert words in str(caught.value)


def test_without_groups_the_state_is_as_it_was():
  settings = config()
  plain = make_optimizer(settings.optimizer, trainer().model.axes(), 1)
  named = jax.tree_util.tree_leaves_with_path(jax.eval_shape(plain.init, trainer().model.shapes()))
  assert not any("every_" in jax.tree_util.keystr(path) for path, _ in named)
