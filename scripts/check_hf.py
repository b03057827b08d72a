"""Compares a model here with transformers' own: python scripts/check_hf.py NAME_OR_FOLDER

Reads the weights twice, by maxbatch and by transformers, and prints how far apart logits and loss are
on a text. Both compute in float32: that takes 4 bytes a parameter, one after the other, in the memory of
the machine and of jax's first device. Needs torch and transformers: pip install 'maxbatch[test]'.

    python scripts/check_hf.py Qwen/Qwen3-0.6B
    python scripts/check_hf.py my_model --text "Once upon a time"

Exits with 1 if a logit differs by more than --tolerance times the largest one.

B rows, T tokens, V vocabulary.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import SingleDeviceSharding

from maxbatch.config.load import load_config
from maxbatch.conversion.beside import model_folder
from maxbatch.conversion.reading import load_parameters
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import build_model

TEXT = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political
bands which have connected them with another, and to assume among the powers of the earth, the
separate and equal station to which the Laws of Nature and of Nature's God entitle them, a decent
respect to the opinions of mankind requires that they should declare the causes which impel them to
the separation. 数学, Größe, 3.14159, def f(x): return x ** 2
"""


def tokens_of(folder: pathlib.Path, text: str, length: int) -> np.ndarray:
  """The first ids (1, T) of a text; random ones where the folder has no tokenizer."""
  try:
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:length]
  except (OSError, ValueError):
    ids = []
  if len(ids) > 1:
    return np.array([ids])
  print("the folder has no tokenizer: random tokens")
  vocab_size = load_config(["config=base", f"model_name={folder}"]).model.vocab_size
  return np.random.default_rng(0).integers(0, vocab_size, (1, length))


def their_logits(folder: pathlib.Path, tokens_BT: np.ndarray) -> np.ndarray:
  """What transformers computes."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  with torch.no_grad():
    return model(torch.asarray(tokens_BT, dtype=torch.long)).logits.numpy()


def our_logits(folder: pathlib.Path, tokens_BT: np.ndarray) -> np.ndarray:
  """What maxbatch computes."""
  B, T = tokens_BT.shape
  keys = ["dtype=float32", "weight_dtype=float32", f"max_target_length={T}"]
  config = load_config(
    ["config=base", f"model_name={folder}", "attention=dot_product", *keys]
  ).model
  model, place = build_model(config, T), SingleDeviceSharding(jax.devices()[0])
  wanted = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), model.shapes()
  )
  parameters = load_parameters(folder, model, wanted)
  ids_BT = jnp.asarray(tokens_BT, jnp.int32)
  rows = Rows(ids_BT, ids_BT, jnp.ones((B, T)), jnp.arange(B))

  @jax.jit
  def logits(parameters: dict) -> jax.Array:
    bound = model.bind(parameters)
    logits_BTV = hidden_of(bound(rows, None)) @ bound.output_matrix()
    cap = config.final_logits_soft_cap
    return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV

  return np.asarray(logits(parameters))


def loss(logits_BTV: np.ndarray, tokens_BT: np.ndarray) -> float:
  """Mean cross entropy of each next token, in nats."""
  logits_BTV = logits_BTV[:, :-1].astype(np.float64)
  largest = logits_BTV.max(-1, keepdims=True)
  normalizers_BT = np.log(np.exp(logits_BTV - largest).sum(-1)) + largest[..., 0]
  targets_BT1 = tokens_BT[:, 1:, None]
  return float((normalizers_BT - np.take_along_axis(logits_BTV, targets_BT1, -1)[..., 0]).mean())


def main(arguments: Sequence[str] | None = None) -> int:
  """Compares; returns the exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
  parser.add_argument("--text", default=TEXT)
  parser.add_argument("--length", type=int, default=128, help="tokens, at most")
  parser.add_argument("--tolerance", type=float, default=1e-4)
  given = parser.parse_args(arguments)
  # As transformers computes, on any device.
  jax.config.update("jax_default_matmul_precision", "highest")
  try:
    folder = model_folder("model", given.model).absolute()
    tokens_BT = tokens_of(folder, given.text, given.length)
    ours_BTV = our_logits(folder, tokens_BT)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  theirs_BTV = their_logits(folder, tokens_BT)
  apart, largest = np.abs(ours_BTV - theirs_BTV).max(), np.abs(theirs_BTV).max()
  agree = (ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).mean()
  print(f"{tokens_BT.shape[1]} tokens, logits up to {largest:.4g}")
  print(f"logits differ by at most {apart:.3g}, {apart / largest:.2g} of the largest")
  print(f"the likeliest next token is the same in {agree:.2%} of the places")
  print(
    f"loss here {loss(ours_BTV, tokens_BT):.6f}, in transformers {loss(theirs_BTV, tokens_BT):.6f}"
  )
  same = bool(apart <= given.tolerance * largest)
  print("the same model" if same else f"not the same, by --tolerance {given.tolerance}")
  return 0 if same else 1


if __name__ == "__main__":
  sys.exit(main())
