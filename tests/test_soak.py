"""A random fault: scripts/soak.py has many."""

import re
import subprocess
import sys

from processes import PATIENCE_SECONDS, REPOSITORY, environment


def test_a_run_with_a_random_fault_ends_as_the_undisturbed_one(tmp_path):
  soak = [sys.executable, str(REPOSITORY / "scripts" / "soak.py"), str(tmp_path)]
  done = subprocess.run(
    [*soak, "--faults", "1", "--devices", "2", "--seed", "1", "--steps", "40"],
    capture_output=True,
    text=True,
    check=False,
    timeout=2 * PATIENCE_SECONDS,
    env=environment(),
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "bit for bit the same" in done.stdout
  assert re.search(r"^1 faults? in \d+ runs", done.stdout, re.M)
