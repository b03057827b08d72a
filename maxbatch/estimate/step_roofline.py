"""Seconds and bytes of a training step for a model, a slice and a split, in a millisecond: no compiler.

    work = step_work(config)
    mesh = topology(config.mesh, num_devices)
    found = step_roofline(work, CHIPS["v5e"], mesh, Fraction(4), num_microbatches=8, remat="full")
    found.step_seconds, found.utilisation, found.peak_bytes, found.limited_by

Work is counted (step_work.py, step_memory.py) and multiplied by rates (step_rates.json), which were found
from steps that the TPU compiler compiled. How far off that is: docs/effective_microbatches.md. What it
does not know: pipelines, LoRA and frozen parameters, attention=dot_product, compiler flags.
"""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from maxbatch.batch.arithmetic import tokens_of
from maxbatch.batch.topology import Topology
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.step_memory import StepBytes, step_bytes
from maxbatch.estimate.step_rates import StepRates, step_rates
from maxbatch.estimate.step_time import Limit, RooflineSeconds
from maxbatch.estimate.step_work import (
  Part,
  PartWork,
  RematPolicy,
  StepWork,
  microbatch_work,
  weight_shards,
)

_WIDE = 16
"""Devices over which the compiler still divides the reduction of gradients into small messages beside
the products; over more it reduces whole gradients, and the products wait."""


@dataclasses.dataclass(frozen=True)
class StepRoofline:
  """One step, as estimated."""

  step_seconds: float
  microbatch_seconds: float
  """Of it, one microbatch."""
  rest_seconds: float
  """Of it, the update, and gradients between data replicas."""
  utilisation: float
  """Model FLOPs over what the devices could do at their peak in that time."""
  tokens_per_second: float
  """Of all devices."""
  bytes: StepBytes
  capacity_bytes: int
  """What the compiler leaves to programs on this chip."""
  limited_by: Limit
  parts: Mapping[str, float]
  """Seconds of a step by part: attention, mlp, norm, head, embedding, other, collectives, optimizer."""
  limits: RooflineSeconds
  """Seconds of a step by what limits them."""

  @property
  def peak_bytes(self) -> int:
    """Of one device."""
    return self.bytes.peak

  @property
  def free_bytes(self) -> int:
    """What is left of the device's memory; negative where it does not fit."""
    return self.capacity_bytes - self.peak_bytes

  @property
  def fits(self) -> bool:
    """Whether the peak is within the capacity."""
    return self.free_bytes >= 0


def step_roofline(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  num_microbatches: int,
  remat: RematPolicy,
  rates: StepRates | None = None,
) -> StepRoofline:
  """Estimates a step.

  Args:
    work: the model and how it is trained.
    chip: one device.
    mesh: all devices; those along `stage` are not modelled.
    per_device: samples of a microbatch on one device.
    num_microbatches: per step.
    remat: what the backward pass computes again.
    rates: for another table than the package's.
  """
  rates = rates or step_rates()
  microbatch: dict[Part, RooflineSeconds] = {
    part: part_seconds(part, one, chip, rates)
    for part, one in microbatch_work(work, chip, mesh, per_device, remat).items()
  }
  waits = _collectives(work, chip, mesh, per_device, remat, rates, microbatch)
  rest = {"optimizer": _update(work, chip, mesh), "collectives": _replicas(work, chip, mesh)}
  once = sum((one for one in microbatch.values()), waits)
  limits = sum(rest.values(), _times(once, num_microbatches))
  parts: dict[str, float] = {part: num_microbatches * one.total for part, one in microbatch.items()}
  parts["collectives"] = num_microbatches * waits.total + rest["collectives"].total
  parts["optimizer"] = rest["optimizer"].total
  tokens = num_microbatches * float(per_device * work.length)
  return StepRoofline(
    step_seconds=limits.total,
    microbatch_seconds=once.total,
    rest_seconds=sum(one.total for one in rest.values()),
    utilisation=tokens * work.model_flops_per_token / limits.total / chip.peak_flops,
    tokens_per_second=tokens_of(mesh.num_devices, 1) * tokens / limits.total,
    bytes=step_bytes(work, mesh, per_device, remat, rates),
    capacity_bytes=chip.usable_bytes,
    limited_by=limits.limit,
    parts=parts,
    limits=limits,
  )


def part_seconds(part: Part, one: PartWork, chip: Chip, rates: StepRates) -> RooflineSeconds:
  """One part of a microbatch: products, kernels, elementwise work and traffic, one after another."""
  products = one.products / chip.peak_flops / rates.product[chip.generation]
  reading = one.weights / chip.hbm_bandwidth
  cycles = sum(rates.cycles[kind] * count for kind, count in one.vectors.items())
  vectors = cycles / chip.clock / chip.tensor_cores + one.kernels / chip.peak_flops
  traffic = rates.traffic.get(part, 1.0) * one.traffic / chip.hbm_bandwidth
  if reading > products:
    return RooflineSeconds(compute=vectors, memory=reading + traffic)
  return RooflineSeconds(compute=products + vectors, memory=traffic)


def _times(one: RooflineSeconds, count: int) -> RooflineSeconds:
  return RooflineSeconds(count * one.compute, count * one.memory, count * one.interconnect)


@dataclasses.dataclass(frozen=True)
class LinkSeconds:
  """Time on the links of the collectives of one microbatch, if nothing else had to wait."""

  gathers: float
  """Weights, for the forward and again for the backward pass."""
  reductions: float
  """Gradients, as reduce-scatters."""
  activations: float
  """Sums over the devices that share a layer: each product's result, whole."""


def link_seconds(
  work: StepWork, chip: Chip, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> LinkSeconds:
  """The collectives of a microbatch on the links."""
  fsdp, ways = mesh.shape["fsdp"], mesh.shape["tensor"]
  is_divided = weight_shards(work, mesh)[0] > 1
  # Slices that divide weights gather them over their hosts' network.
  between = mesh.dcn[1] > 1
  bandwidth = chip.dcn_bandwidth if between else chip.ici_bandwidth
  weights = work.parameters / ways * work.compute_bytes * (fsdp - 1) / fsdp / bandwidth
  tokens = float(per_device * ways * work.length)
  sums = 6 if remat == "full" else 5 if remat == "minimal" else 4
  layers = work.model.base_num_decoder_layers
  moved = tokens * work.model.base_emb_dim * work.compute_bytes * layers * sums
  shared = 2 * moved * (ways - 1) / ways / chip.ici_bandwidth
  # Weights that every device has whole are not gathered, and their gradients are all-reduced.
  return LinkSeconds(
    2 * weights if is_divided else 0.0, weights if is_divided else 2 * weights, shared
  )


def _collectives(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  remat: RematPolicy,
  rates: StepRates,
  microbatch: Mapping[Part, RooflineSeconds],
) -> RooflineSeconds:
  """What computing waits for; gathers and reductions beside it wait where they take longer."""
  links = link_seconds(work, chip, mesh, per_device, remat)
  gather = rates.gather_waits[chip.generation] * links.gathers
  width = "wide" if mesh.shape["fsdp"] > _WIDE else "narrow"
  reduce = rates.reduce_waits[width] * links.reductions
  layers = microbatch["attention"].total + microbatch["mlp"].total + microbatch["norm"].total
  hidden = max(0.0, links.gathers + links.reductions - gather - reduce)
  late = max(0.0, hidden - layers)
  return RooflineSeconds(interconnect=gather + reduce + late + links.activations)


def _update(work: StepWork, chip: Chip, mesh: Topology) -> RooflineSeconds:
  """The optimizer reads and writes weights and its state, reads gradients and clears them."""
  divided = math.prod(weight_shards(work, mesh))
  each = 2 * (work.weight_bytes + work.optimizer_bytes) + 8
  return RooflineSeconds(memory=work.parameters * each / divided / chip.hbm_bandwidth)


def _replicas(work: StepWork, chip: Chip, mesh: Topology) -> RooflineSeconds:
  """All-reduces of gradients in float32 over the data replicas, once a step; between slices their
  hosts' network is the slowest part."""
  replicas = mesh.shape["data"]
  divided = math.prod(weight_shards(work, mesh))
  bandwidth = chip.dcn_bandwidth if mesh.dcn[0] > 1 else chip.ici_bandwidth
  moved = 2 * 4 * work.parameters / divided * (replicas - 1) / replicas
  return RooflineSeconds(interconnect=moved / bandwidth)
