"""From the squared norms of a step to the moments of every group of parameters.

A group is the whole model, a type of layer (norm, attention, mlp, embedding, head) or one layer of
the stack. Squared norms are summed over a group's parameters before moments are formed.

A step's gradient is Σ s_b / W: s_b is the gradient of row b's summed loss, W the step's tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxbatch.core.noise_moments import Moments, moments
from maxbatch.core.noise_scale import TOTAL
from maxbatch.models.registry import Probed
from maxbatch.noise.tracker import NORM
from maxbatch.training.step import StepMetrics

FROM_MICROBATCHES = "from_microbatches"
TYPES = (NORM, "attention", "mlp", "embedding", "head")


def type_of(path: Sequence[str]) -> str:
  """Returns the type of the layer whose probe has this path; of one that is none of TYPES its own name."""
  words = "/".join(path)
  for name, marks in {NORM: (NORM,), "attention": ("attention",), "mlp": ("mlp",)}.items():
    if any(mark in words for mark in marks):
      return name
  if "head" in words:
    return "head"
  if "embedding" in words or "position" in words:
    return "embedding"
  return path[-2] if len(path) > 1 else path[-1].removesuffix("_probe")


def moments_by_group(
  probed: Sequence[Probed],
  measured: StepMetrics,
  *,
  every_layer: bool,
) -> dict[str, Moments | None]:
  """Returns the moments of each group that this step measured.

  Args:
    probed: the probes of the model that the step ran.
    measured: what the step reported, on the host.
    every_layer: whether all layers have probes, or the normalization layers alone.
  """
  noise = measured.noise
  if noise is None:
    return {}
  rows, weight_squared = int(noise.rows), max(float(measured.weight), 1.0) ** 2
  share = float(noise.row_tokens_squared) / weight_squared
  results: dict[str, Moments | None] = {}
  for name, (of_rows, of_step) in _summed(probed, measured, every_layer).items():
    results[name] = moments(rows, share, of_rows / weight_squared, of_step / weight_squared)
  if noise.squares is not None and float(noise.squares.of_microbatches) > 0:
    share = float(noise.squares.divisors) / weight_squared
    small = float(noise.squares.of_microbatches) / weight_squared
    results[FROM_MICROBATCHES] = moments(rows, share, small, float(measured.grad_norm) ** 2)
  return results


def _summed(
  probed: Sequence[Probed], measured: StepMetrics, every_layer: bool
) -> Mapping[str, np.ndarray]:
  """Sums squared norms over the parameters of each group: [rows, step] in float64."""
  assert measured.noise is not None
  leaves = (jax.tree.leaves(tree) for tree in (measured.noise.of_rows, measured.of_step))
  sums: dict[str, Any] = {}
  for probe, of_rows, of_step in zip(probed, *leaves, strict=True):
    both = np.stack([np.asarray(of_rows, np.float64), np.asarray(of_step, np.float64)])
    for name, share in _shares(probe, both, every_layer):
      sums[name] = sums.get(name, 0.0) + share
  return sums


def _shares(probe: Probed, both: np.ndarray, every_layer: bool) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the groups that a probe belongs to, each with its part of [rows, step]."""
  whole = both.reshape(2, -1).sum(1)
  yield type_of(probe.path), whole
  if every_layer:
    yield TOTAL, whole
  prefix = "layer" if every_layer else "norm_of_layer"
  for index in range(probe.num_layers):
    yield f"{prefix}/{index}", both[:, index]
