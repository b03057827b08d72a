"""Moments of every group of parameters, against each row's own gradient, taken by itself.

P rows, or microbatches of all replicas, G parameters of a group.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from initial_states import initial_state
from support import GPT2, config, in_microbatches, mesh, uneven_rows

from maxbatch.core.accumulate import Squares
from maxbatch.core.noise_scale import Moments
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters, build_model, by_path
from maxbatch.training.loss import loss_sum
from maxbatch.training.noise_run import TYPES, moments_by_group, type_of
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import NoiseSums, StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, LAYERS = 16, 32, 2
UNEVEN = uneven_rows(ROWS, T)
TOKENS = np.asarray(UNEVEN.weights, np.float64).sum(1)
COUNTED = TOKENS > 0
"""The rows that are examples."""
WEIGHT = TOKENS.sum()
KEY = jax.random.key(7)
LLAMA = {"use_qk_norm": "true", "qk_norm_across_heads": "true", "use_post_attn_norm": "true"}
Path = tuple[str, ...]
Gradients = dict[Path, np.ndarray]


def step(axes: tuple[int, int, int], k: int, **keys: object) -> tuple[Trainer, StepMetrics]:
  """What one step of `k` microbatches on data × fsdp × tensor devices reports."""
  settings = config(opt_type="sgd", **keys)
  model = build_model(settings.model, T, settings.noise.gns)
  optimizer = make_optimizer(settings.optimizer, model.axes(), 1)
  measures = Measures(microbatch_squares=settings.noise.gns_from_microbatches)
  trainer = Trainer(model, optimizer, mesh(*axes), KEY, measures=measures)
  rows = in_microbatches(UNEVEN, k, k)
  rows = jax.device_put(rows, rows_shardings(rows, trainer.mesh))
  program = step_function(trainer, rows)
  state = initial_state(trainer, initial(model))
  return trainer, jax.device_get(program(state, rows, np.int32(k), np.float32(0.0))[1])


def initial(model: Model) -> Parameters:
  return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


@functools.cache
def gradients(**keys: object) -> Gradients:
  """Of every parameter, the gradient of each row's summed loss: (ROWS, …)."""
  model = build_model(config(**keys).model, T)

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0))
  def of_each(parameters: Parameters, row: Rows) -> Parameters:
    one = jax.tree.map(lambda x: x[None], row)
    return jax.grad(lambda p: loss_sum(model, p, one, KEY))(parameters)

  results: dict[Path, np.ndarray] = {}
  of_rows = of_each(initial(model), UNEVEN)
  by_path(lambda path, x: results.update({path: np.asarray(x, np.float64)}), of_rows)
  return results


def moments_of(parts_PG: np.ndarray, tokens_P: np.ndarray) -> Moments:
  """From products of different parts, whose noises are independent, and what squares have on top."""
  products_PP, tokens_PP = parts_PG @ parts_PG.T, np.outer(tokens_P, tokens_P)
  pairs_PP = ~np.eye(len(parts_PG), dtype=bool)
  signal = products_PP[pairs_PP].sum() / tokens_PP[pairs_PP].sum()
  of_gradients = np.trace(products_PP - signal * tokens_PP) / WEIGHT**2
  return Moments(signal, COUNTED.sum() * of_gradients)


def direct(result: Gradients, chosen: Sequence[tuple[Path, int | None]]) -> Moments:
  """The moments of the chosen parameters, each whole or one layer of it, from rows' gradients."""
  taken = [result[path] if at is None else result[path][:, at] for path, at in chosen]
  rows_PG = np.concatenate([x.reshape(ROWS, -1) for x in taken], axis=1)
  return moments_of(rows_PG, TOKENS)


def of_microbatches(result: Gradients, parts: int) -> Moments:
  """The moments of all parameters, from the gradients of so many microbatches of all replicas."""
  parts_PG = np.concatenate(
    [x.reshape(parts, ROWS // parts, -1).sum(1) for x in result.values()], axis=1
  )
  return moments_of(parts_PG, TOKENS.reshape(parts, -1).sum(1))


def expected(found: Gradients) -> dict[str, Moments]:
  """Every group of a model all of whose layers are measured, by the names of its parameters."""
  types: dict[str, list[Path]] = {name: [] for name in TYPES}
  for path in found:
    if any("norm" in word for word in path):
      types["norm"].append(path)
    elif {"attention", "mlp"} & set(path):
      types["attention" if "attention" in path else "mlp"].append(path)
    elif path == ("head",):
      types["head"].append(path)
    else:
      types["embedding"].append(path)
  every = [path for paths in types.values() for path in paths]
  stacked = [path for path in every if path[0] == "layers"]
  groups = types | {"total": every}
  result = {
    name: direct(found, [(path, None) for path in paths]) for name, paths in groups.items() if paths
  }
  for layer in range(LAYERS):
    result[f"layer/{layer}"] = direct(found, [(path, layer) for path in stacked])
  return result


def assert_near(ours: dict[str, Moments | None], theirs: dict[str, Moments]) -> None:
  assert set(ours) == set(theirs)
  for name, moments in theirs.items():
    mine = ours[name]
    assert mine is not None
    # The signal is a difference of large squares.
    tolerance = 1e-5 * (abs(moments.signal) + moments.noise)
    assert mine.signal == pytest.approx(moments.signal, abs=tolerance), name
    assert mine.noise == pytest.approx(moments.noise, rel=1e-4), name


def test_every_group_is_that_of_the_rows_own_gradients():
  trainer, reported = step((2, 1, 1), 2, gns="all", gns_from_microbatches="true", **LLAMA)
  ours = moments_by_group(trainer.model.probed(), reported, every_layer=True)
  result = gradients(**LLAMA)
  theirs = expected(result)
  assert set(TYPES) < set(theirs)
  assert_near(ours, theirs | {"from_microbatches": of_microbatches(result, 4)})


def test_a_tied_table_is_measured_with_the_embedding():
  trainer, reported = step((1, 1, 1), 1, gns="all", **GPT2)
  ours = moments_by_group(trainer.model.probed(), reported, every_layer=True)
  theirs = expected(gradients(**GPT2))
  assert set(TYPES) - set(theirs) == {"head"}
  assert_near(ours, theirs)


def test_norms_alone_have_groups_of_their_own():
  trainer, reported = step((1, 1, 1), 4, gns="norm", gns_from_microbatches="true", **LLAMA)
  ours = moments_by_group(trainer.model.probed(), reported, every_layer=False)
  result = gradients(**LLAMA)
  norms = [path for path in result if any("norm" in word for word in path)]
  stacked = [path for path in norms if path[0] == "layers"]
  assert len(norms) == len(stacked) + 1  # the final norm belongs to no layer
  theirs = {"norm": direct(result, [(path, None) for path in norms])}
  for layer in range(LAYERS):
    theirs[f"norm_of_layer/{layer}"] = direct(result, [(path, layer) for path in stacked])
  assert_near(ours, theirs | {"from_microbatches": of_microbatches(result, 4)})


def test_one_microbatch_has_nothing_to_compare():
  one = np.float32(1.0)
  sums = NoiseSums(one, one, {}, Squares(one, one, one, one))  # pyright: ignore
  reported = StepMetrics(one, one, one, {}, sums, {})  # pyright: ignore
  ours = moments_by_group((), reported, every_layer=False)
  assert ours == {"from_microbatches": None}


def test_nothing_measured_is_no_group():
  one = np.float32(1.0)
  nothing = StepMetrics(one, one, one, {})  # pyright: ignore[reportArgumentType]
  assert moments_by_group((), nothing, every_layer=True) == {}


@pytest.mark.parametrize(
  ("path", "expected"),
  [
    ("layers/attention_norm/probe", "norm"),
    ("layers/attention/query_norm/probe", "norm"),
    ("final_norm/probe", "norm"),
    ("layers/attention/query/probe", "attention"),
    ("layers/mlp/up/probe", "mlp"),
    ("embedding_probe", "embedding"),
    ("position_probe", "embedding"),
    ("head_probe", "head"),
    ("layers/experts/probe", "experts"),
    ("router_probe", "router"),
  ],
)
def test_types_by_the_path_of_the_probe(path, expected):
  assert type_of(path.split("/")) == expected
