"""The core's accumulation with a model of ours: its loss, its probes, and where its gradients lie.

k microbatches, B rows of a microbatch over all devices, T tokens.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding

from maxbatch.core.accumulate import (
  Accumulate,
  Accumulated,
  Squares,
  accumulate,
  sum_denominators,
  sum_forward,
)
from maxbatch.core.terms import Max, Stats, Sum, Terms
from maxbatch.core.topology import weight_groups
from maxbatch.hardware.sharding import constrain
from maxbatch.models.experts import TOKENS
from maxbatch.models.lora import Path
from maxbatch.models.registry import DENSE_LAYERS, Model, Parameters, Probed, by_path, joined
from maxbatch.training import partial_sums
from maxbatch.training.expert_load import counts_twice, tokens_of
from maxbatch.training.objective import AMAXES, PROBES, TEXT, Loss, noise_stats
from maxbatch.training.state import NOTHING, Measures, num_groups, zero_probe_squares

_PARAMS, _PROBES, _AMAX = "params", "probes", "amax"
"""What is differentiated by: a probe's gradient is Σ over microbatches of squared norms by row, that of a
projection's amax the largest of any microbatch."""


def model_accumulate(
  model: Model,
  mesh: Mesh,
  frozen: Parameters | None = None,
  measures: Measures = NOTHING,
  loss: Loss = TEXT,
  scale: jax.Array | None = None,
  *,
  places: Any = None,
) -> Accumulate:
  """Returns the function that sums a model's loss and gradients over microbatches.

  Args:
    frozen: the parameters that do not train, of which no gradient is formed; None: there are none.
    measures: what is summed up besides.
    scale: float32 scalar by which the gradients, not the loss, are multiplied; None: by nothing.
    places: the shardings of parameters that replicas divide among themselves, as their gradients then are;
      None: every replica has all.

  Its sums are in parts (…, F, S), for partial_sums.joined_sums.
  """
  loss_fn = functools.partial(_loss, model, loss, measures)
  squared = functools.partial(_squared, model) if measures.microbatch_squares else None
  accumulate_parts = accumulate(
    loss_fn if places is None else lambda params, *rest: loss_fn(_together(params), *rest),
    mesh,
    constants=(frozen or {}, scale),
    layout=functools.partial(_constrained, model),
    summand=functools.partial(_summands, model),
    squared_norm=squared and (lambda gradients: squared(_together(gradients))),
    divides=functools.partial(_divided, places) if places else None,
  )

  def run(
    params: Parameters,
    rows: Any,
    num_microbatches: Any,
    keys: jax.Array | None = None,
    *,
    zeros: Any = None,
    denominators: Any = None,
  ) -> Accumulated:
    local_rows = loss.rows(rows).inputs.shape[1] // mesh.shape["data"]
    tensor = mesh.shape["tensor"]
    probes = model.probes(local_rows, tensor)
    if places is not None:
      params, zeros = _apart(model, params, places), None
    if zeros is None:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    others: dict[str, Any] = {
      _PROBES: zero_probe_squares(model, (weight_groups(mesh.shape), tensor))
    }
    given: dict[str, Any] = {_PROBES: probes}
    if model.amax_buffers:
      params, given[_AMAX] = _without_amax(model, params)
      zeros, others[_AMAX] = _without_amax(model, zeros)
    result = accumulate_parts(
      {_PARAMS: params, **given},
      rows,
      num_microbatches,
      keys,
      zeros={_PARAMS: zeros, **others},
      denominators=denominators,
    )
    stats = dict(result.stats)
    if measures.noise(model):
      stats[PROBES] = Sum(result.gradients[_PROBES])
    gradients = _together(result.gradients[_PARAMS])
    if model.amax_buffers:
      each = {path: one.largest for path, one in result.gradients[_AMAX].items()}
      stats[AMAXES] = Max(each)
      zero = {path: jnp.zeros_like(one) for path, one in each.items()}
      gradients = unflatten_dict(flatten_dict(gradients) | zero)
    return result._replace(gradients=gradients, stats=stats)

  return run


def _without_amax(model: Model, tree: Parameters) -> tuple[Parameters, dict[Path, Max]]:
  flat = cast(dict[Path, Any], flatten_dict(tree))
  each = {path: Max(flat.pop(path)) for path in sorted(model.amax_buffers)}
  return unflatten_dict(flat), each


def _apart(model: Model, params: Parameters, places: Any) -> Parameters:
  """Returns the parameters with a list of layers in place of each stack whose layers replicas divide.

  In a stack the parts of a replica lie in as many places as it has layers, and messages begin with a copy;
  of a single layer they are one piece. The compiler finds each in the stack that the model takes apart.
  """
  axes = model.axes()

  def one(path: Sequence[Any], x: jax.Array, place: NamedSharding) -> Any:
    is_stack = axes[tuple(entry.key for entry in path)][:1] == ("layers",) and x.shape[0] > 1
    if model.config.scan_layers or not is_stack or "data" not in place.spec[1:]:
      return x
    return [layer.squeeze(0) for layer in jax.lax.split(x, (1,) * x.shape[0])]

  return jax.tree_util.tree_map_with_path(one, params, places)


def _is_apart(leaf: Any) -> bool:
  return isinstance(leaf, list)


def _together(tree: Any) -> Any:
  """Returns the stacks that `_apart` has made lists of."""
  return jax.tree.map(lambda x: jnp.stack(x) if _is_apart(x) else x, tree, is_leaf=_is_apart)


def _divided(places: Any, gradients: dict[str, Parameters]) -> list[bool]:
  """Returns, leaf by leaf, whether `data` alone divides the first dim. Of others, whose parts are in many
  places, a replica has the whole sum, of which the compiler takes its part."""

  def one(place: NamedSharding, gradient: Any) -> Any:
    spec = place.spec[1:] if _is_apart(gradient) else place.spec
    return jax.tree.map(lambda _: spec[:1] == ("data",), gradient)

  each = jax.tree.map(lambda _: False, gradients)
  each[_PARAMS] = jax.tree.map(one, places, gradients[_PARAMS])
  return jax.tree.leaves(each)


def dispatch_denominators(
  model: Model, mesh: Mesh, loss: Loss, dropout_key: jax.Array
) -> Callable[[Any, Parameters], dict[str, jax.Array]]:
  """Returns the function from what a dispatch is fed, and the parameters, to the denominators of its
  terms, by name, with the tokens of its experts if their balance needs those.

  Denominators do not depend on parameters: of zeros nothing is computed.
  """
  total = sum_denominators(
    functools.partial(_loss, model, loss, NOTHING), mesh, constants=({}, None)
  )
  tokens = dispatch_tokens(model, mesh, loss, dropout_key)

  def run(rows: Any, parameters: Parameters) -> dict[str, jax.Array]:
    k = loss.rows(rows).inputs.shape[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.shapes())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      results = total({_PARAMS: zeros, _PROBES: _probes(model, mesh, loss, rows)}, rows, k)
    return results | ({TOKENS: tokens(parameters, rows, k)} if counts_twice(model.config) else {})

  return run


def dispatch_tokens(
  model: Model, mesh: Mesh, loss: Loss, dropout_key: jax.Array
) -> Callable[[Parameters, Any, Any], jax.Array]:
  """Returns the function from parameters, what a dispatch is fed, and how many of its microbatches count
  to the tokens of each expert: a forward of all but the head."""
  total = sum_forward(
    functools.partial(_loss, model, loss, NOTHING),
    lambda terms, stats: tokens_of(stats),
    mesh,
    constants=({}, None),
  )

  def run(parameters: Parameters, rows: Any, num_microbatches: Any) -> jax.Array:
    keys = loss.keys(model, dropout_key, rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      given = {_PARAMS: parameters, _PROBES: _probes(model, mesh, loss, rows)}
      return total(given, rows, num_microbatches, keys)

  return run


def _probes(model: Model, mesh: Mesh, loss: Loss, rows: Any) -> Parameters:
  B = loss.rows(rows).inputs.shape[1]
  shapes = model.probes(B // mesh.shape["data"], mesh.shape["tensor"])
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _loss(
  model: Model,
  loss: Loss,
  measures: Measures,
  params: dict[str, Parameters],
  microbatch: Any,
  keys_B: jax.Array | None,
  constants: tuple[Parameters, jax.Array | None],
) -> tuple[Terms, Stats]:
  """Returns terms and statistics of a microbatch, with what the noise scale needs of its rows."""
  frozen, scale = constants
  whole, probes = joined(params[_PARAMS], frozen), params[_PROBES]
  if _AMAX in params:
    each = {path: one.largest for path, one in params[_AMAX].items()}
    whole = joined(whole, unflatten_dict(each))
  terms, stats = loss(model, whole, microbatch, keys_B, probes, measures.metrics, scale)
  if measures.noise(model):
    stats = {**stats, **noise_stats(loss.rows(microbatch))}
  return terms, stats


def _constrained(model: Model, gradients: dict[str, Parameters]) -> dict[str, Parameters]:
  """Returns the gradients, those of parameters laid out like them."""
  axes = model.axes()

  def one(path: Sequence[Any], gradient: Any) -> Any:
    names = axes[tuple(entry.key for entry in path)]
    if _is_apart(gradient):
      return [constrain(layer, names[1:]) for layer in gradient]
    return constrain(gradient, names)

  kept = jax.tree_util.tree_map_with_path(one, gradients[_PARAMS], is_leaf=_is_apart)
  return gradients | {_PARAMS: kept}


def _summands(model: Model, gradients: dict[str, Parameters]) -> dict[str, Parameters]:
  """Returns what a microbatch adds: rounded gradients, and its rows' squares in parts."""
  return gradients | {
    _PARAMS: jax.tree.map(model.policy.summand, gradients[_PARAMS]),
    _PROBES: jax.tree.map(partial_sums.of_rows, gradients[_PROBES]),
  }


def _squared(model: Model, gradients: dict[str, Parameters]) -> jax.Array:
  return group_squares(model, flat_gradients(gradients[_PARAMS]))


def flat_gradients(gradients: Parameters) -> dict[Path, jax.Array]:
  """Returns gradients by the path of their parameter."""
  flat = dict[Path, jax.Array]()
  by_path(lambda path, gradient: flat.update({path: gradient}), gradients)
  return flat


def group_squares(
  model: Model, gradients: Mapping[Path, jax.Array], layers: Any = None
) -> jax.Array:
  """Returns the squared norm of all gradients, in parts (F, S).

  Of a mixture of experts in groups (2 + L·E, F, S), which add up to it: of all that belongs to neither a
  router nor an expert, of the routers, and of each expert in each layer.

  Args:
    layers: int[number of layers in the gradients], which layers of the model these are; None: all, in order.
  """
  axes, E = model.axes(), model.config.num_experts
  if not (groups := num_groups(model)):
    squares = [partial_sums.of_squares(g, axes[path]) for path, g in gradients.items()]
    return functools.reduce(jnp.add, squares)
  routers, experts = ("layers", "mlp", "router"), ("layers", "mlp", "experts")
  sums = jnp.zeros((groups, *partial_sums.of_one(jnp.zeros(())).shape))
  for path, gradient in gradients.items():
    if path[:3] == experts:
      squares_LE = partial_sums.of_squares(gradient, axes[path], 2)
      which = np.arange(gradient.shape[0]) if layers is None else layers
      at_LE = 2 + which[:, None] * E + np.arange(E)[None]
      sums = sums.at[at_LE].add(squares_LE)
    else:
      sums = sums.at[int(path[:3] == routers)].add(partial_sums.of_squares(gradient, axes[path]))
  return sums


def expert_squares(
  model: Model, squares: Squares | None, of_step: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
  """Returns `group_squares` by microbatch and of the step, [2] of the routers and [2, L, E]."""
  if squares is None or of_step is None:
    return None
  both_2G = jnp.stack([squares.of_microbatches, of_step])
  return both_2G[:, 1], both_2G[:, 2:].reshape(2, -1, model.config.num_experts)


def probe_squares(
  model: Model, gradients: Parameters, layers: np.ndarray | None = None
) -> Parameters:
  """Returns, for every probe, the squares of the gradients of what it measures, in parts, by layer of the model.

  Args:
    layers: as above, of the layers that a pipeline's stages divide.
  """
  axes, flat = model.axes(), flat_gradients(gradients)

  def of(probed: Probed) -> jax.Array:
    lead = 1 if probed.num_layers else 0
    squares = [partial_sums.of_squares(flat[path], axes[path], lead) for path in probed.parameters]
    total = functools.reduce(jnp.add, squares)
    if layers is None or not lead or probed.path[0] == DENSE_LAYERS:
      return total
    return total[np.argsort(layers)]

  structure = jax.tree.structure(model.probes(1, 1))
  return jax.tree.unflatten(structure, [of(probed) for probed in model.probed()])
