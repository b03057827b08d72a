"""Seconds and bytes of a training step for a model, a slice and a split, in a millisecond: no compiler.

    work = step_work(config) mesh = topology(config.mesh, num_devices) found = step_roofline(work,
    CHIPS["v5e"], mesh, Fraction(4), num_microbatches=8, remat="full") found.step_seconds,
    found.utilisation, found.peak_bytes, found.limited_by

Work is counted (step_work.py) and multiplied by rates (step_rates.json, which `scripts/fit_step_rates.py`
writes from compile reports; each is a property of the chip or of an operation, none of a model), found
from steps that the compilers for TPUs and for NVIDIA GPUs compiled. How far off that is:
docs/effective_microbatches.md. What it does not know: pipelines, LoRA and frozen parameters,
attention=dot_product, compiler flags.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from maxbatch.config.keys.model import hidden_width
from maxbatch.config.schema import query_dim
from maxbatch.core.topology import Topology
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.compiled_steps import CompiledStep, compiled_step
from maxbatch.estimate.links import (
  is_wide,
  kv_heads_of_rows,
  link_seconds,
  ring_seconds,
  sharded,
)
from maxbatch.estimate.step_time import Limit, RooflineSeconds
from maxbatch.estimate.step_work import (
  Part,
  PartWork,
  RematPolicy,
  StepWork,
  microbatch_work,
  residual_bytes,
  weight_shards,
)

RATES = pathlib.Path(__file__).with_name("step_rates.json")


@dataclasses.dataclass(frozen=True)
class StepRates:
  """How fast what is counted goes, and how much memory it takes."""

  product: Mapping[str, float]
  """By generation, the share of its peak at which matrix products run."""
  cycles: Mapping[str, float]
  """Cycles of a core for one vector register (1024 elements), in each pass, by what it holds; of GPUs
  microseconds of a pass over a layer, for kernels to start."""
  traffic: Mapping[str, float]
  """How often the bytes that are counted move, by what they are."""
  waits: Mapping[str, float]
  """By generation and width of fsdp, how long computing waits for collectives of weights and gradients,
  in the time that all-gathers and reduce-scatters of them take on the links: less where they run beside
  products, more where the compiler sums whole gradients, or gathers weights by sums. `wide`: over more
  than 16 devices."""
  memory: Mapping[str, float]
  """How many copies of what is counted lie in memory at the peak, by what it is."""
  spread: Mapping[str, float]
  """Root mean square of the differences to what was compiled, as shares, of seconds and of bytes: each
  step estimated with rates from the steps of all other models."""
  cases: int
  """Compiled steps from which the rates are."""
  chosen: float = 1.0
  """Speed as compiled over speed as estimated, of steps that were compiled since their estimates were the
  fastest of all: the mean."""


def step_rates(chip: Chip | None = None) -> StepRates:
  """Returns the table for chips of this kind; None: for TPUs."""
  return _tables()["gpu" if chip is not None and chip.is_gpu else "tpu"]


@functools.cache
def _tables() -> Mapping[str, StepRates]:
  tables = json.loads(RATES.read_text(encoding="utf-8"))
  return {kind: StepRates(**table) for kind, table in tables.items()}


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
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  remat: RematPolicy,
  rates: StepRates,
) -> StepBytes:
  """Returns memory of one device.

  Args:
    per_device: samples of a microbatch on one device.
    remat: what the backward pass computes again.
    rates: how many copies of what is counted there are.
  """
  held = memory_work(work, chip, mesh, per_device, remat)
  activations = sum(rates.memory[kind] * size for kind, size in held.items())
  return StepBytes(state_bytes(work, mesh), round(activations))


def state_bytes(work: StepWork, mesh: Topology) -> int:
  """Returns bytes of parameters, optimizer state and float32 accumulators on one device."""
  each = work.weight_bytes + work.optimizer_bytes + 4
  return round(work.parameters * each / math.prod(weight_shards(work, mesh)))


def memory_work(
  work: StepWork, chip: Chip, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> dict[str, float]:
  """Returns bytes of what may lie in memory at the peak, by kind, one copy of each."""
  ways, c = mesh.shape["tensor"], work.model
  M, size = float(per_device * ways * work.length), work.compute_bytes
  D, L = c.base_emb_dim, c.base_num_decoder_layers
  queries, keys = (
    c.base_num_query_heads * query_dim(c) / ways,
    kv_heads_of_rows(work, mesh) * query_dim(c) / ways,
  )
  hidden = hidden_width(c) / ways * (1 if c.mlp_activation == "gelu" else 2)
  shards = weight_shards(work, mesh)
  tiles, logits = work.tiles(M, ways, is_gpu=chip.is_gpu), M * c.vocab_size / ways
  kept = logits * size if tiles > 1 and work.keeps_gradients(M) else 0
  # Weights are gathered for a layer; all layers' are kept where they are not divided and nothing is
  # computed again.
  num_layers = L if shards[0] == 1 and remat == "none" else 1
  return {
    "residuals": L * M * residual_bytes(work, chip, ways, remat),
    "stream": M * D * size,
    "hidden": M * hidden * size,
    "heads": M * 2 * (queries + keys) * size,
    "layer": num_layers * work.layer_parameters / ways * size,
    "table": work.table_parameters / ways * size,
    # Those of one microbatch, before they are added to the sum.
    "gradients": work.parameters * 4 / math.prod(shards),
    "tile": logits * 4 / tiles,
    "kept": kept,
  }


@dataclasses.dataclass(frozen=True)
class StepRoofline:
  """One step, as estimated."""

  step_seconds: float
  microbatch_seconds: float
  """The part of one microbatch."""
  rest_seconds: float
  """The part of the update, and of gradients between data replicas."""
  utilisation: float
  """Model FLOPs over what the devices could do at their peak in that time."""
  tokens_per_second: float
  """Rate of all devices."""
  bytes: StepBytes
  capacity_bytes: int
  """What the compiler leaves to programs on this chip."""
  limited_by: Limit
  parts: Mapping[str, float]
  """Seconds of a step by part: attention, mlp, norm, head, embedding, other, collectives, optimizer."""
  limits: RooflineSeconds
  """Seconds of a step by what limits them."""
  how: Literal["estimated", "compiled"]
  """compiled: seconds of a microbatch and bytes are the compiler's, of this very step."""
  rates: StepRates
  """Those that it is estimated with."""

  @property
  def peak_bytes(self) -> int:
    """Peak bytes of one device."""
    return self.bytes.peak

  @property
  def free_bytes(self) -> int:
    """Bytes left of the device's memory; negative where the step does not fit."""
    return self.capacity_bytes - self.peak_bytes

  @property
  def fits(self) -> bool:
    """Whether the peak is within the capacity."""
    return self.free_bytes >= 0

  def at_share(self, share: float) -> "StepRoofline":
    """Returns the same step at this share of its speed: every time is 1/share as long."""
    return dataclasses.replace(
      self,
      step_seconds=self.step_seconds / share,
      microbatch_seconds=self.microbatch_seconds / share,
      rest_seconds=self.rest_seconds / share,
      utilisation=self.utilisation * share,
      tokens_per_second=self.tokens_per_second * share,
      parts={part: seconds / share for part, seconds in self.parts.items()},
      limits=_scaled(self.limits, 1 / share),
    )


def step_roofline(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  num_microbatches: int,
  remat: RematPolicy,
  rates: StepRates | None = None,
) -> StepRoofline:
  """Returns a step as it was compiled, where its model, mesh, microbatch and policy are in the
  table of compiled steps; else estimates one.

  Args:
    mesh: all devices; those along `stage` are not modelled.
    per_device: samples of a microbatch on one device.
    remat: what the backward pass computes again.
    rates: estimate with these, whatever has been compiled; None: with the package's.
  """
  known = None if rates else compiled_step(work, chip, mesh, per_device, remat)
  rates = rates or step_rates(chip)
  microbatch: dict[Part, RooflineSeconds] = {
    part: part_seconds(one, chip, rates)
    for part, one in microbatch_work(work, chip, mesh, per_device, remat).items()
  }
  waits = _collectives(work, chip, mesh, per_device, remat, rates, microbatch)
  held = step_bytes(work, chip, mesh, per_device, remat, rates)
  once = sum((one for one in microbatch.values()), waits)
  shares: dict[str, float] = {part: one.total for part, one in microbatch.items()}
  shares["collectives"] = waits.total
  if known:
    once = _scaled(once, known.microbatch_seconds / once.total)
    held = StepBytes(known.state_bytes, known.peak_bytes - known.state_bytes)
    shares = shared_parts(known, shares)
  moved = rates.traffic.get("update", 1.0) * update_bytes(work, mesh)
  update, replicas = RooflineSeconds(memory=moved / chip.hbm_bandwidth), _replicas(work, chip, mesh)
  limits = _scaled(once, num_microbatches) + update + replicas
  parts = {part: num_microbatches * seconds for part, seconds in shares.items()}
  parts["collectives"] += replicas.total
  tokens = num_microbatches * float(per_device * work.length)
  return StepRoofline(
    step_seconds=limits.total,
    microbatch_seconds=once.total,
    rest_seconds=update.total + replicas.total,
    utilisation=tokens * work.model_flops_per_token / limits.total / chip.peak_flops,
    tokens_per_second=mesh.num_devices * tokens / limits.total,
    bytes=held,
    capacity_bytes=chip.usable_bytes,
    limited_by=limits.limit,
    parts=parts | {"optimizer": update.total},
    limits=limits,
    how="compiled" if known else "estimated",
    rates=rates,
  )


def shared_parts(known: CompiledStep, estimated: Mapping[str, float]) -> dict[str, float]:
  """Divides the seconds of a compiled microbatch, where the report has only their sum, among its
  parts as they are estimated; their waits for links are put together."""
  if not known.parts:
    factor = known.microbatch_seconds / sum(estimated.values())
    return {part: factor * seconds for part, seconds in estimated.items()}
  busy = sum(known.parts.values())
  kept = (known.microbatch_seconds - known.waits) / busy
  return {part: kept * known.parts.get(part, 0.0) for part in estimated} | {
    "collectives": known.waits
  }


def part_seconds(one: PartWork, chip: Chip, rates: StepRates) -> RooflineSeconds:
  """Returns the time of a part: products, kernels, elementwise work and traffic in turn."""
  products = one.products / chip.peak_flops / rates.product[chip.generation] * chip.calibration
  reading = one.weights / chip.hbm_bandwidth
  cycles = sum(rates.cycles.get(kind, 0.0) * count for kind, count in one.registers.items())
  vectors = cycles / chip.clock / chip.tensor_cores + one.kernels / chip.peak_flops
  moved = sum(rates.traffic.get(kind, 0.0) * size for kind, size in one.traffic.items())
  if reading > products:
    return RooflineSeconds(compute=vectors, memory=reading + moved / chip.hbm_bandwidth)
  return RooflineSeconds(compute=products + vectors, memory=moved / chip.hbm_bandwidth)


def _scaled(one: RooflineSeconds, factor: float) -> RooflineSeconds:
  return RooflineSeconds(factor * one.compute, factor * one.memory, factor * one.interconnect)


def _collectives(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  remat: RematPolicy,
  rates: StepRates,
  microbatch: Mapping[Part, RooflineSeconds],
) -> RooflineSeconds:
  """Returns what computing waits for; what runs beside the products waits where it takes longer."""
  links = link_seconds(work, chip, mesh, per_device, remat)
  weights = links.gathers + links.reductions
  share = _waits(rates, chip, mesh)
  layers = sum(microbatch[part].total for part in ("attention", "mlp", "norm"))
  late = max(0.0, (1 - share) * weights - layers)
  return RooflineSeconds(interconnect=share * weights + late + links.activations)


def _waits(rates: StepRates, chip: Chip, mesh: Topology) -> float:
  """Returns the rate of the generation; of one without compiled steps of that width, the mean of
  the others."""
  width = "wide" if is_wide(mesh, chip) else "narrow"
  known = [share for name, share in rates.waits.items() if name.endswith(width)]
  return rates.waits.get(f"{chip.generation} {width}", sum(known) / max(1, len(known)))


def update_bytes(work: StepWork, mesh: Topology) -> float:
  """Returns the bytes of the update on one device: weights and the optimizer's state read and
  written, gradients read and cleared."""
  each = 2 * (work.weight_bytes + work.optimizer_bytes) + 8
  return work.parameters * each / math.prod(weight_shards(work, mesh))


def _replicas(work: StepWork, chip: Chip, mesh: Topology) -> RooflineSeconds:
  """Times all-reduces of gradients in float32 over the data replicas, once a step; between slices
  their hosts' network is the slowest part."""
  replicas = mesh.shape["data"]
  divided = math.prod(weight_shards(work, mesh))
  stride = sharded(mesh) * mesh.shape["tensor"]
  each = ring_seconds(chip, replicas, stride, crosses=mesh.dcn["data"] > 1)
  return RooflineSeconds(interconnect=2 * 4 * work.parameters / divided * each)
