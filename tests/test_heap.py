"""What a step's temporaries cost on CPUs: pages that are fresh at every step, unless the C library keeps them."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from maxbatch.hardware.heap import in_pieces, keep_temporaries

TEMPORARIES = 32 * 2**20
"""Less than a thread's heap; `many` are four times as much."""
PROGRAM = f"""
import resource, sys
from maxbatch.hardware.heap import in_pieces, keep_temporaries, share_one_heap
if "many" in sys.argv:
  share_one_heap(["num_simulated_devices=1"])
import jax, jax.numpy as jnp
if "devices" in sys.argv:
  jax.config.update("jax_num_cpu_devices", 2)
devices = jax.devices()
def one(x):
  return jnp.maximum(x @ jnp.ones((32, 1024)), 0) @ jnp.ones((1024, 1))
def two(x):  # Of a device, each as large; both are read at the end.
  weights = jnp.sin(jnp.arange(128.0 * 128)).reshape(128, 128)
  a = jnp.sin(x @ weights[:32])
  b = jnp.sin(a @ weights)
  return (a * b * (b @ weights)).sum(1)
rows = {TEMPORARIES // 4}
shape = (2 * rows // 128, 32) if "devices" in sys.argv else (rows // 1024 * (4 if "many" in sys.argv else 1), 32)
by_row = jax.NamedSharding(jax.make_mesh((len(devices),), ("data",)), jax.P("data"))
x = jax.device_put(jnp.ones(shape), by_row)
traced = jax.jit(two if "devices" in sys.argv else one).trace(x)
program = traced.lower().compile(dict(in_pieces(traced.jaxpr, devices) if "pieces" in sys.argv else ()))
assert program.memory_analysis().temp_size_in_bytes >= {TEMPORARIES} * (2 if "devices" in sys.argv else 1)
if "keep" in sys.argv:
  assert keep_temporaries(program, devices, 2**40)
pages = []
for _ in range(16):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  program(x).block_until_ready()
  pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(pages)[8])
"""


def fresh_pages(clean: dict[str, str], *arguments: str) -> int:
  """Pages that a run of the program touches for the first time: the median of sixteen."""
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, *arguments],
    capture_output=True,
    text=True,
    check=True,
    env=clean,
  )
  return int(done.stdout)


def unset() -> dict[str, str]:
  """An environment in which nobody has set the heap's options, as tests/conftest.py does."""
  own = ("MALLOC_", "GLIBC_TUNABLES")
  return {key: value for key, value in os.environ.items() if not key.startswith(own)}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
def test_a_program_finds_its_pages_again():
  pages, clean = TEMPORARIES // 4096, unset() | {"JAX_PLATFORMS": "cpu"}
  assert fresh_pages(clean) > pages / 2
  # Threads with heaps of their own: on a busy machine another one may run each step, so of a few processes one.
  # (Of 47 with one heap on a busy machine, before pieces and after, four had fresh pages at every step.)
  assert any(fresh_pages(clean, "keep") < pages / 10 for _ in range(5))
  assert any(fresh_pages(clean, "keep", "many") < pages / 10 for _ in range(5))
  # Who has set the heap's options keeps them.
  with pytest.raises(subprocess.CalledProcessError):
    fresh_pages(clean | {"MALLOC_ARENA_MAX": "2"}, "keep")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
def test_pieces_of_several_devices_are_found_again():
  pages, clean = 2 * 2 * TEMPORARIES // 4096, unset() | {"JAX_PLATFORMS": "cpu"}
  assert fresh_pages(clean, "devices", "keep") > pages / 2
  assert any(fresh_pages(clean, "devices", "keep", "pieces") < pages / 10 for _ in range(5))


def in_pieces_of(rows: int, devices: list["Device"]) -> bool:
  """Whether a program with an array of so many rows of 1 MiB comes in pieces."""
  traced = jax.jit(lambda x: jnp.broadcast_to(x, (rows, 2**18)).sum(1)).trace(jnp.ones(()))
  return bool(in_pieces(traced.jaxpr, devices))


def test_in_pieces_where_each_array_fits():
  cpus = [Device("cpu")] * 4
  assert in_pieces_of(60 * 4, cpus)
  assert not in_pieces_of(60 * 4 + 1, cpus)  # XLA warns of it, and it would not be kept.
  assert not in_pieces_of(1, cpus[:1])
  assert not in_pieces_of(1, [Device("gpu")] * 4)


class Program:
  """A compiled one."""

  def __init__(self, temp_size_in_bytes: int):
    self.temp_size_in_bytes = temp_size_in_bytes

  def memory_analysis(self):
    return self


class Device:
  def __init__(self, platform: str):
    self.platform = platform


@pytest.mark.parametrize(
  ("size", "devices", "machine", "told"),
  [
    (2**25, [Device("cpu")] * 5, 2**30, False),
    (2**25, [Device("cpu")] * 5, 2**31, True),
    # More than a thread's heap: it comes in pieces.
    (2**28, [Device("cpu")] * 2, 2**40, True),
    (2**28, [Device("cpu")] * 2, 2**32, False),
    # One heap.
    (2**30, [Device("cpu")], 2**34, True),
    (2**30, [Device("cpu")], 2**33, False),
    (2**25, [Device("gpu")], 2**40, False),
    (2**25, [], 2**40, False),
  ],
)
def test_only_where_memory_is_plenty(size, devices, machine, told, monkeypatch):
  options = []
  library = types.SimpleNamespace(mallopt=lambda *option: options.append(option) or 1)
  monkeypatch.setattr("ctypes.CDLL", lambda _: library)
  monkeypatch.setattr("os.environ", unset() | {"NPROC": "4"})
  assert keep_temporaries(Program(size), devices, machine) == told
  assert bool(options) == told
