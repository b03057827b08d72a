"""How a global batch is best divided over a slice: mesh, microbatch, accumulation and remat, estimated.

    found = best_split(step_work(config), CHIPS["v5e"], 256, batch=1024)
    found.keys        # what to set: ici_fsdp_parallelism=256, micro_batch_size=4, …
    found.step        # a StepRoofline: seconds, memory, what limits

Every split is estimated (step_roofline.py), some hundred in a fraction of a second, unless this very step
has been compiled. The best of so many estimates is one of those that err in its favour, and far beyond what
was compiled they say nothing: `choosable` takes out the one, `is_near_compiled` refuses the other.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from maxbatch.command_line.screen import gib_of
from maxbatch.core.keys import counted, text
from maxbatch.core.solve import nearest_batches, nearest_multiples, splits_of
from maxbatch.core.topology import Topology, row_shares
from maxbatch.errors import UserError
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.compiled_steps import most_compiled_tokens
from maxbatch.estimate.pipeline_roofline import Stages, pipeline_roofline
from maxbatch.estimate.step_roofline import StepRoofline, step_roofline
from maxbatch.estimate.step_work import RematPolicy, StepWork
from maxbatch.pipeline_parallel.layout import smallest_microbatch

REMAT_POLICIES: tuple[RematPolicy, ...] = ("none", "minimal", "full")
_MOST_TENSOR = 8
"""Devices that share a layer: over more the sums of activations take longer than the products."""
_MOST_EXTRAPOLATED = 2
"""Times the tokens that a device had in any compiled step: far beyond, memory was off by a half."""


@dataclasses.dataclass(frozen=True)
class BatchSplit:
  """One way to divide a batch, with what a step of it takes."""

  mesh: Topology
  batch: int
  """Samples of a step."""
  per_device: Fraction
  """Samples of a microbatch on one device."""
  num_microbatches: int
  remat: RematPolicy
  step: StepRoofline
  stages: Stages | None = None
  """Of a pipeline."""

  @property
  def keys(self) -> dict[str, str]:
    """The configuration's keys that ask for it, with their values."""
    ici, replicas = self.mesh.ici, self.mesh.dcn["data"]
    slices = {"dcn_data_parallelism": str(replicas)} if replicas > 1 else {}
    if self.stages:
      slices |= {
        "ici_pipeline_parallelism": str(self.stages.in_slice),
        "dcn_pipeline_parallelism": str(self.stages.slices),
        "num_pipeline_microbatches": str(self.stages.fewest_microbatches),
      }
    sharing = {"ici_context_parallelism": str(ici["context"])} if "context" in ici else {}
    return {
      "batch_size": str(self.batch),
      "micro_batch_size": text(self.per_device),
      "remat_policy": self.remat,
      "ici_data_parallelism": str(ici["data"]),
      "ici_fsdp_parallelism": str(ici["fsdp"]),
      **sharing,
      "ici_tensor_parallelism": str(ici["tensor"]),
      **slices,
    }


def best_split(
  work: StepWork,
  chip: Chip,
  devices_per_slice: int,
  batch: int,
  num_slices: int = 1,
  policies: Sequence[RematPolicy] = REMAT_POLICIES,
  capacity_bytes: int | None = None,
  stages: Stages | None = None,
) -> BatchSplit:
  """Returns the fastest split that fits, on the simplest mesh that is about as fast as any.

  Args:
    devices_per_slice: or of all devices, where there is one slice.
    num_slices: such sets of devices, connected by their hosts' network alone.
    capacity_bytes: what a device may use; None: what the compiler leaves to programs.
    stages: of a pipeline, which every split then has.

  Raises:
    UserError: the batch divides over no mesh, or no split fits.
  """
  result = splits(work, chip, devices_per_slice, batch, num_slices, policies, stages)
  place = _place(devices_per_slice, num_slices, stages)
  if not result:
    near = " or ".join(
      str(size) for size in divisible_batches(work, devices_per_slice, batch, num_slices, stages)
    )
    raise UserError(f"batch_size={batch} does not divide over {place}; nearest: batch_size={near}")
  fitting = [one for one in result if is_safe(one.step, capacity_bytes)]
  if not fitting:
    least = min(result, key=lambda one: one.step.peak_bytes).step
    raise UserError(
      f"batch_size={batch} on {place}: no split fits; the smallest needs "
      f"about {gib_of(least.peak_bytes, least.capacity_bytes)}; take more devices"
    )
  return simplest(fitting)


def simplest(results: Sequence[BatchSplit]) -> BatchSplit:
  """Returns the fastest on the simplest mesh that is about as fast as any: what differs by less
  than estimates usually err is no reason to share layers, or for replicas."""
  most = max(one.step.tokens_per_second for one in results)
  enough = most / (1 + results[0].step.rates.spread["seconds"])
  alike = [one for one in results if one.step.tokens_per_second >= enough]

  def complexity(one: BatchSplit) -> tuple[int, int, int, float]:
    sizes = one.mesh.shape
    return sizes["tensor"], sizes.get("context", 1), sizes["data"], -one.step.tokens_per_second

  return min(alike, key=complexity)


def _place(devices_per_slice: int, num_slices: int, stages: Stages | None) -> str:
  devices = counted(devices_per_slice, "device")
  place = devices if num_slices == 1 else f"{num_slices} slices of {devices}"
  return f"{place} in {stages.count} stages" if stages else place


def is_safe(step: StepRoofline, capacity_bytes: int | None) -> bool:
  """Returns whether it fits although the activations' estimate may be too low by its usual error."""
  likely = step.bytes.state + (1 + step.rates.spread["bytes"]) * step.bytes.activations
  return likely <= (step.capacity_bytes if capacity_bytes is None else capacity_bytes)


def splits(
  work: StepWork,
  chip: Chip,
  devices_per_slice: int,
  batch: int,
  num_slices: int = 1,
  policies: Sequence[RematPolicy] = REMAT_POLICIES,
  stages: Stages | None = None,
) -> list[BatchSplit]:
  """Returns every split of a batch that can be judged, fitting or not, the fastest first; arguments as
  `best_split`."""
  results = [
    BatchSplit(
      mesh, batch, size, count, remat, choosable(*given, size, count, remat, stages), stages
    )
    for mesh in meshes(work, devices_per_slice, num_slices, stages)
    for given in [(work, chip, mesh)]
    for size, count in splits_of(batch, mesh)
    if stages is None or batch % (count * smallest_microbatch(mesh, stages.forwarding_delay)) == 0
    for remat in policies
  ]
  known = [one for one in results if is_near_compiled(work, chip, one)]
  return sorted(known, key=lambda one: one.step.step_seconds)


def choosable(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  num_microbatches: int,
  remat: RematPolicy,
  stages: Stages | None = None,
) -> StepRoofline:
  """Returns a step that is one of many to choose from: as compiled, or estimated, without the bias that the
  choice gives an estimate; arguments as `step_roofline` or `pipeline_roofline`."""
  if stages:
    step = pipeline_roofline(work, chip, mesh, per_device, num_microbatches, remat, stages)
    return step.at_share(step.rates.chosen)
  step = step_roofline(work, chip, mesh, per_device, num_microbatches, remat)
  return step if step.how == "compiled" else step.at_share(step.rates.chosen)


def is_near_compiled(work: StepWork, chip: Chip, split: BatchSplit) -> bool:
  """Returns whether a split was compiled, gives a device at most twice the tokens of any step that was, or
  is the smallest of its mesh."""
  rows = split.per_device * split.mesh.num_devices / split.mesh.num_batch_groups
  tokens = split.per_device * work.length
  if split.stages:
    rows /= split.stages.fewest_microbatches
    tokens /= split.stages.forwarding_delay
  is_near = tokens <= _MOST_EXTRAPOLATED * most_compiled_tokens(chip.is_gpu)
  return is_near or rows <= 1 or split.step.how == "compiled"


def divisible_batches(
  work: StepWork,
  devices_per_slice: int,
  batch: int,
  num_slices: int = 1,
  stages: Stages | None = None,
) -> list[int]:
  """Returns the batch, or the nearest ones, that some mesh of these devices divides, ascending."""

  def nearest(mesh: Topology) -> Sequence[int]:
    if stages is None:
      return nearest_batches(batch, mesh)
    unit = smallest_microbatch(mesh, stages.forwarding_delay)
    return (
      [int(size) for size in nearest_multiples(unit, Fraction(batch))] if batch % unit else [batch]
    )

  near = {
    size for mesh in meshes(work, devices_per_slice, num_slices, stages) for size in nearest(mesh)
  }
  below = [size for size in near if size <= batch]
  above = [size for size in near if size >= batch]
  return sorted({*([max(below)] if below else []), *([min(above)] if above else [])})


def meshes(
  work: StepWork, devices_per_slice: int, num_slices: int = 1, stages: Stages | None = None
) -> Iterator[Topology]:
  """Yields meshes worth estimating: devices that share layers × that share rows × replicas × that divide
  weights alone, of each stage if there are any.

  Devices share long rows: so many, that each has thousands of their tokens. Slices are data replicas of each
  other: their network is too slow for anything each microbatch needs.
  """
  if stages:
    # Devices, and slices, that the stages do not divide make no mesh.
    if devices_per_slice % stages.in_slice == 0 and num_slices % stages.slices == 0:
      of_stage = devices_per_slice // stages.in_slice, num_slices // stages.slices
      for mesh in meshes(work, *of_stage):
        ici, dcn = {"stage": stages.in_slice}, {"stage": stages.slices}
        yield Topology({**mesh.ici, **ici}, {**mesh.dcn, **dcn})
    return
  c = work.model
  shared = math.gcd(math.gcd(c.base_num_kv_heads, c.base_num_query_heads), c.base_mlp_dim)
  for tensor in (1, 2, 4, _MOST_TENSOR):
    if devices_per_slice % tensor or shared % tensor or c.vocab_size % tensor:
      continue
    for context in row_shares(work.length, devices_per_slice // tensor):
      if context > 1 and c.base_num_query_heads % (context * tensor):
        continue
      groups = devices_per_slice // tensor // context
      for data in (2**power for power in range(groups.bit_length())):
        if groups % data == 0 and c.base_emb_dim % (context * groups // data) == 0:
          sizes = {"data": data, "fsdp": groups // data, "context": context, "tensor": tensor}
          yield Topology(sizes, {"data": num_slices})
