"""Seconds that the messages of one microbatch take on the links between devices."""

import dataclasses
import math
from fractions import Fraction

from maxbatch.config.keys.model import expert_parameters
from maxbatch.config.schema import query_dim
from maxbatch.core.topology import Topology, weight_groups
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.step_work import RematPolicy, StepWork, weight_shards

_WIDE = 16
"""Devices over which the compiler still divides reductions into small messages beside the products; over
more it sums whole gradients, and the products wait."""


@dataclasses.dataclass(frozen=True)
class LinkSeconds:
  """Time on the links of the collectives of one microbatch, if nothing else had to wait."""

  gathers: float
  """Weights, for the forward and again for the backward pass."""
  reductions: float
  """Gradients, as reduce-scatters."""
  activations: float
  """Sums over the devices that share a layer: each product's result, whole; tokens to experts; and what
  attention needs of the other devices that share a row."""


def link_seconds(
  work: StepWork, chip: Chip, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> LinkSeconds:
  """Returns the time of a microbatch's collectives on the links."""
  ways, groups = mesh.shape["tensor"], mesh.weight_groups
  is_divided = weight_shards(work, mesh)[0] > 1
  # Slices that divide weights gather them over their hosts' network.
  ring = mesh.shape.get("expert", 1)
  each = ring_seconds(chip, groups, ways, crosses=weight_groups(mesh.dcn) > 1)
  of_experts = work.model.base_num_decoder_layers * expert_parameters(work.model) / ring
  # Whole experts are gathered by no device but those that hold them.
  beyond = mesh.dcn["fsdp"] * mesh.dcn.get("context", 1) > 1
  beside = ring_seconds(chip, sharded(mesh), ways * ring, crosses=beyond)
  gathered = (work.parameters - of_experts * ring) * each + of_experts * beside
  weights = gathered / ways * work.compute_bytes
  tokens = float(per_device * ways * work.length)
  sums = 6 if remat == "full" else 5 if remat == "minimal" else 4
  layers = work.model.base_num_decoder_layers
  moved = tokens * work.model.base_emb_dim * work.compute_bytes * layers * sums
  shared = 2 * moved * ring_seconds(chip, ways, 1, crosses=False)
  # Tokens of the devices that divide experts: gathered, and in float32 summed, in both passes.
  passes = (3 if remat == "full" else 2) * layers * (work.compute_bytes + 4)
  in_ring = ring * tokens * work.model.base_emb_dim * passes
  shared += in_ring * ring_seconds(chip, ring, ways, crosses=mesh.dcn.get("expert", 1) > 1)
  shared += _attention_seconds(work, chip, mesh, tokens, remat)
  # Weights that every device has whole are not gathered, and their gradients are all-reduced.
  return LinkSeconds(
    2 * weights if is_divided else 0.0, weights if is_divided else 2 * weights, shared
  )


def _attention_seconds(
  work: StepWork, chip: Chip, mesh: Topology, tokens: float, remat: RematPolicy
) -> float:
  """Returns the time of a microbatch's messages between devices that share the tokens of rows, of which each
  has `tokens`: where they divide the heads an all-to-all of queries, keys, values and results, else
  all-gathers of keys and values; in both passes, and again where attention is computed again."""
  c, ways, sharing = work.model, mesh.shape["tensor"], mesh.shape.get("context", 1)
  if sharing == 1:
    return 0.0
  crosses = mesh.dcn.get("context", 1) > 1
  gathering = ring_seconds(chip, sharing, ways, crosses=crosses)
  passes = (2 if remat == "none" else 3) * c.base_num_decoder_layers * work.compute_bytes
  each = tokens * query_dim(c) / ways * passes
  if c.base_num_query_heads % (ways * sharing):
    return 2 * c.base_num_kv_heads * each * sharing * gathering
  sent = 2 * (c.base_num_query_heads + kv_heads_of_rows(work, mesh)) * each
  # Around a ring of TPUs, both ways, a message passes a quarter of its devices.
  exchanging = gathering * sharing**2 / (4 * (sharing - 1))
  return sent * (gathering if chip.is_gpu or crosses else exchanging)


def ring_seconds(chip: Chip, size: int, stride: int, *, crosses: bool) -> float:
  """Returns the seconds in which a byte of each result reaches all devices of a group: an all-gather's.

  Args:
    size: devices of a group.
    stride: between neighbours of a group, in devices.
    crosses: whether the group lies in several slices.
  """
  if not chip.is_gpu:
    return (size - 1) / size / (chip.dcn_bandwidth if crosses else chip.ici_bandwidth)
  # Those of an NVLink domain carry the data together, each with a port of its own.
  ports = min(size, max(1, chip.domain // stride))
  domains = size / ports
  if domains == 1:
    return (size - 1) / size / chip.ici_bandwidth
  network = ports * chip.dcn_bandwidth * chip.network_share
  return (domains - 1) / domains / min(network, chip.ici_bandwidth)


def is_wide(mesh: Topology, chip: Chip) -> bool:
  """Returns whether weights are divided over so many devices that gradients are summed whole; of GPUs,
  over more than NVLink connects."""
  if chip.is_gpu:
    return sharded(mesh) * mesh.shape["tensor"] > chip.domain
  return sharded(mesh) > _WIDE


def sharded(mesh: Topology) -> int:
  """Returns the devices over which matrices are divided."""
  return mesh.shape["fsdp"] * mesh.shape.get("context", 1)


def kv_heads_of_rows(work: StepWork, mesh: Topology) -> int:
  """Returns the key/value heads, with their copies, that devices have of which each attends with some heads
  of whole rows."""
  K, ways = work.model.base_num_kv_heads, mesh.shape["tensor"] * mesh.shape.get("context", 1)
  is_divided = "context" in mesh.shape and work.model.base_num_query_heads % ways == 0
  return math.lcm(K, ways) if is_divided else K
