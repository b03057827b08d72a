"""Sample text: every shipped model trains and writes some, however long the prompt and the text are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import SIZES
from support import SMALLEST
from tiny_model import GPT2_LIKE, VOCABULARY, loud_parameters, tiny_model

from maxbatch.config.find import model_names
from maxbatch.data.rows import Rows
from maxbatch.data.tokenizer import Ids
from maxbatch.models.generate import generate
from maxbatch.models.registry import Model, Parameters
from maxbatch.modes import summary
from maxbatch.train import main

LENGTH = 12
PROMPT = "def longer_than_a_row(of, 16, tokens):"


@pytest.mark.parametrize("name", model_names())
def test_every_shipped_model_trains_shrunk_with_sample_text(name, tmp_path, capsys):
  text = tmp_path / "words.txt"
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  shrunk = SIZES.get(name, SIZES["llama2-7b"]) | {"vocab_size": 259, "base_emb_dim": 32}
  keys = shrunk | {
    "model_name": name,
    "prompt": PROMPT,
    "generate_length": 20,
    "num_simulated_devices": 8,
    "per_device_batch_size": 1,
    "steps": 1,
    "eval_samples": 8,
    "dataset_path": text,
    "dataset_cache_directory": tmp_path / "cache",
    "base_output_directory": tmp_path,
  }
  code = main(["config=base", *(f"{key}={value}" for key, value in keys.items())])
  out, err = capsys.readouterr()
  assert (code, err) == (0, "")
  assert out.count(f"\n{PROMPT}") == 2  # Before training and after.


def test_a_finished_run_answers_a_new_prompt_and_prints_no_control_bytes(
  tmp_path, capsys, monkeypatch
):
  written = "a\x1b[2J\r\x07\x9b\u2028\tß\n"
  monkeypatch.setattr(summary, "generate", lambda _m, _p, _t, prompt, *_, **__: prompt + written)
  text = tmp_path / "words.txt"
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  keys = SMALLEST | {
    "steps": 1,
    "eval_samples": 8,
    "per_device_batch_size": 1,
    "dataset_path": text,
    "dataset_cache_directory": tmp_path / "cache",
    "base_output_directory": tmp_path,
  }
  first = ["config=base", *(f"{key}={value}" for key, value in keys.items())]
  assert main(first) == 0
  assert capsys.readouterr().out.count("\ndef a\\x1b[2J\\r\\x07\\x9b\\u2028\tß\n") == 2
  assert main([*first, "prompt=class "]) == 0
  printed = capsys.readouterr().out
  assert "This run is complete at step 1." in printed
  assert "--- text after training\nclass a\\x1b[2J" in printed
  assert main([*first, "prompt=class ", "generate_length=0"]) == 0
  assert "class a" not in capsys.readouterr().out


class Letters:
  """A token per letter, within the tiny model's vocabulary."""

  vocab_size, bos_id, eos_id, pad_id, version = VOCABULARY, 34, 35, 36, "letters-1"

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.uint16) - ord("A")

  def decode(self, ids: Ids) -> str:
    return "".join(chr(ord("A") + int(i)) for i in ids if i < 34)


@functools.partial(jax.jit, static_argnums=0)
def next_token(model: Model, parameters: Parameters, seen: jax.Array) -> jax.Array:
  """The most likely letter after the tokens [1, T] of a row."""
  rows, bound = Rows(seen, seen, jnp.ones(seen.shape), jnp.zeros(1, int)), model.bind(parameters)
  return jnp.argmax((bound(rows, None)[0, -1] @ bound.output_matrix())[:34])


def one_by_one(model: Model, parameters: Parameters, prompt: str, length: int) -> str:
  """Greedy text: each token from the last LENGTH before it, in a row of no others."""
  tokens = [Letters.bos_id, *Letters().encode(prompt.encode())]
  for _ in range(length):
    tokens.append(int(next_token(model, parameters, jnp.array([tokens[-LENGTH:]], jnp.int32))))
  return Letters().decode(np.array(tokens))


@pytest.mark.parametrize("keys", [(), GPT2_LIKE], ids=["rope", "learned"])
def test_a_token_follows_from_as_many_as_a_row_has(keys):
  model = tiny_model(*keys, length=LENGTH)
  parameters = loud_parameters(model)
  for prompt in ("", "AB", "A" * (LENGTH - 1), "BABCACBCABACB"):
    text = generate(model, parameters, Letters(), prompt, 16, 0.0, LENGTH)
    assert text == one_by_one(model, parameters, prompt, 16)
