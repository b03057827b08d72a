"""Optimizer state is divided as its parameters are, whatever its shape, or refused."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes, make_mesh
from maxbatch.training.optimizer import (
  parameter_of,
  place_optimizer_state,
  shared_axes,
)

SHAPES: dict[tuple[str, ...], tuple[tuple[int, ...], LogicalAxes]] = {
  ("embedding",): ((640, 256), ("vocab", "embed")),
  ("layers", "norm", "scale"): ((2, 256), ("layers", "embed")),
  ("layers", "up", "kernel"): ((2, 256, 512), ("layers", "embed", "mlp")),
}
AXES = {path: axes for path, (_, axes) in SHAPES.items()}
PARAMS: dict[str, Any] = {
  "embedding": jax.ShapeDtypeStruct((640, 256), jnp.float32),
  "layers": {
    "norm": {"scale": jax.ShapeDtypeStruct((2, 256), jnp.float32)},
    "up": {"kernel": jax.ShapeDtypeStruct((2, 256, 512), jnp.float32)},
  },
}


def mesh(fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
  return make_mesh(Topology.of(data=8 // fsdp // tensor, fsdp=fsdp, tensor=tensor), jax.devices())


def place(rule: optax.GradientTransformation, where: jax.sharding.Mesh) -> Any:
  return place_optimizer_state(jax.eval_shape(rule.init, PARAMS), PARAMS, AXES, where)


def ways(leaf: jax.ShapeDtypeStruct) -> int:
  assert leaf.sharding is not None
  return leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))


def state_of(each: Callable[[jax.Array], Any]) -> optax.GradientTransformation:
  """A rule that keeps what `each` makes of every parameter."""
  return optax.GradientTransformation(
    lambda params: jax.tree.map(each, params), lambda updates, state, params=None: (updates, state)
  )


def test_adafactors_rows_and_columns_are_divided_as_the_dims_they_have():
  state = place(optax.adafactor(1.0), mesh(4, 2))
  factored = jax.tree.leaves(state, is_leaf=lambda leaf: hasattr(leaf, "v_row"))[0]
  rows, columns = factored.v_row["layers"]["up"]["kernel"], factored.v_col["layers"]["up"]["kernel"]
  assert (rows.shape, ways(rows)) == ((2, 256), 4)
  assert (columns.shape, ways(columns)) == ((2, 512), 2)
  # Of a vocabulary of 640 tokens over tensor=2, and of the width over fsdp=4.
  assert {ways(tree["embedding"]) for tree in (factored.v_row, factored.v_col)} == {2, 4}


def test_square_matrices_and_states_under_other_keys_are_divided_too():
  squares = state_of(lambda x: jnp.zeros((x.shape[-1], x.shape[-1])))
  assert {ways(leaf) for leaf in jax.tree.leaves(place(squares, mesh(4, 2)))} == {4, 2}
  labelled = optax.partition({"all": optax.adam(1.0)}, "all")
  moments = [leaf for leaf in jax.tree.leaves(place(labelled, mesh(8))) if leaf.ndim]
  assert len(moments) == 6
  assert all(ways(leaf) == 8 for leaf in moments)


@pytest.mark.parametrize(
  ("rule", "named"),
  [
    (
      state_of(lambda x: jnp.zeros((x.size // 4,))),
      "optimizer state embedding of shape (40960,): of the dims of embedding, (640, 256), that the mesh "
      "divides it has none",
    ),
    (
      optax.flatten(optax.adam(1.0)),
      "optimizer state 0/mu of shape (426496,): its path does not end with a parameter's",
    ),
  ],
)
def test_large_state_that_cannot_be_divided_is_refused(rule, named):
  with pytest.raises(UserError) as refused:
    place(rule, mesh(8))
  assert str(refused.value).startswith(named)
  assert "keep it in a tree like the parameters'" in str(refused.value)
  whole = [ways(leaf) for leaf in jax.tree.leaves(place(rule, mesh(1)))]
  assert set(whole) == {1}, "where parameters are whole on every device, so may their state be"


def test_a_few_numbers_may_be_whole_on_every_device():
  counters = state_of(lambda x: {"steps": jnp.zeros((), jnp.int32), "bounds": jnp.zeros((7,))})
  assert {ways(leaf) for leaf in jax.tree.leaves(place(counters, mesh(8)))} == {1}


def test_a_path_names_the_longest_parameter_in_it():
  parameters = [("a",), ("a", "b"), ("c",)]

  def owner(*names: str) -> tuple[str, ...] | None:
    return parameter_of([jax.tree_util.DictKey(name) for name in names], parameters)

  assert owner("x", "a", "b") == owner("a", "b", "mu") == ("a", "b")
  assert owner("c", "d") == ("c",)
  assert owner("d") is None


def test_where_sizes_leave_a_choice_dims_come_in_the_parameters_order():
  axes = ("layers", "heads", "embed", "head_dim")
  assert shared_axes((4, 8, 4), (4, 4, 8, 4), axes) == ("layers", "embed", "head_dim")
  assert shared_axes((8, 4), (4, 4, 8, 4), axes) == ("embed", "head_dim")
  assert shared_axes((8, 4, 1, 4), (4, 4, 8, 4), axes) == ("embed", "head_dim", None, "layers")
