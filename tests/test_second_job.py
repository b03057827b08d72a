"""The second job, of docs/my_data.md, line by line as it stands there, at a size that takes seconds."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, REPOSITORY, environment

from maxbatch.run_folder.metrics import read_metrics

SMALL = (
  "base_emb_dim=16 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8"
  " base_mlp_dim=32 max_target_length=32 eval_samples=8 generate_length=0 per_device_batch_size=2"
  " num_simulated_devices=2 vocab_size=384 dataset_cache_directory=cache write_report=false"
)
SMALLER = [
  (r"(make_example_data.py .*)", r"\1 --modules 9 --vocab-size 384"),
  (r"(\.sh) 4 (.*documents.yml)", rf"\1 2 \2 steps=3 {SMALL}"),
  (r"(\.sh) 4 (.*chat.yml)", rf"\1 2 \2 steps=2 {SMALL}"),
]


def commands() -> str:
  """The lines of the page, each made smaller in one place."""
  section = (REPOSITORY / "docs" / "my_data.md").read_text().partition("## Documents, a tok")[2]
  (block,) = re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
  for pattern, smaller in SMALLER:
    block, count = re.subn(pattern, smaller, block)
    assert count == 1
  return block


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
  """A checkout in which everything is installed: its python is that of the tests."""
  for name in ("scripts", "configs"):
    shutil.copytree(REPOSITORY / name, tmp_path / name)
  for name in ("pyproject.toml", "constraints.txt"):
    shutil.copy(REPOSITORY / name, tmp_path)
  (tmp_path / "maxbatch").symlink_to(REPOSITORY / "maxbatch")
  (tmp_path / ".venv" / "bin").mkdir(parents=True)
  for name, runs in (("python", f'exec {sys.executable} "$@"'), ("pip", "echo installs")):
    program = tmp_path / ".venv" / "bin" / name
    program.write_text(f"#!/bin/sh\n{runs}\n")
    program.chmod(0o755)
  installed = 'source scripts/environment.sh; fingerprint "" > "$stamp"'
  subprocess.run(["bash", "-c", installed], cwd=tmp_path, check=True)
  return tmp_path


def test_data_that_cannot_be_made_end_with_a_sentence(tmp_path, monkeypatch, capsys):
  script = runpy.run_path(str(REPOSITORY / "scripts" / "make_example_data.py"))
  (tmp_path / "file").write_text("")
  few = ["--modules", "2", "--vocab-size", "260"]
  for arguments, said in (
    (
      [f"{tmp_path}/file", *few],
      f"{tmp_path}/file/code cannot be written: Not a directory; name a",
    ),
    (
      [f"{tmp_path}/new", "--modules", "0"],
      "--modules 0 --vocab-size 4096: at least 1 file is read",
    ),
    (
      [f"{tmp_path}/new", "--vocab-size", "3"],
      "260 tokens for bytes and special ones; for example",
    ),
  ):
    monkeypatch.setattr(sys, "argv", ["make_example_data.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
      script["main"]()
    assert said in capsys.readouterr().err
  assert not (tmp_path / "new").exists()
  # A second time in the same place it is as the first.
  monkeypatch.setattr(sys, "argv", ["make_example_data.py", f"{tmp_path}/new", *few])
  script["main"]()
  first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
  script["main"]()
  assert first == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_the_second_job_of_the_readme(checkout):
  done = subprocess.run(
    ["bash", "-e", "-c", commands()],
    cwd=checkout,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=PATIENCE_SECONDS,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "devices = data 2" in done.stdout
  assert "expansion_factor_real_data 2" in done.stdout
  assert "mixture: 60% code" in done.stdout
  assert "best fit" in done.stdout
  taken = "runs/documents/checkpoints/3, with a new optimizer, at step 0"
  assert taken in done.stdout
  documents, chat = (read_metrics(checkout / "runs" / name) for name in ("documents", "chat"))
  assert {"eval/loss/code", "eval/loss/prose"} <= documents[-1].keys()
  assert [each["step"] for each in documents] == [0, 1, 2, 3]
  assert [each["step"] for each in chat] == [0, 1, 2]
