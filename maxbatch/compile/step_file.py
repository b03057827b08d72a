"""Compiled steps in a file, which is refused for any run that would compile others.

The file: a magic line; length and SHA-256 of a JSON header; the header; the programs, one per
microbatch. The header says what the programs were made from, and each program's length and SHA-256.
A file is refused when this run lowers another program or compiles it otherwise; versions, devices and
keys that differ are named before anything of the file is executed.

The programs are pickles around machine code, so loading one runs what its author wanted: use files
of people you trust. The checksums find damage, not malice.
"""

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

import jax
from jax.experimental import serialize_executable

from maxbatch.compile.step_identity import (
  CONFIGURATION,
  ENVIRONMENT,
  LIBRARIES,
  LOWERED,
  SIZES,
  header,
)
from maxbatch.config.find import user_path
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import RowSource
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import nearest, replacing
from maxbatch.training.step import Step, Trainer

_KIND = b"maxbatch compiled step "
_MAGIC = _KIND + b"2\n"
_LENGTH_BYTES, _HASH_BYTES = 8, 32


class _Opened(NamedTuple):
  """The parts of a file: what the programs were made from, and where each of them lies."""

  made_from: dict[str, Any]
  programs: list[dict[str, Any]]
  payloads: BinaryIO


class _DamagedError(Exception):
  """The file is not what was written; the message says how."""


def save(
  path: str, header: Mapping[str, object], programs: Mapping[int, jax.stages.Compiled]
) -> None:
  """Writes the compiled steps, by microbatch, to `path`; it appears there whole or not at all.

  On CPU the programs must come from the compiler, not from the compilation cache
  (`bypassed`). With several processes, process 0 alone should call this.

  Raises:
    UserError: the file cannot be written, or a program cannot be saved.
  """
  payloads = {size: _payload(path, program) for size, program in programs.items()}
  described = [
    {"micro_batch": size, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for size, data in payloads.items()
  ]
  text = json.dumps({"made_from": dict(header), "programs": described}).encode()
  try:
    with replacing(user_path(path)) as file:
      file.write(_MAGIC + len(text).to_bytes(_LENGTH_BYTES, "big"))
      file.write(hashlib.sha256(text).digest() + text)
      for data in payloads.values():
        file.write(data)
  except OSError as error:
    raise UserError(
      f"save_compiled_step={path}: cannot be written: {error.strerror or error}; name a file in a "
      "folder you can write to, with room for it"
    ) from error


def check_saves(path: str) -> None:
  """Checks that what `save_compiled_step` names can be made, or is a compiled step.

  Raises:
    UserError: it is another file, a folder or a pipe, or its folder cannot be made or written.
  """
  file = user_path(path)
  if not file.exists():
    there = nearest(file.absolute().parent)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
      raise UserError(
        f"save_compiled_step={path}: cannot be written: {there} is no folder that can be written to; "
        f"for example save_compiled_step={file.name}"
      )
    return
  kind = b""
  if file.is_file():
    with contextlib.suppress(OSError), open(file, "rb") as opened:
      kind = opened.read(len(_MAGIC))
  if not kind.startswith(_KIND):
    raise UserError(
      f"save_compiled_step={path}: the existing file is not a compiled step and would be "
      f"overwritten; name another file, for example save_compiled_step={path.rstrip('/')}.compiled"
    )


def load(path: str, header: Mapping[str, object] | None) -> dict[int, jax.stages.Compiled]:
  """Returns the compiled steps of a file by microbatch, loaded onto the devices of this process.

  Args:
    header: what this run would make its programs from; None: what the file was made from.

  Raises:
    UserError: there is no such file, it is damaged, or it was made for another run; names what
      differs.
  """
  return {size: _program(path, payload) for size, payload in _payloads(path, header).items()}


def check_loads_step(config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource) -> None:
  """Checks that the file compiled_step holds this run's steps; loads none of them.

  Raises:
    UserError: as `load`.
  """
  _payloads(config.compile.compiled_step, header(config, plan, trainer, source))


def _payloads(path: str, header: Mapping[str, object] | None) -> dict[int, bytes]:
  """Returns the programs of a file by microbatch, pickled. Raises UserError: as `load`."""
  with _reading(path) as opened:
    if header and (lines := differences(opened.made_from, json.loads(json.dumps(dict(header))))):
      listed = "\n".join(f"  {line}" for line in lines)
      raise UserError(
        f"compiled_step={path} was compiled for another run:\n{listed}\nSet these back, or compile "
        f"for this run: leave out compiled_step, or replace it by save_compiled_step={path}"
      )
    return {entry["micro_batch"]: _read(opened, entry) for entry in opened.programs}


def made_from(path: str) -> dict[str, Any]:
  """Returns what the programs of a file were made from.

  Raises:
    UserError: there is no such file, or its header is damaged.
  """
  with _reading(path) as opened:
    return opened.made_from


def differences(file: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
  """Returns why a file's programs are not this run's, a line each; headers as JSON gives them back.

  A file may hold programs that a run no longer needs, as one resumed in a later phase does.
  """
  result = _differing(file[ENVIRONMENT], run[ENVIRONMENT])
  lowered = file[LOWERED]
  if all(lowered.get(size) == digest for size, digest in run[LOWERED].items()):
    return result
  named = [
    line for part in (SIZES, CONFIGURATION, LIBRARIES) for line in _differing(file[part], run[part])
  ]
  result += named
  return result or ["the code: the same keys and versions make another program"]


def _differing(file: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
  absent = "nothing"
  return [
    f"{key}: the file has {_shown(file.get(key, absent))}, this run {_shown(run.get(key, absent))}"
    for key in {**run, **file}
    if file.get(key, absent) != run.get(key, absent)
  ]


def _shown(value: Any) -> str:
  if isinstance(value, list):
    return ", ".join(map(_shown, value)) or "none"
  return {"": "''", None: "none"}.get(value, str(value))


@contextlib.contextmanager
def _reading(path: str) -> Iterator[_Opened]:
  """Opens the file that `compiled_step` names; errors in it are said in the words of the keys."""
  file_path = user_path(path)
  try:
    if file_path.is_fifo():
      raise _DamagedError("this is a pipe, not a file")
    with file_path.open("rb") as file:
      yield _open(file)
  except OSError as error:
    raise UserError(
      f"compiled_step={path}: cannot be read: {error.strerror or error}; save_compiled_step={path} "
      "writes it"
    ) from error
  except _DamagedError as damage:
    raise UserError(
      f"compiled_step={path}: {damage}; write it again with save_compiled_step={path}"
    ) from damage


def _open(file: BinaryIO) -> _Opened:
  """Reads and checks all but the programs."""
  if file.read(len(_MAGIC)) != _MAGIC:
    raise _DamagedError("this is not a compiled step, or one of another version")
  length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
  digest = file.read(_HASH_BYTES)
  # A damaged length may ask for more than there is memory.
  text = file.read(min(length, os.fstat(file.fileno()).st_size))
  if hashlib.sha256(text).digest() != digest:
    raise _DamagedError("its header is damaged or cut short")
  header = json.loads(text)
  return _Opened(header["made_from"], header["programs"], file)


def _read(opened: _Opened, entry: dict[str, Any]) -> bytes:
  """Returns the next program's bytes, which are what was written."""
  data = opened.payloads.read(entry["bytes"])
  if len(data) != entry["bytes"]:
    raise _DamagedError("it is cut short")
  if hashlib.sha256(data).hexdigest() != entry["sha256"]:
    raise _DamagedError(f"its program for microbatches of {entry['micro_batch']} is damaged")
  return data


def _payload(path: str, program: jax.stages.Compiled) -> bytes:
  """Returns a program and the structure of its arguments and results, as bytes."""
  saved = serialize_executable.serialize(program)
  # The device need not be here.
  device = next(iter(jax.tree.leaves(program.output_shardings)[0].device_set))
  if device.platform == "cpu" and _is_hollow(saved):
    raise UserError(
      f"save_compiled_step={path}: this step was loaded from a cache or a file, which XLA "
      "cannot save again on CPU; leave out compiled_step, and use jax_cache_dir=none"
    )
  return pickle.dumps(saved)


def _is_hollow(saved: tuple[bytes, Any, Any]) -> bool:
  """Returns whether XLA left the machine code out, as it does with what was itself loaded on CPU.

  Then nothing shrinks when it is loaded and saved once more; or it does not load at all.
  """
  try:
    again = serialize_executable.serialize(serialize_executable.deserialize_and_load(*saved))
  except jax.errors.JaxRuntimeError:
    return True
  return len(again[0]) >= len(saved[0])


def _program(path: str, payload: bytes) -> jax.stages.Compiled:
  saved = pickle.loads(payload)
  try:
    return serialize_executable.deserialize_and_load(*saved)
  except jax.errors.JaxRuntimeError as error:
    raise UserError(
      f"compiled_step={path}: these devices reject it: {str(error).splitlines()[0]}; leave "
      "out compiled_step"
    ) from error


def save_steps(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  source: RowSource,
  steps: Mapping[int, Step],
) -> None:
  """Writes compiled steps, by microbatch, to the file that save_compiled_step names.

  Raises:
    UserError: it cannot be written.
  """
  if jax.process_index() != 0:
    return
  path = config.compile.save_compiled_step
  programs = {size: cast(jax.stages.Compiled, step) for size, step in steps.items()}
  save(path, header(config, plan, trainer, source), programs)
  print(f"The compiled step is in {path}; compiled_step={path} runs it", flush=True)
