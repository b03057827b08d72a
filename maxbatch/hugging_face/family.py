"""What a family of models is: its options in both directions, and the table of its tensors.

A family is mostly tables, and a Part where keys of config.json only make sense together (positions,
windows); those that several families share are here. Registered in registry.py.

Parameters of ours are named by their path, `layers.attention.query.kernel`, and those of the layers
are stacked along a leading dim, of which a tensor of theirs holds one layer: shapes here are without it.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from maxbatch.errors import UserError
from maxbatch.hugging_face.model_keys import (
  PLAIN,
  ConfigJson,
  differing,
  layer_types,
  shortest_pattern,
)

Shape = tuple[int, ...]
Array = Any
"""An array of numpy, jax, or whatever else has the array API."""


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One of their tensors, and the parameters that it holds."""

  name: str
  """Theirs; `{}` stands for the number of the layer, a second one for that of the expert."""
  parameters: tuple[str, ...]
  """Paths of ours; several lie side by side along the outputs, as GPT-2's fused projections do."""
  in_dims: int
  """Leading dims of ours that are the inputs of a matrix, the others are its outputs; 0: a vector."""
  transposed: bool
  """Whether theirs is (outputs, inputs), as torch's Linear keeps it."""
  first_layer: int = 0
  """The number of the first of the stacked layers in the model."""

  @property
  def is_layered(self) -> bool:
    """Whether there is one for each layer."""
    return "{}" in self.name

  @property
  def stacked_dims(self) -> int:
    """How many dims of ours come before those of one tensor of theirs: of layers, and of experts."""
    return self.name.count("{}")

  def names(self, sizes: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns every tensor's name, and where it lies in the stacked dims, which are `sizes`."""
    places = itertools.product(*(range(size) for size in sizes[: self.stacked_dims]))
    return [(self._name(*place), place) for place in places]

  def _name(self, *place: int) -> str:
    return self.name.format(*(place and (place[0] + self.first_layer, *place[1:])))

  def shape(self, shapes: Sequence[Shape]) -> Shape:
    """Returns the shape of their tensor, where those of our parameters are `shapes`."""
    outputs = sum(math.prod(shape[self.in_dims :]) for shape in shapes)
    if not self.in_dims:
      return (outputs,)
    inputs = math.prod(shapes[0][: self.in_dims])
    return (outputs, inputs) if self.transposed else (inputs, outputs)

  def theirs(self, ours: Sequence[Array]) -> Array:
    """Returns their tensor, of our parameters; a view of ours where that is possible."""
    parts = [each.reshape(self._flat(each.shape)) for each in ours]
    several = len(parts) > 1
    joined = parts[0].__array_namespace__().concat(parts, axis=-1) if several else parts[0]
    return joined.T if self.transposed else joined

  def ours(self, theirs: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Returns our parameters of `shapes`, of their tensor, whose shape is `self.shape(shapes)`."""
    joined = theirs.T if self.transposed else theirs
    result, start = [], 0
    for shape in shapes:
      end = start + math.prod(shape[self.in_dims :])
      result.append(joined[..., start:end].reshape(shape))
      start = end
    return result

  def _flat(self, shape: Shape) -> Shape:
    outputs = math.prod(shape[self.in_dims :])
    return (math.prod(shape[: self.in_dims]), outputs) if self.in_dims else (outputs,)


def vector(name: str, *parameters: str) -> Tensor:
  """Maps a bias, or the scale of a norm."""
  return Tensor(name, parameters, in_dims=0, transposed=False)


def linear(name: str, *parameters: str, in_dims: int = 1) -> Tensor:
  """Maps the matrix of a torch Linear: (outputs, inputs)."""
  return Tensor(name, parameters, in_dims, transposed=True)


@dataclasses.dataclass(frozen=True)
class Interleaved(Tensor):
  """One of theirs of the shape of ours but for the last dim, in which several of ours take turns."""

  def shape(self, shapes: Sequence[Shape]) -> Shape:
    return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

  def theirs(self, ours: Sequence[Array]) -> Array:
    stacked = ours[0].__array_namespace__().stack(list(ours), axis=-1)
    return stacked.reshape(self.shape([each.shape for each in ours]))

  def ours(self, theirs: Array, shapes: Sequence[Shape]) -> list[Array]:
    return [theirs[..., number :: len(shapes)] for number in range(len(shapes))]


def interleaved(name: str, *parameters: str) -> Interleaved:
  """Maps a tensor that holds the matrices, or biases, of all experts of a layer."""
  return Interleaved(name, parameters, in_dims=0, transposed=False)


def matrix(name: str, *parameters: str, in_dims: int = 1) -> Tensor:
  """Maps a matrix (inputs, outputs), as GPT-2's Conv1D and all embeddings are."""
  return Tensor(name, parameters, in_dims, transposed=False)


Ours = Mapping[str, Any]
"""Keys of our configuration; others than those of the model are ignored."""


@dataclasses.dataclass(frozen=True)
class Part:
  """Keys that are read and written together."""

  read: Callable[[ConfigJson], dict[str, Any]]
  """Their values to ours. What it reads counts as known."""
  write: Callable[[Ours], dict[str, Any]]
  """Ours to theirs; what theirs cannot say may be left out: Family.config_json notices."""


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models as transformers knows it."""

  model_types: tuple[str, ...]
  """Values of model_type in config.json that are read; the first is written."""
  architectures: tuple[str, ...]
  """Likewise of its `architectures`."""
  same: Mapping[str, str]
  """Keys of theirs that are keys of ours under another name."""
  tensors: tuple[Tensor, ...]
  """All that a model of this family may have; what its options leave out is not looked for."""
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """What transformers takes where config.json says nothing."""
  constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Keys of ours that are the same in all of the family; the others are as in PLAIN."""
  choices: Mapping[str, tuple[str, Mapping[str, str]]] = dataclasses.field(default_factory=dict)
  """Keys of theirs with the key of ours, and which of their values is which of ours."""
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Keys of theirs with the only value that is computed here."""
  parts: tuple[Part, ...] = ()
  harmless: frozenset[str] = frozenset()
  """Keys of theirs that the model does not compute with, beside config_json.HARMLESS."""
  text_key: str = ""
  """Where a config.json of several models keeps that of the text; empty: nowhere."""
  other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Beginnings of tensors' names as some files have them, and those of the table."""
  not_parameters: tuple[str, ...] = ()
  """Parts of the names of tensors that are no parameters of the text's model, such as masks."""

  @property
  def name(self) -> str:
    return self.model_types[0]

  def options(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns all keys of our model from the values of a config.json. Raises UserError: a value
    that is not computed here, or a key that would be ignored; names the file `where`."""
    theirs = ConfigJson(where, self._text(values, where), self.defaults)
    if theirs["quantization_config"] is not None:
      raise theirs.refusal("quantization_config", "take the folder with the weights as trained")
    ours = {key: theirs[name] for name, key in self.same.items()}
    for name, (key, values_of) in self.choices.items():
      value = theirs.word(name)
      if value is None or value not in values_of:
        raise theirs.refusal(name, f"not supported; {_allowed(name, values_of)}")
      ours[key] = values_of[value]
    for name, value in self.fixed.items():
      if theirs[name] not in (value, None):
        raise theirs.refusal(name, f"not supported; {_allowed(name, [value])}")
    for part in self.parts:
      ours |= part.read(theirs)
    for name in self.harmless:
      theirs[name]
    theirs.refuse_unread(self.name)
    missing = next((name for name, key in self.same.items() if ours[key] is None), None)
    if missing is not None:
      raise theirs.refusal(missing, "a value is needed")
    return {**PLAIN, **self.constants, **ours}

  def _text(self, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if self.text_key not in values:
      return values
    quantization = {"quantization_config": values.get("quantization_config")}
    return {**quantization, **ConfigJson(where, values, {}).mapping(self.text_key)}

  def config_json(self, model: Ours, max_target_length: int) -> dict[str, Any]:
    """Returns the config.json of a model: what transformers must know to compute the same.

    Args:
      max_target_length: tokens of a row, the context where max_position_embeddings gives none.

    Raises UserError: the family has no model that computes this; names the key.
    """
    context = model["max_position_embeddings"]
    model = {**model, "max_position_embeddings": max_target_length if context < 0 else context}
    values = self._written(model)
    result = differing({**PLAIN, **self.options(values, f"a model of type {self.name}")}, model)
    if result is not None:
      key, value = result
      raise UserError(
        f"{key}={model[key]} cannot be expressed in the config.json of a model of type "
        f"{self.name}, which computes as {key}={value} does"
      )
    return values

  def _written(self, model: Ours) -> dict[str, Any]:
    theirs = {"architectures": [self.architectures[0]], "model_type": self.model_types[0]}
    theirs |= {name: model[key] for name, key in self.same.items()}
    for name, (key, values_of) in self.choices.items():
      by_ours = {ours: value for value, ours in reversed(list(values_of.items()))}
      theirs |= {name: by_ours[model[key]]} if model[key] in by_ours else {}
    for part in self.parts:
      theirs |= part.write(model)
    return theirs

  def table(self, parameters: Collection[str], dense_layers: int = 0) -> tuple[Tensor, ...]:
    """Returns the tensors of a model that has these parameters, by their paths
    (`layers.mlp.up.kernel`), and so many first layers without experts (`dense_layers.mlp.up.kernel`).
    Raises UserError: a parameter has no place in this family's files."""
    given = set(parameters)
    tensors = tuple(each for each in self.tensors if given.issuperset(each.parameters))
    if dense_layers:
      tensors = tuple(
        dataclasses.replace(each, first_layer=dense_layers)
        if each.parameters[0].startswith("layers.")
        else each
        for each in tensors
      )
    left = given.difference(*(each.parameters for each in tensors))
    if left:
      raise UserError(
        f"a model of type {self.name} has no tensor for {', '.join(sorted(left))}, which the "
        "configuration's keys give this model; leave out those that change its shape, such as num_experts"
      )
    return tensors

  def table_name(self, name: str) -> str | None:
    """Returns the table's name of a tensor of a file; None for one that is no parameter."""
    if any(part in name for part in self.not_parameters):
      return None
    for theirs, ours in self.other_names.items():
      if name.startswith(theirs):
        return ours + name.removeprefix(theirs)
    return name


def _allowed(name: str, values: Collection[Any]) -> str:
  return "what works: " + " or ".join(f"{name}={json.dumps(value)}" for value in values)


def _read_heads(theirs: ConfigJson) -> dict[str, Any]:
  heads, kv_heads, width = (
    theirs[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
  )
  if width is None:
    width = theirs.integer("hidden_size") // theirs.integer("num_attention_heads")
  return {"base_num_kv_heads": heads if kv_heads is None else kv_heads, "head_dim": width}


HEADS = Part(
  _read_heads,
  lambda ours: {"num_key_value_heads": ours["base_num_kv_heads"], "head_dim": ours["head_dim"]},
)
"""Key/value heads, as many as the others if not said, and the width of a head."""


BIASES = Part(
  lambda theirs: dict.fromkeys(
    ("attention_qkv_bias", "attention_out_bias"), theirs["attention_bias"]
  ),
  lambda ours: {"attention_bias": ours["attention_qkv_bias"]},
)


_KINDS = ("sliding_attention", "full_attention")


def read_layer_types(
  theirs: ConfigJson, window: int | None, kinds: Sequence[str]
) -> dict[str, Any]:
  """Returns our keys for a window that the layers of sliding attention have; `kinds` is each
  layer's. Raises UserError: other kinds, or not as many as layers."""
  given = theirs["layer_types"]
  if given is not None:
    kinds = given if isinstance(given, list) else ()
  if len(kinds) != theirs.num_layers or any(kind not in _KINDS for kind in kinds):
    raise theirs.refusal("layer_types", f"a list is needed, of one of {_KINDS} for each layer")
  if window is None or "sliding_attention" not in kinds:
    return {"sliding_window_size": 0, "layer_types": ()}
  pattern = shortest_pattern(kinds)
  layer_types = () if pattern == ("sliding_attention",) else pattern
  return {"sliding_window_size": window, "layer_types": layer_types}


def written_layer_types(ours: Ours) -> list[str]:
  num_layers = ours["base_num_decoder_layers"]
  if not ours["sliding_window_size"]:
    return ["full_attention"] * num_layers
  return list(layer_types(ours["layer_types"] or _KINDS[:1], num_layers))
