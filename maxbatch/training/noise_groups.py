"""From the squared norms of a step to the moments of every group of parameters.

A group is the whole model, a type of layer (norm, attention, mlp, embedding, head) or one layer of
the stack. Squared norms are summed over a group's parameters before moments are formed.

A step's gradient is G = Σ s_b / W: s_b is the gradient of row b's summed loss, W the step's tokens.
With g_b = s_b·B/W it is the mean over the B rows that have tokens, so g_b is what stands for one
example. Rows of unequal length are examples of unequal weight, as they are in the update.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxbatch.models.registry import Probed
from maxbatch.noise.estimators import Moments, moments, moments_of_parts
from maxbatch.noise.tracker import NORM, TOTAL
from maxbatch.training.step import StepMetrics

FROM_MICROBATCHES = "from_microbatches"
TYPES = (NORM, "attention", "mlp", "embedding", "head")


def type_of(path: Sequence[str]) -> str:
  """The type of the layer whose probe has this path."""
  words = "/".join(path)
  for name, marks in {NORM: (NORM,), "attention": ("attention",), "mlp": ("mlp",)}.items():
    if any(mark in words for mark in marks):
      return name
  return "head" if "head" in words else "embedding"


def moments_by_group(
  probed: Sequence[Probed],
  measured: StepMetrics,
  *,
  every_layer: bool,
  replicas: int,
  num_microbatches: int,
) -> dict[str, Moments | None]:
  """The moments of each group that this step measured.

  Args:
    probed: the probes of the model that the step ran.
    measured: what the step reported, on the host.
    every_layer: whether all layers have probes, or the normalization layers alone.
    replicas: along the data axis.
    num_microbatches: of the step.
  """
  noise = measured.noise
  if noise is None:
    return {}
  weight, examples = max(float(measured.weight), 1.0), int(noise.rows)
  found: dict[str, Moments | None] = {}
  for name, (of_rows, of_step) in _summed(probed, measured, every_layer).items():
    small, big = of_rows * examples / weight**2, of_step / weight**2
    found[name] = moments(examples, small, big)
  if float(noise.of_microbatches) > 0:
    parts = replicas * num_microbatches
    small, big = float(noise.of_microbatches) * parts / weight**2, float(measured.grad_norm) ** 2
    of_parts = moments_of_parts(parts, 1, small, big)
    found[FROM_MICROBATCHES] = _of_one_row(of_parts, examples / parts)
  return found


def _of_one_row(moments: Moments | None, rows_per_part: float) -> Moments | None:
  """The noise of a part's mean gradient is that of one row over the rows of the part."""
  return moments and Moments(moments.signal, moments.noise * rows_per_part)


def _summed(
  probed: Sequence[Probed], measured: StepMetrics, every_layer: bool
) -> Mapping[str, np.ndarray]:
  """By group, the sums [rows, step] of squared norms over its parameters, in float64."""
  assert measured.noise is not None
  leaves = (jax.tree.leaves(tree) for tree in (measured.noise.of_rows, measured.of_step))
  sums: dict[str, Any] = {}
  for probe, of_rows, of_step in zip(probed, *leaves, strict=True):
    both = np.stack([np.asarray(of_rows, np.float64), np.asarray(of_step, np.float64)])
    for name, share in _shares(probe, both, every_layer):
      sums[name] = sums.get(name, 0.0) + share
  return sums


def _shares(probe: Probed, both: np.ndarray, every_layer: bool) -> Iterator[tuple[str, np.ndarray]]:
  """The groups that a probe belongs to, each with its part of [rows, step]."""
  whole = both.reshape(2, -1).sum(1)
  yield type_of(probe.path), whole
  if every_layer:
    yield TOTAL, whole
  prefix = "layer" if every_layer else "norm_of_layer"
  for index in range(probe.num_layers):
    yield f"{prefix}/{index}", both[:, index]
