"""What a family of models is: its options in both directions, and the table of its tensors.

A family is one file of `families/`: mostly tables, and a Part where keys of config.json only make
sense together (positions, windows). Registered in registry.py.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from maxbatch.errors import UserError
from maxbatch.hugging_face.config_json import ConfigJson
from maxbatch.hugging_face.model_keys import PLAIN, differing
from maxbatch.hugging_face.tensors import Tensor

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
    """What it is called in messages."""
    return self.model_types[0]

  def options(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The model's keys of our configuration, all of them, from the values of a config.json.

    Raises:
      UserError: a value that is not computed here, or a key that would be ignored; `where` is the
        file that it names.
    """
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
    """The part of a config.json that is about the model of the text."""
    if self.text_key not in values:
      return values
    quantization = {"quantization_config": values.get("quantization_config")}
    return {**quantization, **ConfigJson(where, values, {}).mapping(self.text_key)}

  def config_json(self, model: Ours, max_target_length: int) -> dict[str, Any]:
    """The config.json of a model: what transformers must know to compute the same.

    Args:
      model: the model's keys of our configuration.
      max_target_length: tokens of a row, the context where max_position_embeddings gives none.

    Raises:
      UserError: the family has no model that computes this; names the key.
    """
    context = model["max_position_embeddings"]
    model = {**model, "max_position_embeddings": max_target_length if context < 0 else context}
    values = self._written(model)
    found = differing({**PLAIN, **self.options(values, f"a model of type {self.name}")}, model)
    if found is not None:
      key, value = found
      raise UserError(
        f"{key}={model[key]} cannot be said in the config.json of a model of type {self.name}, "
        f"which computes as {key}={value} does"
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

  def table(self, parameters: Collection[str]) -> tuple[Tensor, ...]:
    """The tensors of a model that has these parameters, by their paths (`layers.mlp.up.kernel`).

    Raises:
      UserError: a parameter has no place in this family's files.
    """
    given = set(parameters)
    tensors = tuple(each for each in self.tensors if given.issuperset(each.parameters))
    left = given.difference(*(each.parameters for each in tensors))
    if left:
      raise UserError(f"a model of type {self.name} has no tensor for {', '.join(sorted(left))}")
    return tensors

  def table_name(self, name: str) -> str | None:
    """What the table calls a tensor of a file; None for one that is no parameter."""
    if any(part in name for part in self.not_parameters):
      return None
    for theirs, ours in self.other_names.items():
      if name.startswith(theirs):
        return ours + name.removeprefix(theirs)
    return name


def _allowed(name: str, values: Collection[Any]) -> str:
  return "what works: " + " or ".join(f"{name}={json.dumps(value)}" for value in values)
