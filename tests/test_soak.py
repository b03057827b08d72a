"""A random fault: scripts/soak.py has many."""

import importlib
import re
import subprocess
import sys
import types
from typing import IO, Any

import pytest
from preloaded import started
from processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

# By name, for type checkers do not look there.
soak = importlib.import_module("soak")


def test_a_run_with_a_random_fault_ends_as_the_undisturbed_one(
  tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
  def start(command: list[str], *, stdout: IO[str], **_: Any) -> subprocess.Popen[str]:
    with stdout:
      return started(command, stdout=stdout, stderr=subprocess.STDOUT)

  like_subprocess = types.SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT)
  monkeypatch.setattr(soak, "subprocess", like_subprocess)
  # The step of tests/test_faults.py.
  sizes = soak.SIZES.replace(f"batch_size={soak.BATCH}", "batch_size=8")
  sizes = sizes.replace("dropout_rate=0.1", "ici_fsdp_parallelism=2 eval_fraction=0")
  monkeypatch.setattr(soak, "SIZES", sizes)
  monkeypatch.setattr(soak, "BATCH", 8)
  # With this seed process 1 cannot read the samples of step 10.
  arguments = ["--faults", "1", "--devices", "2", "--seed", "14", "--steps", "12"]
  exit_code = soak.main([str(tmp_path), *arguments])
  printed = capsys.readouterr().out
  said = printed + "".join(path.read_text() for path in tmp_path.glob("*.out"))
  assert exit_code == 0, said
  assert re.search(r"^run-\S+ loader refuses process 1 of 2 .* exit codes \[4, 4\]", printed, re.M)
  assert "bit for bit the same" in printed
  assert re.search(r"^1 faults in 1 runs", printed, re.M), said
