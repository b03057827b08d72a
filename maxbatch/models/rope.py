"""Frequencies of rotary positions that a model was stretched by, to read longer rows.

H width of a head.
"""

import math

import numpy as np

from maxbatch.config.schema import ModelConfig


def frequency_factors(config: ModelConfig) -> np.ndarray | None:
  """What the frequency of each pair of a head is multiplied by: float32[H/2]; None: by nothing."""
  factors = np.full(config.head_dim // 2, 1 / config.rope_linear_scaling_factor)
  if config.rope_type == "llama3.1":
    factors *= _llama3(config)
  return factors.astype(np.float32) if (factors != 1).any() else None


def _llama3(config: ModelConfig) -> np.ndarray:
  """Fast frequencies unchanged, slow ones divided, and those between interpolated (Llama 3.1)."""
  exponents = np.arange(0, config.head_dim, 2) / config.head_dim
  frequencies = config.rope_max_timescale**-exponents
  turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
  low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return kept + (1 - kept) / config.rope_factor
