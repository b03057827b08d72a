"""The parameters that sampling reads: as they are stored, or, of a model in int8, each kernel rounded at once."""

import dataclasses
from typing import Any, cast

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from maxbatch.conversion.source import Source
from maxbatch.models.int8 import KERNEL, SCALE, in_int8
from maxbatch.models.registry import Model, Parameters, build_model, placed

_Flat = dict[tuple[str, ...], Any]


def read_parameters(source: Source, model: Model, mesh: Mesh) -> Parameters:
  """Reads those of a model's parameters that the source has, onto a mesh; all processes must call it.

  Of a model in int8 no more than one kernel, stacked over layers, is on the devices as it is stored.

  Raises:
    UserError: they are damaged, or another model's.
  """
  if not model.policy.int8_weights:
    source.check(model)
    return source.read(model, placed(model, mesh))
  policy = dataclasses.replace(model.policy, int8_weights=False)
  stored = build_model(model.config, model.max_target_length, policy=policy)
  source.check(stored)
  wanted, ours = (cast(_Flat, flatten_dict(placed(one, mesh))) for one in (stored, model))
  rounded = [path for path in wanted if (*path[:-1], SCALE) in ours and path[-1] == KERNEL]

  def read(*paths: tuple[str, ...]) -> _Flat:
    some = unflatten_dict({path: wanted[path] for path in paths})
    return cast(_Flat, flatten_dict(source.read(stored, some)))

  results = read(*(path for path in wanted if path not in rounded))
  for path in rounded:
    results |= _in_int8(read(path)[path], path, model, ours)
  return unflatten_dict(results)


def _in_int8(kernel: jax.Array, path: tuple[str, ...], model: Model, ours: _Flat) -> _Flat:
  """Returns a kernel in int8 and its scales, by their paths."""
  num_layers = int(model.axes()[path][0] == "layers")
  paths = {name: (*path[:-1], name) for name in (KERNEL, SCALE)}
  num_outputs = len(ours[paths[SCALE]].shape) - num_layers
  places = {name: ours[each].sharding for name, each in paths.items()}
  function = jax.jit(in_int8, static_argnums=(1, 2), out_shardings=places)
  return {paths[name]: array for name, array in function(kernel, num_outputs, num_layers).items()}
