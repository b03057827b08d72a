"""All tests see 8 simulated CPU devices and a compile cache shared by the whole suite."""

import os
import pathlib

import hypothesis
import jax
import pytest

os.environ.setdefault(
  "NPROC", "64"
)  # As maxbatch/hardware/devices.py has it for 8 devices, and why.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Machine code of the lowest level: tests run a program a few times, and compiling it takes longest.
# What XLA makes of a program before that (fusions, collectives, buffers) is as in a run.
jax.config.update("jax_disable_most_optimizations", True)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")

CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"


@pytest.fixture(scope="session", autouse=True)
def _compile_cache():
  jax.config.update("jax_compilation_cache_dir", os.environ.get("MAXBATCH_TEST_CACHE", str(CACHE)))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
