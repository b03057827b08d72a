"""Sample text: every shipped model trains and writes some, and what it writes moves no cursor."""

import pathlib
from typing import Any

import pytest
from first_devices import use_first_devices
from golden_models import SIZES

from maxbatch.config.find import model_names
from maxbatch.config.load import load_config
from maxbatch.config.schema import to_flat
from maxbatch.hugging_face.registry import family_for
from maxbatch.modes import summary
from maxbatch.train import main

_LATENT = {
  "attention_type": "mla",
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 6,
  "qk_rope_head_dim": 4,
  "v_head_dim": 6,
  "first_num_dense_layers": 1,
}
"""Instead of heads' sizes, where attention is by latent vectors."""
_EXPERTS = {"num_experts": 16, "base_moe_mlp_dim": 12}
PROMPT = "def longer_than_a_row(of, 16, tokens):"


def shrunk(name: str) -> dict[str, object]:
  sizes: dict[str, Any] = dict(SIZES.get(name, SIZES["llama2-7b"]))
  published = load_config(["config=base", f"model_name={name}"]).model
  if published.attention_type == "mla":
    del sizes["head_dim"]
    sizes |= _LATENT
  if published.num_experts > 1:
    sizes |= _EXPERTS
  return {"model_name": name, **sizes, "vocab_size": 259, "base_emb_dim": 32}


def arguments(name: str, folder: pathlib.Path, **more: object) -> list[str]:
  """A run of one step on one device and a text that it writes, without validation."""
  text = folder / "words.txt"
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  keys = shrunk(name) | {
    "per_device_batch_size": 1,
    "steps": 1,
    "opt_type": "sgd",
    "eval_fraction": 0,
    "dataset_path": text,
    "dataset_cache_directory": folder / "cache",
    "base_output_directory": folder,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (keys | more).items())]


def of_every_family() -> list[str]:
  """One shipped model of each family, and those whose logits are golden.

  Without llama3-8b: its groups of heads are mistral-7b's too, all else llama2-7b's.
  """
  families: dict[str, str] = {}
  for name in [*SIZES, *model_names()]:
    config = load_config(["config=base", f"model_name={name}"])
    family, _ = family_for(to_flat(config), config.batch.max_target_length)
    families.setdefault(family.name, name)
  return sorted({*SIZES, *families.values()} - {"llama3-8b"})


@pytest.mark.parametrize("name", of_every_family())
def test_every_shipped_model_trains_shrunk_with_sample_text(name, tmp_path, capsys, monkeypatch):
  more = {"prompt": PROMPT, "generate_length": 20, "enable_checkpointing": "false"}
  use_first_devices(monkeypatch, 1)
  code = main(arguments(name, tmp_path, **more))
  out, err = capsys.readouterr()
  assert (code, err) == (0, "")
  assert out.count(f"\n{PROMPT}") == 2  # Before training and after.


def test_a_finished_run_answers_a_new_prompt_and_prints_no_control_bytes(
  tmp_path, capsys, monkeypatch
):
  written = "a\x1b[2J\r\x07\x9b\u2028\tß\n"
  monkeypatch.setattr(summary, "sample_text", lambda run, *_: run.config.run.prompt + written)
  use_first_devices(monkeypatch, 1)
  first = arguments("llama2-7b", tmp_path, prompt="def ", generate_length=20)
  assert main(first) == 0
  assert capsys.readouterr().out.count("\ndef a\\x1b[2J\\r\\x07\\x9b\\u2028\tß\n") == 2
  assert main([*first, "prompt=class "]) == 0
  printed = capsys.readouterr().out
  assert "This run is complete at step 1." in printed
  assert "--- text after training\nclass a\\x1b[2J" in printed
  assert main([*first, "prompt=class ", "generate_length=0"]) == 0
  assert "class a" not in capsys.readouterr().out
