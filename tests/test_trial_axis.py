"""A mesh axis is a row in the table of axes and a place in the rules: plans and steps have it then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = """
from maxbatch.core import topology
topology.AXES += (topology.MeshAxis("trial", "trial", depth=6),)
topology.AXIS_NAMES += ("trial",)
import trial_axis
trial_axis.main()
"""
"""Before anything else is imported, as if the row stood in the table."""


def test_an_axis_that_is_added_to_the_table_divides_a_model():
  tests = Path(__file__).parent
  cache = os.environ.get("MAXBATCH_TEST_CACHE", str(tests.parent / ".jax_cache"))
  variables = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  command = [sys.executable, "-c", TABLE]
  done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
  plain, divided = json.loads(done.stdout.splitlines()[-1])
  assert divided["mesh"] == {"data": 2, "fsdp": 1, "tensor": 1, "stage": 1, "trial": 2}
  assert (plain["per_device_batch_size"], divided["per_device_batch_size"]) == ("8", "2")
  assert (plain["held"], divided["held"]) == (1.0, 0.5)
  assert divided["loss"] == pytest.approx(plain["loss"], rel=1e-6)
  assert divided["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
