"""What a run can begin with: the parameters of another run's checkpoint, or of a Hugging Face folder.

A run that begins so, and keeps some of its parameters frozen, does not save these with each of its
checkpoints: their record says where they are and what their fingerprints were, and whoever reads
such a checkpoint reads them there again.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from maxbatch.checkpoints import reading
from maxbatch.checkpoints.find import find_checkpoint, parameters_to_begin_with
from maxbatch.checkpoints.fingerprint import VERSION, fingerprints
from maxbatch.checkpoints.record import PARAMETERS, listed
from maxbatch.config.find import user_path
from maxbatch.conversion.reading import load_parameters, reader_of
from maxbatch.core.plan import Position
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import sync_errors
from maxbatch.hugging_face.registry import is_model_folder, read_folder
from maxbatch.models.float8 import AMAX
from maxbatch.models.lora import ADAPTER
from maxbatch.models.lora import Path as ParameterPath
from maxbatch.models.registry import Model, Parameters
from maxbatch.run_folder.paths import RunFolder

FROZEN = "frozen"
"""In a checkpoint's notes: the parameters that it does not hold, as `frozen_note` gives them."""


@dataclasses.dataclass(frozen=True)
class CheckpointSource:
  """A checkpoint of ours."""

  key: str
  folder: Path
  record: dict[str, Any]

  @property
  def position(self) -> Position:
    """The position that its run had reached."""
    return Position(self.record["step"], self.record["samples"])

  @property
  def model_keys(self) -> Mapping[str, Any]:
    """Keys of the configuration that its model has, and others."""
    return self.record["identity"]

  def check(self, model: Model, *, full: bool = False) -> None:
    """Reads no array. Raises UserError: it has other parameters than the model; names them.

    Args:
      model: of the run that begins with them.
      full: whether its optimizer state goes on too. Else the magnitudes that quantization=fp8 keeps
        may be on one side alone.
    """
    theirs, ours = self._sizes(), {_name(path): leaf.shape for path, leaf in _flat(model.shapes())}
    adapted = any(_named(name, *ADAPTER) for name in theirs)
    left_out = (*(() if adapted else ADAPTER), *(() if full else (AMAX,)))
    theirs, ours = (
      {x: side[x] for x in side if not _named(x, *left_out)} for side in (theirs, ours)
    )
    lines = [
      f"{name} is {_shown(theirs.get(name))} there and {_shown(ours.get(name))} in this run"
      for name in sorted(theirs.keys() | ours.keys())
      if theirs.get(name) != ours.get(name)
    ]
    if lines:
      raise UserError(
        f"{self.key}={self.folder} has other parameters than this run:\n{listed(lines)}\n"
        + self._advice(model, adapted=adapted)
      )

  def read(self, model: Model, wanted: Parameters) -> Parameters:
    """Reads those of the wanted parameters, ShapeDtypeStructs with shardings, that it has: not
    adapters, fresh without it, nor the magnitudes of another quantization. All processes must call
    it. Raises UserError: they are damaged."""
    flat, note = dict(_flat(wanted)), self._elsewhere
    names = {PARAMETERS + _name(path): path for path in flat}
    here = {name: flat[path] for name, path in names.items() if name in self.record["leaves"]}
    arrays = reading.read_leaves(self.key, self.folder, self.record, here)
    results: dict[ParameterPath, Any] = {names[name]: array for name, array in arrays.items()}
    missing = {path: leaf for path, leaf in flat.items() if _name(path) in note["leaves"]}
    if missing:
      run = self.folder.parent.parent
      results |= dict(_flat(read_frozen(note, model, unflatten_dict(missing), run)))
    return unflatten_dict(results)

  @property
  def _elsewhere(self) -> Mapping[str, Any]:
    return self.record.get("notes", {}).get(FROZEN, {"leaves": {}})

  def _sizes(self) -> dict[str, tuple[int, ...]]:
    saved = {
      name.removeprefix(PARAMETERS): leaf
      for name, leaf in self.record["leaves"].items()
      if name.startswith(PARAMETERS)
    }
    every = saved | dict(self._elsewhere["leaves"])
    return {name: tuple(leaf["shape"]) for name, leaf in every.items()}

  def _advice(self, model: Model, *, adapted: bool) -> str:
    identity = self.record["identity"]
    if adapted and not model.config.lora_rank:
      targets = f" lora_targets={identity['lora_targets']}" if identity.get("lora_targets") else ""
      return (
        f"Its adapters are no part of this run's model: give lora_rank={identity.get('lora_rank')}"
        f"{targets}, as they were trained, or merge them first: maxbatch convert to_hf=…"
      )
    run = self.folder.parent.parent
    return (
      f"The model's keys must be those of that run ({run / 'config.yml'} has them), or the "
      "parameters those of another run"
    )


@dataclasses.dataclass(frozen=True)
class HuggingFaceSource:
  """A folder with config.json and safetensors files."""

  key: str
  folder: Path

  @property
  def position(self) -> Position:
    return Position(0, 0)

  @property
  def model_keys(self) -> Mapping[str, Any]:
    return read_folder(self.folder)[1]

  def check(self, model: Model) -> None:
    reader_of(self.folder, model)

  def read(self, model: Model, wanted: Parameters) -> Parameters:
    with sync_errors():
      return load_parameters(self.folder, model, wanted)


Source = CheckpointSource | HuggingFaceSource
"""Where parameters are; of no use without a model that has them."""


def find_source(key: str, given: str) -> Path:
  """Finds the folder that `key=given` names: of a step, of a run, for its newest, or of a model.
  Raises UserError: there is nothing of the kind."""
  path = user_path(given)
  if is_model_folder(path):
    return path.absolute()
  return find_checkpoint(given, key, "; or a Hugging Face folder, with config.json")


def open_source(key: str, folder: Path) -> Source:
  """Opens the folder that `find_source` found. Raises UserError: its record cannot be read."""
  if is_model_folder(folder):
    return HuggingFaceSource(key, folder)
  return CheckpointSource(key, folder, reading.read_step_record(key, folder))


def frozen_note(source: Source, frozen: Parameters) -> dict[str, Any]:
  """Returns what the checkpoints of a run note of parameters that they do not hold, as JSON."""
  flat = {_name(path): leaf for path, leaf in _flat(frozen)}
  prints = fingerprints(flat)
  return {
    "folder": str(source.folder),
    "fingerprint_version": VERSION,
    "leaves": {
      name: {"shape": list(leaf.shape), "dtype": leaf.dtype.name, "fingerprint": prints[name]}
      for name, leaf in flat.items()
    },
  }


def read_frozen(
  note: Mapping[str, Any], model: Model, wanted: Parameters, run: Path, moved_to: str = ""
) -> Parameters:
  """Reads the parameters that a checkpoint does not hold, where they are, and verifies them.

  Args:
    wanted: ShapeDtypeStructs with shardings, in any dtypes.
    run: the folder of the run that wrote the checkpoint, where that is now.
    moved_to: the value of load_parameters_path, where they may be if not where they were.

  Raises UserError: they are not there, or not the same any more.
  """
  key, flat = "load_parameters_path", dict(_flat(wanted))
  with sync_errors():
    folder = frozen_folder(note, run, moved_to)
    source = open_source(key, folder)
  saved = {
    path: jax.ShapeDtypeStruct(
      leaf.shape, jnp.dtype(note["leaves"][_name(path)]["dtype"]), sharding=leaf.sharding
    )
    for path, leaf in flat.items()
  }
  results = {_name(path): array for path, array in _flat(source.read(model, unflatten_dict(saved)))}
  prints = fingerprints(results, note["fingerprint_version"])
  for name, leaf in note["leaves"].items():
    if name in prints and prints[name] != leaf["fingerprint"]:
      raise UserError(
        f"the frozen parameters in {folder} are not those that this run began with: {name} differs "
        "from its fingerprint; give load_parameters_path the folder as it was"
      )
  names = {_name(path): leaf for path, leaf in flat.items()}
  arrays = reading.cast(results, names).items()
  return unflatten_dict({tuple(name.split("/")): array for name, array in arrays})


def frozen_folder(note: Mapping[str, Any], run: Path, moved_to: str = "") -> Path:
  """Returns the folder of the parameters that a checkpoint does not hold: where they were, or moved
  with its run. Raises UserError: they are not to be found."""
  folder = Path(note["folder"])
  beside = run.parent.joinpath(*folder.parts[-3:])
  converted = parameters_to_begin_with(RunFolder(run).checkpoints) if folder.name == "0" else None
  for each in (folder, beside, converted):
    if each is not None and each.is_dir():
      return each
  if not moved_to:
    raise UserError(
      f"the frozen parameters of {run} are not in its checkpoints, but in {folder}, which does not "
      "exist; put it back, or say where it is, for example load_parameters_path=runs/first_run"
    )
  return find_source("load_parameters_path", moved_to)


def _flat(tree: Parameters) -> list[tuple[ParameterPath, Any]]:
  return list(cast(dict[ParameterPath, Any], flatten_dict(tree)).items())


def _name(path: ParameterPath) -> str:
  return "/".join(path)


def _named(name: str, *ends: str) -> bool:
  return name.rpartition("/")[2] in ends


def _shown(shape: tuple[int, ...] | None) -> str:
  return "(absent)" if shape is None else str(list(shape))
