"""Bytes of a device at the peak of a step, without compiling."""

import dataclasses
import math
from fractions import Fraction

from maxbatch.batch.topology import Topology
from maxbatch.estimate.step_rates import StepRates
from maxbatch.estimate.step_work import RematPolicy, StepWork, weight_shards


@dataclasses.dataclass(frozen=True)
class StepBytes:
  """What a device holds."""

  state: int
  """Parameters, optimizer state and gradient accumulators: between steps too."""
  activations: int
  """All else at the peak: what the backward pass needs, gathered weights, logits."""

  @property
  def peak(self) -> int:
    """All of it."""
    return self.state + self.activations


def step_bytes(
  work: StepWork, mesh: Topology, per_device: Fraction, remat: RematPolicy, rates: StepRates
) -> StepBytes:
  """Memory of one device.

  Args:
    work: the model and how it is trained.
    mesh: the devices.
    per_device: samples of a microbatch on one device.
    remat: what the backward pass computes again.
    rates: how many copies of what is counted there are.
  """
  held = memory_work(work, mesh, per_device, remat)
  activations = sum(rates.memory[kind] * size for kind, size in held.items())
  return StepBytes(state_bytes(work, mesh), round(activations))


def state_bytes(work: StepWork, mesh: Topology) -> int:
  """Parameters, optimizer state and accumulators in float32 of one device."""
  each = work.weight_bytes + work.optimizer_bytes + 4
  return round(work.parameters * each / math.prod(weight_shards(work, mesh)))


def memory_work(
  work: StepWork, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> dict[str, float]:
  """Bytes of what may lie in memory at the peak, by kind, one copy of each."""
  ways, c = mesh.shape["tensor"], work.model
  M, size = float(per_device * ways * work.length), work.compute_bytes
  D, L = c.base_emb_dim, c.base_num_decoder_layers
  H = c.head_dim / ways
  heads = (2 * c.base_num_query_heads + 2 * c.base_num_kv_heads) * H
  hidden = c.base_mlp_dim / ways * (1 if c.mlp_activation == "gelu" else 2)
  gathered = weight_shards(work, mesh)[0] > 1
  tile = M * c.vocab_size / ways * 4 / work.tiles(M, ways)
  return {
    "residual": L * M * size * _residuals(work, heads, hidden, remat),
    "stream": M * D * size,
    "hidden": M * hidden * size,
    "heads": M * heads * size,
    "layer": work.layer_parameters / ways * size * (1 if gathered else 0),
    "table": work.table_parameters / ways * size,
    "tile": tile,
  }


def _residuals(work: StepWork, heads: float, hidden: float, remat: RematPolicy) -> float:
  """Numbers that are kept for each token in each layer until the backward pass."""
  D, c = work.model.base_emb_dim, work.model
  if remat == "full":
    return D
  # The results of the products: queries, keys, values, what the two halves add, the hidden layer.
  products = D + (heads - c.base_num_query_heads * c.head_dim) + hidden + 2 * D
  if remat == "minimal":
    return products
  # Normalized inputs, rotated queries and keys in float32 and short, the kernel's output.
  return products + 3 * D + 2 * heads + 1.5 * hidden
