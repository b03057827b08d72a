"""What the golden logits are made from, known to both sides: sizes, tokens and weights.

Needs numpy only: scripts/make_golden_logits.py reads it where jax is not installed.
"""

import zlib
from pathlib import Path

import numpy as np

GOLDEN_FILE = Path(__file__).with_name("golden_logits.json")

LENGTH = 16
VOCABULARY = 61
TOKENS_T = np.random.RandomState(0).randint(VOCABULARY, size=LENGTH)
POSITIONS = list(range(1, LENGTH, 2))
ENTRIES = list(range(0, VOCABULARY, 8))

_COMMON = {
  "vocab_size": VOCABULARY,
  "max_target_length": LENGTH,
  "base_emb_dim": 24,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 6,
  "base_mlp_dim": 40,
}

SIZES: dict[str, dict[str, int]] = {
  "gpt2-small": {**_COMMON, "base_num_kv_heads": 4},
  "llama2-7b": {**_COMMON, "base_num_kv_heads": 4},
  "llama3-8b": _COMMON,
  "mistral-7b": {**_COMMON, "sliding_window_size": 5},
  # Heads wider together than the stream, as in Qwen 3.
  "qwen3-0.6b": {**_COMMON, "head_dim": 10},
}
"""What is smaller than published, by the model's name: values of configuration keys."""

# Small embeddings make the epsilon of the norms matter, as it does after initialization.
_SPREAD = {
  "embedding": 0.05,
  "position_embedding": 0.05,
  "head": 0.3,
  "kernel": 0.3,
  "bias": 0.2,
  "scale": 0.2,
}


def weight(path: str, layer: int, size: int) -> np.ndarray:
  """float64[size]: a parameter, flat, from its path in maxbatch and its layer (else 0)."""
  random = np.random.RandomState(zlib.crc32(f"{path}/{layer}".encode()))
  name = path.rpartition(".")[2]
  return random.normal(size=size) * _SPREAD[name] + (1.0 if name == "scale" else 0.0)
