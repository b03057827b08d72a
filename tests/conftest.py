"""All tests see 8 simulated CPU devices and a compile cache shared by the whole suite."""

import ctypes
import functools
import gc
import inspect
import os
import pathlib
import signal
from collections.abc import Callable

# Numpy's threads wait for their next product in a loop, which is a fifteenth of the time of a test
# that compares arrays; they read this when numpy is first imported, a line below.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A process of the tests trains hundreds of models, and gives their memory back: it is the default, and
# tells maxbatch/hardware/heap.py that somebody has set the heap's options.
os.environ.setdefault("MALLOC_ARENA_TEST", "8")

import hypothesis
import jax
import pytest
from examples import examples
from processes import QUICKLY

from maxbatch.data.rows import Rows
from maxbatch.run_report.background import BackgroundReport
from maxbatch.training import build
from maxbatch.training.step import Trainer

# More than maxbatch/hardware/devices.py has: tests start many programs that do not wait for others.
os.environ.setdefault("NPROC", "64")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)
# Machine code of the lowest level: tests run a program a few times, and compiling it takes longest.
# What XLA makes of a program before that (fusions, collectives, buffers) is as in a run.
_OPTIMIZATION = "jax_disable_most_optimizations"
jax.config.update(_OPTIMIZATION, True)

# XLA reads its flags once; the tests see those of the caller.
_FLAGS = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{_FLAGS or ''} {QUICKLY}".strip()
jax.devices()
os.environ.pop("XLA_FLAGS", None)
if _FLAGS is not None:
  os.environ["XLA_FLAGS"] = _FLAGS

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("suite")

# jax makes objects by the million while it traces; looking through them takes a tenth of the time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

LONGEST_FIRST = [
  "test_same_training",
  "test_faults",
  "test_expert_steps",
  "test_train_rl",
  "test_context_combined",
  "test_staying_up",
  "test_gpu_compiler",
  "test_connections",
  "test_accumulate",
  "test_lost_listener",
  "test_train",
  "test_partition",
  "test_tpu_topology",
  "test_resume",
  "test_templates",
  "test_context_steps",
  "test_agreement",
  "test_interrupted",
  "test_soak",
  "test_step_file",
  "test_environment",
  "test_data_loader",
  "test_ramp",
  "test_joining",
  "test_full_disk",
  "test_lock",
  "test_compile_cache",
  "test_loading_processes",
  "test_second_job",
]
"""Files that take long, of those that compute and those that wait for processes in turn: together they keep
the cores busy, and begun last they would keep one busy for minutes while the other has nothing to do."""

_SHARED = "_trainer", "_compiled_step", "_compiled_eval"
"""Functions of maxbatch/training/build.py."""
_MOST_BYTES = max(2_000_000_000, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 8)
"""Of one process of the suite, before its programs are let go."""

CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  place = {name: number for number, name in enumerate(LONGEST_FIRST)}
  items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
  jax.config.update("jax_compilation_cache_dir", os.environ.get("MAXBATCH_TEST_CACHE", str(CACHE)))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard():
  # Who starts the tests under nohup, or in the background of a script, hands its ignored signals on
  # to every process.
  ours = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
  before = {number: signal.signal(number, handler) for number, handler in ours.items()}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _jax_options_stay():
  """What a module changes of jax's options does not reach the next one."""
  before = dict(jax.config.values)
  yield
  for name, value in before.items():
    if jax.config.values[name] != value:
      jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def _no_reports():
  """A page takes a process of its own, with a second of imports."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("maxbatch.modes.run_log.BackgroundReport", _no_report)
    yield


@pytest.fixture(scope="session", autouse=True)
def _programs_are_shared():
  """Runs with the same trainer and shapes of rows trace, lower and compile their step once.

  A process keeps eight programs, and traces the step that it reports on, or saves, by itself.
  """
  with pytest.MonkeyPatch.context() as patch:
    for name in _SHARED:
      patch.setattr(build, name, functools.lru_cache(64)(getattr(build, name).__wrapped__))
    patch.setattr(build, "_traced_step", _traced_once(build._traced_step))
    yield


@pytest.fixture(scope="module", autouse=True)
def _memory_is_bounded(_programs_are_shared):
  """A process that kept the programs of all its files would have 5 GB in the end.

  To let them go takes seconds, and what later files share with these is traced again.
  """
  yield
  if _resident_bytes() < _MOST_BYTES:
    return
  for name in (*_SHARED, "_traced_step"):
    getattr(build, name).cache_clear()
  jax.clear_caches()
  gc.collect()
  # What is freed is given back only when asked for, and by glibc.
  if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
    trim(0)


def _no_report(folder: pathlib.Path, report: Callable[[str], None], **_: bool) -> BackgroundReport:
  return BackgroundReport(folder, report, enabled=False)


def _resident_bytes() -> int:
  """Memory of this process; 0 where the system does not say."""
  file = pathlib.Path("/proc/self/statm")
  return int(file.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if file.exists() else 0


def _traced_once(trace: Callable[..., jax.stages.Traced]) -> Callable[..., jax.stages.Traced]:
  """`trace`, whose results for shapes of rows, not for arrays, are kept."""
  kept = functools.lru_cache(64)(trace)

  @functools.wraps(trace)
  def traced(trainer: Trainer, rows: Rows) -> jax.stages.Traced:
    shapes = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(rows))
    return (kept if shapes else trace)(trainer, rows)

  traced.cache_clear = kept.cache_clear  # pyright: ignore[reportAttributeAccessIssue]
  return traced


@pytest.fixture
def traced_anew(monkeypatch):
  """Steps are traced for every use, as in a process of its own."""
  monkeypatch.setattr(build, "_traced_step", inspect.unwrap(build._traced_step))


@pytest.fixture
def optimized(monkeypatch, traced_anew):
  """Programs that are compiled here are those of a run: LLVM takes its time."""
  for name in ("_compiled_step", "_compiled_eval"):
    monkeypatch.setattr(build, name, functools.lru_cache(8)(getattr(build, name).__wrapped__))
  jax.config.update(_OPTIMIZATION, False)
  yield
  jax.config.update(_OPTIMIZATION, True)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
  """Choices are remembered per test, not in the home folder."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
