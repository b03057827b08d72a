"""Compiled programs kept on disk between starts: jax's persistent compilation cache.

jax finds a program by a hash of its text, the versions, the flags and the devices (on CPU with the
instructions the processor knows), so an entry is never used for anything else, and a folder may be
shared by machines of different kinds. Whoever can write to the folder can run code here: it must
belong to you.
"""

import contextlib
import hashlib
import itertools
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import cache_key, compilation_cache
from jax.experimental import serialize_executable

from maxbatch.command_line.screen import GIB
from maxbatch.run_folder.paths import compiled_programs

OFF = "none"
_LARGEST_BYTES = 8 * GIB
STEPS = "steps"
"""The folder of steps that need no tracing (step_cache.py), in that of the programs."""
_ENTRIES = "*-cache", f"{STEPS}/*"
_MINIMUM = "jax_persistent_cache_min_compile_time_secs"
_DIRECTORY = "jax_compilation_cache_dir"


def enable(jax_cache_dir: str) -> Path | None:
  """Turns the cache on; call it once the devices are known and before anything is compiled.

  A folder that is already set, by the environment's JAX_COMPILATION_CACHE_DIR or through
  jax.config, stays: whoever set it knows the machine, and jax does not change folders under way.
  `none` turns that one off too.

  Args:
    jax_cache_dir: the folder; empty: one in the user's cache folder; `none`: no cache.

  Returns:
    The folder in use; None if there is none, which a line on stderr explains unless it was asked
    for. No run fails for want of a cache.
  """
  if jax_cache_dir == OFF:
    jax.config.update(_DIRECTORY, None)
    compilation_cache.reset_cache()
    return None
  find_those_of_process_0()
  compilation_cache.get_executable_and_time = _read_or_remove
  folder = compiled_programs(jax_cache_dir)
  there = jax.config.values[_DIRECTORY]
  if there:
    if jax_cache_dir and str(folder) != there:
      _tell(f"jax_cache_dir={jax_cache_dir} is not used: jax already keeps programs in {there}")
    return Path(there)
  obstacle = _obstacle(folder)
  if obstacle:
    _tell(f"jax_cache_dir={jax_cache_dir or folder}: {obstacle}; every start compiles again")
    return None
  _drop_oldest(folder)
  # A start has many small programs that take longer to compile than to load.
  if _MINIMUM.upper() not in os.environ:
    jax.config.update(_MINIMUM, 0.0)
  jax.config.update(_DIRECTORY, str(folder))
  return folder


def find_those_of_process_0() -> None:
  """Has all processes of a program on CPUs find what process 0 keeps: it alone writes to the folder.

  For each of them jax hashes CPUs otherwise, whose topology says on which process they are.
  """
  cache_key._hash_accelerator_config = _hash_devices


_hash_topology = cache_key._hash_accelerator_config


def _hash_devices(hash_object: Any, devices: np.ndarray) -> None:
  places = [(device.device_kind, device.process_index) for device in devices.flat]
  if len({process for _, process in places}) == 1 or devices.flat[0].platform != "cpu":
    _hash_topology(hash_object, devices)
  else:
    hash_object.update(f"{places} {processor()}".encode())


_read = compilation_cache.get_executable_and_time


def _read_or_remove(cache_key: str, *arguments: Any) -> tuple[Any, int | None]:
  """Reads an entry as jax does, and removes it if that fails.

  jax warns then and compiles, but writes no entry that is there: what a killed process or a full disk has
  left of one would fail at every start.
  """
  try:
    return _read(cache_key, *arguments)
  except Exception:
    with contextlib.suppress(OSError):
      Path(jax.config.values[_DIRECTORY], f"{cache_key}-cache").unlink()
    raise


def processor() -> str:
  """Returns the processor's instructions, which a program compiled on it may use."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  known = "".join([line for line in lines if line.startswith(("flags", "Features"))][:1])
  digest = hashlib.sha256(known.encode()).hexdigest()[:12]
  return f"{platform.machine()} with instructions {digest}"


def _tell(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _obstacle(folder: Path) -> str | None:
  """Returns why programs cannot be kept in `folder`, which is made if need be; None if they can."""
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
      file.write(b"x")
  except OSError as error:
    return f"cannot be written ({error.strerror or error})"
  if jax.default_backend() == "cpu" and not _loads_quietly():
    return "XLA refuses to load its own programs on this CPU (jax issue 38445)"
  return None


def _loads_quietly() -> bool:
  """Returns whether XLA takes back what it has just compiled for this CPU.

  For some Intel processors it notes preferences as if they were instructions, misses them when it
  loads, and writes pages of errors straight to file descriptor 2 at every start.
  """
  compiled = jax.jit(lambda x: x + x).lower(np.zeros(8, np.float32)).compile()
  saved = serialize_executable.serialize(compiled)
  with tempfile.TemporaryFile() as written:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(written.fileno(), 2)
    try:
      serialize_executable.deserialize_and_load(*saved, execution_devices=jax.local_devices()[:1])
    except jax.errors.JaxRuntimeError:
      return False
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
    written.seek(0)
    return b"XLA:CPU AOT" not in written.read()


def _drop_oldest(folder: Path, largest_bytes: int = _LARGEST_BYTES) -> None:
  """Removes the entries that were not used for longest until `largest_bytes` are left.

  jax's own limit needs another package, and stops writing once an entry lost its companion file.
  """
  results = []
  for entry in itertools.chain.from_iterable(map(folder.glob, _ENTRIES)):
    with contextlib.suppress(OSError):  # Another run may have removed it.
      status = entry.stat()
      results.append((max(status.st_atime, status.st_mtime), status.st_size, entry))
  total = sum(size for _, size, _ in results)
  for _, size, entry in sorted(results):
    if total <= largest_bytes:
      return
    with contextlib.suppress(OSError):
      entry.unlink()
    total -= size
