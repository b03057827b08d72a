"""Bytes of a device at the peak of a step, without compiling."""

import dataclasses
import math
from fractions import Fraction

from maxbatch.core.topology import Topology
from maxbatch.estimate.step_rates import StepRates
from maxbatch.estimate.step_work import RematPolicy, StepWork, residual_bytes, weight_shards


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
  queries, keys = (
    c.base_num_query_heads * c.head_dim / ways,
    c.base_num_kv_heads * c.head_dim / ways,
  )
  hidden = c.base_mlp_dim / ways * (1 if c.mlp_activation == "gelu" else 2)
  shards = weight_shards(work, mesh)
  tiles, logits = work.tiles(M, ways), M * c.vocab_size / ways
  kept = logits * size if tiles > 1 and work.keeps_gradients(M) else 0
  return {
    "residuals": L * M * residual_bytes(work, ways, remat),
    "stream": M * D * size,
    "hidden": M * hidden * size,
    "heads": M * 2 * (queries + keys) * size,
    "layer": _weights_in_use(work, shards, remat) / ways * size,
    "table": work.table_parameters / ways * size,
    # Those of one microbatch, before they are added to the sum.
    "gradients": work.parameters * 4 / math.prod(shards),
    "tile": logits * 4 / tiles,
    "kept": kept,
  }


def _weights_in_use(work: StepWork, shards: tuple[int, int], remat: RematPolicy) -> int:
  """Weights in the format of the computation that lie there at once: those gathered for a layer; where
  they are not divided and nothing is computed again, all layers'."""
  is_kept = shards[0] == 1 and remat == "none"
  return work.layer_parameters * (work.model.base_num_decoder_layers if is_kept else 1)
