"""docs/fine_tuning.md by copy and paste, command by command, at a size that takes seconds."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY

from maxbatch.convert import main as convert
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main as train

SMALL = (
  "base_emb_dim=16 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8"
  " base_mlp_dim=32 vocab_size=384"
)
SMALLER = (
  "max_target_length=32 eval_samples=8 generate_length=0 dataset_cache_directory=cache steps=2"
)
SMALLER += " num_simulated_devices=8 per_device_batch_size=1 vocab_size=384"


def commands() -> list[str]:
  text = (REPOSITORY / "docs" / "fine_tuning.md").read_text()
  blocks: list[str] = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
  return [line for block in blocks for line in block.splitlines()]


def run_here(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
  """A line of the page, in this process."""
  program, *words = shlex.split(line)
  if program == "scripts/train.sh":
    made = SMALL if "run_name=made" in words else ""
    return train([*words, *made.split(), *SMALLER.split()])
  if words[0] == "convert":
    return convert(words[1:])
  if words[0].startswith("scripts/"):
    smaller = ["--modules", "9", "--vocab-size", "384"]
    monkeypatch.setattr(sys, "argv", [*words, *smaller])
    runpy.run_path(words[0])["main"]()
    return 0
  assert program.endswith("pip")
  return 0


def test_every_command_of_the_page_works(tmp_path, monkeypatch, capsys):
  for name in ("scripts", "configs"):
    shutil.copytree(REPOSITORY / name, tmp_path / name)
  monkeypatch.chdir(tmp_path)
  for line in commands():
    assert run_here(line, monkeypatch) == 0, line
  said = capsys.readouterr().out
  assert (
    said.count(f"Begins  parameters of {tmp_path}/somebodys, with a new optimizer, at step 0") == 2
  )
  assert ", of which 1,024 train" in said
  for name in ("made", "continued", "tuned"):
    assert [record["step"] for record in read_metrics(tmp_path / "runs" / name)] == [0, 1, 2]
  files = {path.name for path in Path("adapter").iterdir()}
  assert files == {"adapter_model.safetensors", "adapter_config.json"}
  assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
    path.name for path in Path("chatty").iterdir()
  }
