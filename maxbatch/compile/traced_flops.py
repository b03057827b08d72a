"""Floating-point operations: what a model asks for, and what a traced step will do.

Only matrix products count, 2 FLOPs for a multiplication and its addition; of causal attention only
the half below the diagonal, as MaxText and most published utilisations count.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from maxbatch.config.schema import attention_width
from maxbatch.estimate.attention_kernels import (
  JOINT_SPLASH_PRODUCTS,
  SPLASH_PRODUCTS,
  splash_share,
)
from maxbatch.estimate.flops import CUDNN_PRODUCTS, attention_pairs, tokens_seen
from maxbatch.models.attention import sliding_layers
from maxbatch.models.registry import Model, active_share
from maxbatch.pipeline_parallel.sizes import EVERY_TICK, operation_in_path


class StepFlops(NamedTuple):
  """Of matrix products."""

  per_microbatch: float
  """One iteration of the loop over microbatches."""
  rest: float
  """A step outside that loop."""
  by_tick_work: Mapping[str, float] = MappingProxyType({})
  """The part of `per_microbatch` that each conditional work of a pipeline's tick does."""

  @property
  def total(self) -> float:
    """FLOPs of a step of one microbatch."""
    return self.per_microbatch + self.rest

  def divided(self, ways: int) -> "StepFlops":
    """Returns what each of so many devices does."""
    by_work = {work: flops / ways for work, flops in self.by_tick_work.items()}
    return StepFlops(self.per_microbatch / ways, self.rest / ways, by_work)


_Places = Mapping[tuple[bool, str], float]
"""FLOPs by place: whether inside of the loop over microbatches, and in which work of a tick."""


def model_flops_per_token(model: Model, length: int) -> float:
  """Returns FLOPs that training on one token needs, forward and backward, nothing computed twice.

  6 for every parameter that takes part in a matrix product, 4 where it is frozen and has no gradient
  of its own, of experts those alone that a token is sent to, and in each layer 12 · width of all heads · tokens seen on average (Chowdhery et al.
  2022, appendix B, with the causal half).
  """
  config = model.config
  tables = 0 if config.logits_via_embedding else 1  # an untied embedding is looked up, no product
  leaves = jax.tree_util.tree_leaves_with_path(model.shapes())
  shapes = {tuple(entry.key for entry in path): leaf.shape for path, leaf in leaves}
  matrices = sum(
    (4 if path in model.frozen else 6) * math.prod(shapes[path]) * active_share(config, axes)
    for path, axes in model.axes().items()
    if len([axis for axis in axes if axis != "layers"]) > 1
    and axes[0] != "position"
    and path[-1] not in ("bias", "scale")
    and not (tables and axes[0] == "vocab")
  )
  sliding = int(sliding_layers(config).sum())
  layers = {config.sliding_window_size: sliding, 0: config.base_num_decoder_layers - sliding}
  seen = sum(number * tokens_seen(window, length) for window, number in layers.items())
  return matrices + 12 * attention_width(config) * seen


def step_flops(traced: core.ClosedJaxpr) -> StepFlops:
  """Returns what the traced step does on all devices together, whatever the compiler makes of it.

  The loop whose number of iterations is data is the loop over microbatches. Of a conditional the branch with
  the most counts.
  """
  places = _flops(traced.jaxpr)
  inside = {work: flops for (in_loop, work), flops in places.items() if in_loop}
  outside = sum(flops for (in_loop, _), flops in places.items() if not in_loop)
  by_work = {work: flops for work, flops in inside.items() if work != EVERY_TICK}
  return StepFlops(sum(inside.values()), outside, by_work)


def named_bytes(jaxpr: core.Jaxpr) -> dict[str, int]:
  """Returns bytes, on all devices, of what a layer names for its remat_policy (models/remat.py).

  A name for several arrays, as attention's output with its normalizers, counts all of them, each once.
  """
  arrays: dict[str, set[Any]] = collections.defaultdict(set)
  _collect_named(jaxpr, 1, arrays)
  return {name: sum(size for _, size in found) for name, found in arrays.items()}


def _collect_named(jaxpr: core.Jaxpr, ways: int, arrays: dict[str, set[Any]]) -> None:
  """Adds shapes and bytes of named arrays; `ways` devices run this code, each on a part of them."""
  for equation in jaxpr.eqns:
    name, parameters = equation.primitive.name, equation.params
    if name == "name":
      aval: Any = equation.outvars[0].aval
      size = ways * math.prod(aval.shape) * aval.dtype.itemsize
      arrays[parameters["name"]].add(((aval.shape, aval.dtype.name), size))
    more = _times(name, parameters) if name == "shard_map" else 1
    for each in core.jaxprs_in_params(parameters):
      _collect_named(each, ways * more, arrays)


def _flops(jaxpr: core.Jaxpr, is_used: Iterable[bool] = itertools.repeat(True)) -> _Places:
  """Returns the FLOPs of what some results depend on; a compiler drops the rest."""
  used = {id(one) for one, yes in zip(jaxpr.outvars, is_used, strict=False) if yes}
  parts: list[_Places] = []
  for equation in reversed(jaxpr.eqns):
    results = [id(one) in used for one in equation.outvars]
    if any(results) or equation.effects:
      used.update(map(id, equation.invars))
      parts.append(_of_equation(equation, results))
  return _added(parts)


def _of_equation(equation: Any, is_used: Iterable[bool]) -> _Places:
  name, parameters = equation.primitive.name, equation.params
  if name == "dot_general":
    return {(False, EVERY_TICK): _product(equation)}
  if name == "ragged_dot_general":
    return {(False, EVERY_TICK): _grouped(equation)}
  if name == "pallas_call":
    stated = equation.params["cost_estimate"]
    return {(False, EVERY_TICK): stated.flops if stated else _splash(equation)}
  if name.startswith("dot_product_attention_"):
    return {(False, EVERY_TICK): _cudnn(equation)}
  if name == "while":
    return _moved(_flops(_needed_body(parameters, is_used)), in_loop=True)
  if name == "cond":
    branches = [_flops(branch.jaxpr) for branch in parameters["branches"]]
    work = operation_in_path(str(equation.source_info.name_stack))
    return _moved(max(branches, key=lambda places: sum(places.values())), work=work)
  # A loop of one iteration carries nothing to another: of a stage of one layer, what no other layer reads.
  is_whole = name != "scan" or parameters["length"] == 1
  within = is_used if is_whole else itertools.repeat(True)
  parts = [_flops(each, within) for each in core.jaxprs_in_params(parameters)]
  times = _times(name, parameters)
  return {place: times * flops for place, flops in _added(parts).items()}


def _needed_body(parameters: dict[str, Any], is_used: Iterable[bool]) -> core.Jaxpr:
  """Returns the part of a loop's body that some of its results need, after any number of iterations.

  (In a loop over denominators, which do not depend on parameters, the model is not needed.)
  """
  body, constants = parameters["body_jaxpr"].jaxpr, parameters["body_nconsts"]
  _, by_condition = dce_jaxpr(parameters["cond_jaxpr"].jaxpr, [True])
  decides = by_condition[parameters["cond_nconsts"] :]
  used = [a or b for a, b in zip(decides, is_used, strict=False)]
  while True:
    needed_body, inputs = dce_jaxpr(body, used)
    carried = [a or b for a, b in zip(used, inputs[constants:], strict=True)]
    if carried == used:
      return needed_body
    used = carried


def _moved(places: _Places, *, in_loop: bool = False, work: str = EVERY_TICK) -> _Places:
  """Returns the places as seen from outside of a loop, or of a part of the work: an inner one's
  name stays."""
  return _added(
    {(in_loop or inside, inner or work): flops} for (inside, inner), flops in places.items()
  )


def _added(parts: Iterable[_Places]) -> _Places:
  """Adds place by place."""
  total: dict[tuple[bool, str], float] = collections.defaultdict(float)
  for part in parts:
    for place, flops in part.items():
      total[place] += flops
  return total


def _times(name: str, parameters: dict[str, Any]) -> int:
  """Returns how often what an equation contains is executed, over all devices."""
  if name == "scan":
    return parameters["length"]
  if name == "shard_map":
    return math.prod(parameters["mesh"].shape[axis] for axis in parameters["newly_manual_axes"])
  return 1


def _product(equation: Any) -> float:
  """Returns 2 · size of the result · contracted size."""
  (contracted, _), _ = equation.params["dimension_numbers"]
  left = equation.invars[0].aval.shape
  result = math.prod(equation.outvars[0].aval.shape)
  return 2.0 * result * math.prod(left[axis] for axis in contracted)


def _grouped(equation: Any) -> float:
  """Returns the FLOPs of a product whose rows each meet the matrix of their group, and no other.

  All rows count, as in the kernel's own estimate, also where groups leave some out.
  """
  numbers = equation.params["ragged_dot_dimension_numbers"]
  (_, contracted), (_, batch) = numbers.dot_dimension_numbers
  left, right = (each.aval.shape for each in equation.invars[:2])
  taken = {*contracted, *batch, *numbers.rhs_group_dimensions}
  return 2.0 * math.prod(left) * math.prod(n for axis, n in enumerate(right) if axis not in taken)


def _cudnn(equation: Any) -> float:
  """Returns the FLOPs of cuDNN's causal attention of one device's queries (B, T, N, H), keys (B, S, K, H)."""
  count = CUDNN_PRODUCTS["backward" if "_bwd" in equation.primitive.name else "forward"]
  B, T, N, H = equation.invars[0].aval.shape
  window = equation.params["sliding_window_length"] or 0
  pairs = attention_pairs(T, equation.invars[1].aval.shape[1], window)
  return 2.0 * count * B * N * H * pairs


def _splash(equation: Any) -> float:
  """Returns the FLOPs of a flash attention kernel on one device.

  Queries (…, N, T, H) and keys (…, K, S, H) are its first operands that are not of integers, and the very
  first is a grid of blocks to visit, see `splash_share`.
  """
  products = next(
    (count for word, count in SPLASH_PRODUCTS.items() if f"_{word}_" in equation.params["name"]), 0
  )
  operands = [each.aval for each in equation.invars]
  floats = [each.shape for each in operands if jnp.issubdtype(each.dtype, jnp.floating)]
  queries, whole = floats[0], floats[1][-2]
  is_joint = any(each.aval.ndim > len(queries) for each in equation.outvars)
  products = JOINT_SPLASH_PRODUCTS if is_joint else products
  rows, columns = operands[0].shape[-2:]
  counted, _ = splash_share(queries[-2], whole, rows, columns, is_joint=is_joint)
  return products * 2.0 * math.prod(queries) * whole * counted
