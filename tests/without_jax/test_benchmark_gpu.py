"""scripts/benchmark_gpu.py with stand-ins for the peers: what it reads, keeps and tries again."""

import json
import shlex
import sys
from pathlib import Path

from scripts import benchmark_gpu

STEPS = """
import sys
print("number parameters: 1.208 billion")
for n in range(14):
  seconds = 9.0 if n < 4 else 0.0001 if n == 13 else 0.064
  print(f"completed step: {n}, seconds: {seconds}" + sys.argv[1].replace("SPEED", str(128 / seconds)))
print("device_peak_bytes: 7500000000")
sys.exit(sys.argv[2] in sys.argv[3:])
"""


def stand_in(ending: str, fails_on: str) -> str:
  """A program that prints steps, each with this ending, and fails if it gets this key."""
  return shlex.join([sys.executable, "-c", STEPS, ending, fails_on])


def test_a_failure_loses_its_row_alone_and_is_tried_again(tmp_path, capsys):
  def rows(torch: str) -> list[str]:
    maxtext = stand_in(", Tokens/s/device: SPEED, loss: 6.0", "hardware=gpu")
    keys = ["size=tiny", "rounds=1", "cases=large_full,large", f"out={tmp_path}"]
    assert benchmark_gpu.main([*keys, f"maxtext={maxtext}", torch, "sides=maxtext,torch"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("| large")]

  table = rows(f"torch={stand_in('', 'remat_policy=full')}")
  assert table[0].startswith("| large_full | maxtext | 2,000 | 0.000 | ")
  assert table[0].endswith("| 7.5 |")
  assert table[1].startswith("| large_full | torch | exit code 1 after 14 steps")
  assert table[3].startswith("| large | torch | 2,000 |")
  kept = json.loads((tmp_path / "results.json").read_text())
  again = rows(f"torch={stand_in('', 'no such key')}")
  assert again[1].startswith("| large_full | torch | 2,000 |")
  for name, results in json.loads((tmp_path / "results.json").read_text()).items():
    assert (results == kept[name]) is (name != "large_full/torch")


def test_an_unknown_case_is_refused(tmp_path, capsys):
  assert benchmark_gpu.main(["cases=small,smal", f"out={tmp_path / 'none'}"]) == 2
  assert "smal: there are small," in capsys.readouterr().err
  assert not Path(tmp_path / "none").exists()
