"""The compile report: what a compiled step needs and how long it takes, before it ever runs.

Every number says where it comes from: the compiler (memory), an estimate (TPU time, from the
compiler's cycles and the chip's published figures), or a measurement on the devices present.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from maxbatch.command_line.screen import figure, in_unit, section
from maxbatch.compile.measured_time import Timing
from maxbatch.compile.program import CompiledProgram, ProgramMemory, StateBytes, state_bytes
from maxbatch.compile.report_time import (
  StepTime,
  estimated_time,
  in_filling,
  in_microbatches,
  measured_time,
  why_not_estimated,
)
from maxbatch.compile.step_identity import compiler_environment
from maxbatch.compile.traced_flops import StepFlops, model_flops_per_token
from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.data.input_report import InputReport
from maxbatch.estimate import hlo
from maxbatch.estimate.chips import UNKNOWN_CHIP, Chip, chip_for
from maxbatch.estimate.costs import OperationCost, program_costs
from maxbatch.estimate.step_time import Exchange, StepEstimate, connected, estimate
from maxbatch.training.step import Trainer

_NUM_LARGEST = 8


def memory_figures(rows: Sequence[tuple[str, int]], capacity: int) -> list[str]:
  """Returns a line for each size of a device's memory, of which the last one is the peak."""
  peak = rows[-1][1]
  lines = [figure(name, *in_unit(size, peak)) for name, size in rows]
  verdict = "fits" if peak <= capacity else "DOES NOT FIT"
  held, unit = in_unit(capacity, capacity, ".2f")
  unit = "" if lines[-1].endswith(unit) else f" {unit}"
  return [*lines[:-1], f"{lines[-1]} of {held}{unit}: {verdict}"]


class Sampling(Protocol):
  """What is known of the programs that sample what a step is fed, on one device."""

  @property
  def beside_training(self) -> int:
    """Bytes that a device which trains holds meanwhile, beside what the step counts itself."""
    ...

  def largest(self, step: ProgramMemory, state: int) -> int:
    """Returns the bytes that a device needs, be it for the step or for sampling; `state`: between
    steps."""
    ...

  def step_seconds(self, training: float) -> float | None:
    """Returns seconds of a step with its sampling, by those of its training; None: not known."""
    ...

  def as_dict(self, state: int, rows: int) -> dict[str, Any]:
    """Returns plain values; what is not known is left out."""
    ...

  def memory_lines(self, state: int, rows: int, training: int, capacity: int) -> str:
    """Returns the table of a device's memory while it samples."""
    ...

  def time_lines(self, training: float | None) -> str:
    """Returns seconds of sampling and of a step, by those that its training takes."""
    ...


@dataclasses.dataclass(frozen=True)
class CompileReport:
  """One compiled step: the program for phases of one microbatch."""

  title: str
  plan: BatchPlan
  micro_batch: int
  program: CompiledProgram
  state: StateBytes
  capacity_bytes: int
  chip: Chip | None
  """Published figures of the device; None where there are none here."""
  work: StepEstimate
  time: StepTime | None
  """None: the devices are not here, and nothing is published about them or the compiler's text of the
  program is not understood."""
  model_flops_per_token: float
  input_function: InputReport | None = None
  """What the run would read; the same for all of its steps, so that one of their reports has it."""
  sampling: Sampling | None = None
  """The programs that sample the step's input."""
  compiler_flags: str = ""
  """With which the step was compiled."""
  not_estimated: str = ""
  """Why the compiler's text gives no time; empty where it does, or was not asked."""
  operations: Sequence[OperationCost] = ()
  """Operations of the program; those in its loop over microbatches as often as one microbatch does
  them."""

  @property
  def num_microbatches(self) -> int:
    """Microbatches of the largest step of this shape."""
    return self.plan.largest_phase(self.micro_batch).num_microbatches

  @property
  def step_tokens(self) -> int:
    """Tokens of that step."""
    return self.plan.tokens(self.plan.largest_phase(self.micro_batch).batch)

  @property
  def model_microbatch_flops(self) -> float:
    """FLOPs that the model asks of one device in one microbatch."""
    return self.model_flops_per_token * float(self.plan.device_tokens(self.micro_batch))

  @property
  def rows_bytes(self) -> int:
    """Bytes of the step's input, on one device."""
    return max(0, self.program.memory.arguments - self.state.total)

  @property
  def training_peak(self) -> int:
    """Bytes of a device while the step runs, with what lies there beside it."""
    return self.program.memory.peak + (self.sampling.beside_training if self.sampling else 0)

  @property
  def peak(self) -> int:
    """Peak bytes of training and sampling, the larger."""
    memory = self.program.memory
    return self.sampling.largest(memory, self.state.total) if self.sampling else memory.peak

  @property
  def fits(self) -> bool:
    """Whether the peak is within the capacity."""
    return self.peak <= self.capacity_bytes

  @property
  def step_seconds(self) -> float | None:
    """Seconds of a step of `num_microbatches` microbatches."""
    return self.time.of(self.num_microbatches) if self.time else None

  @property
  def sampled_step_seconds(self) -> float | None:
    """Seconds of a step with its sampling."""
    if self.sampling is None or self.step_seconds is None:
      return None
    return self.sampling.step_seconds(self.step_seconds)

  @property
  def utilisation(self) -> float | None:
    """Model FLOPs over what the devices could do at their peak in the same time."""
    if self.chip is None or self.step_seconds is None:
      return None
    return (
      self.num_microbatches * self.model_microbatch_flops / self.step_seconds / self.chip.peak_flops
    )

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values; what is not known is left out."""
    memory, work, plan = self.program.memory, self.work, self.plan
    results: dict[str, Any] = {
      "title": self.title,
      "micro_batch_to_train": self.micro_batch,
      "per_device_batch_size": text(plan.per_device(self.micro_batch)),
      "gradient_accumulation_steps": self.num_microbatches,
      "tokens_per_step": self.step_tokens,
      "memory_bytes_per_device": {
        **dataclasses.asdict(self.state),
        "rows": self.rows_bytes,
        "activations_and_temporaries": memory.temporaries,
        **({"rollout": self.sampling.beside_training} if self.sampling else {}),
        **({"left_out_by_the_compiler": dict(memory.left_out)} if memory.left_out else {}),
        "peak": self.training_peak,
        "capacity": self.capacity_bytes,
        "host": memory.host,
        "fits": self.fits,
      },
      "flops_per_device": {
        "model_microbatch": self.model_microbatch_flops,
        "program_microbatch": work.microbatch_flops,
        "program_rest": work.rest_flops,
      },
      "bytes_per_device": {"microbatch": work.microbatch_bytes, "rest": work.rest_bytes},
      "collectives": [dataclasses.asdict(each) for each in work.collectives],
      "compile_seconds": self.program.compile_seconds,
      "compiler_flags": self.compiler_flags,
    }
    if self.time is not None and self.step_seconds is not None:
      results["time"] = {
        "how": self.time.how,
        "step_seconds": self.step_seconds,
        "seconds_per_microbatch": self.time.seconds_per_microbatch,
        "seconds_rest": self.time.rest,
        "tokens_per_second": self.step_tokens / self.step_seconds,
        **({} if self.time.spread is None else {"spread": self.time.spread}),
        **({"model_flop_utilisation": self.utilisation} if self.utilisation else {}),
      }
    if self.not_estimated:
      results["not_estimated"] = self.not_estimated
    if self.sampling is not None:
      seconds = self.sampled_step_seconds
      known = {"step_seconds": seconds} if seconds else {}
      results["rollout"] = self.sampling.as_dict(self.state.total, self.rows_bytes) | known
    if self.input_function is not None:
      results["input_function"] = self.input_function.as_dict()
    if self.time is not None and self.time.how == "estimate":
      results["estimate"] = {
        "limited_by": work.limited_by,
        "coverage": work.coverage,
        "compiler_share": work.compiler_share,
        "seconds_by_scope": work.by_scope(self.num_microbatches),
        "largest": [dataclasses.asdict(each) for each in work.largest],
        "bounded_by_roofline": [dataclasses.asdict(each) for each in work.unestimated],
      }
    return results

  def __str__(self) -> str:
    compiled = f"  compiled in {self.program.compile_seconds:.1f} s"
    parts = [
      f"{self.title}\n{compiled}",
      self._memory(),
      self.sampling.memory_lines(
        self.state.total, self.rows_bytes, self.training_peak, self.capacity_bytes
      )
      if self.sampling
      else "",
      self._work(),
      self._time(),
      self.sampling.time_lines(self.step_seconds) if self.sampling else "",
      *self._where(),
      self._moved(),
      str(self.input_function or ""),
    ]
    return "\n\n".join(part for part in parts if part)

  def _memory(self) -> str:
    memory, state = self.program.memory, self.state
    frozen = [("frozen parameters", state.frozen_parameters)] if state.frozen_parameters else []
    rows = [
      ("parameters", state.parameters),
      *frozen,
      ("optimizer state", state.optimizer_state),
      ("gradient accumulators", state.accumulators),
      ("rows of the step", self.rows_bytes),
      ("activations, temporaries", memory.temporaries),
      *memory.left_out.items(),
      *([("policies and a rollout", self.sampling.beside_training)] if self.sampling else []),
      ("peak", self.training_peak),
    ]
    lines = memory_figures(rows, self.capacity_bytes)
    if host := self.program.memory.host:
      lines.append(figure("in the memory of its host", *in_unit(host, host)))
    return section("Memory of a device (compiler)", lines)

  def _work(self) -> str:
    plan, work, num_microbatches = self.plan, self.work, self.num_microbatches
    model = self.model_microbatch_flops
    flops, moved = work.microbatch_flops, work.microbatch_bytes
    again = f" ({flops / model:.2f} of the model's: what is computed again counts twice)"
    shape = f"{text(plan.per_device(self.micro_batch))} samples per device"
    return section(
      f"Work of a device in one microbatch of {shape}, of which a step has {num_microbatches:,}",
      [
        figure("model", f"{model / 1e12:.4g}", "TFLOP"),
        figure("program", f"{flops / 1e12:.4g}", f"TFLOP{again if model else ''}"),
        figure("main memory", f"{moved / 1e9:.4g}", "GB read and written"),
      ],
    )

  def _time(self) -> str:
    time, seconds = self.time, self.step_seconds
    if time is None or seconds is None:
      no_figures = "the devices are not here, and no figures of them are known"
      return f"Time: unknown; {self.not_estimated or no_figures}"
    speed = self.step_tokens / seconds
    each = self.num_microbatches * float(self.plan.device_tokens(self.micro_batch)) / seconds
    spread = f" ± {time.spread:.1%}" if time.spread is not None else ""
    parts = f"{time.rest:.4g} s + {self.num_microbatches:,} × {time.seconds_per_microbatch:.4g} s"
    lines = [
      figure("a step", f"{seconds:.4g}", f"s{spread}: {parts} a microbatch"),
      figure("tokens per second", f"{speed:,.0f}", f"({each:,.0f} a device)"),
    ]
    if self.utilisation is not None and self.chip is not None:
      peak = f"of {self.chip.peak_flops / 1e12:g} TFLOP/s"
      lines.append(figure("model-FLOP utilisation", f"{self.utilisation:.1%}", peak))
    if time.how == "estimate":
      work = self.work
      covered = (
        f"of the matrix products have a time, {work.compiler_share:.1%} of these from the compiler, "
        "the rest from the roofline"
      )
      lines += [
        figure("limited by", work.limited_by),
        figure("coverage", f"{work.coverage:.1%}", covered),
      ]
    return section(f"Time ({time.how})", lines)

  def _where(self) -> list[str]:
    """Returns the time by part of the model, and the largest single operations."""
    if self.time is None or self.time.how != "estimate":
      return []
    scopes = self.work.by_scope(self.num_microbatches)
    total = sum(scopes.values())
    by_part = [figure(name, f"{s:.4g}", f"s {s / total:6.1%}") for name, s in scopes.items()]
    bounded = sum(one.seconds for one in self.work.unestimated if one.in_microbatch_loop)
    largest = [
      f"{one.seconds:10.4g} s  {one.scope:<10} {one.how:<9} {one.count:>5} × {one.name}"
      for one in self.work.largest[:_NUM_LARGEST]
    ]
    names = sorted({one.name.partition(".")[0] for one in self.work.unestimated[:_NUM_LARGEST]})
    note = (
      f"roofline: {bounded:.4g} s of a microbatch are bounds, from the chip's figures and the instructions of "
      f"attention's kernels, not the compiler's estimates; the longest are {', '.join(names)}"
    )
    return [
      section("Where a step's time goes (estimate)", by_part),
      section("Largest operations (estimate; in one microbatch)", [*largest, note]),
    ]

  def _moved(self) -> str:
    """Returns collectives, inside and outside of the loop over microbatches."""
    result = map(self._exchange, self.work.collectives)
    return (
      section("Collectives of a device", result) if self.work.collectives else "Collectives: none"
    )

  def _exchange(self, one: Exchange) -> str:
    where = "each microbatch" if one.in_microbatch_loop else "each step"
    beside = "beside the work" if one.overlapped else "work waits"
    seconds = f", {one.seconds:.3g} s on the links (estimate)" if self.chip else ""
    where_to = "hosts" if self.chip is not None and self.chip.is_gpu else "slices"
    slices = f", across {where_to}" if one.crosses_slices else ""
    return (
      f"{where:<15}  {one.count:>5} × {one.kind:<19} {one.bytes / 1e9:9.4g} GB in groups of "
      f"{one.group_size}{slices}, {beside}{seconds}"
    )


def make_report(
  plan: BatchPlan,
  trainer: Trainer,
  program: CompiledProgram,
  micro_batch: int,
  capacity: int,
  measured: Timing | None,
  title: str,
  sampling: Sampling | None = None,
  *,
  network_gbps: float = 0,
) -> CompileReport:
  """Puts together what is known of a compiled step.

  Args:
    measured: its time on the devices, where they are here; None asks for an estimate.
    sampling: of what samples what the step is fed.
    network_gbps: of a device, between hosts or slices; 0: as published.
  """
  layout, device = plan.topology, trainer.mesh.devices.flat[0]
  chip = chip_for(device.device_kind, network_gbps)
  once = program_costs(hlo.parse(program.text))
  costs, expected = in_microbatches(trainer.pipeline, once, program.flops)
  if program.streamed:
    # Its loop of one trip is unrolled away, or holds only part: without this all would be the rest.
    costs = [dataclasses.replace(cost, in_microbatch_loop=True) for cost in costs]
    expected = StepFlops(per_microbatch=expected.total, rest=0.0)
  per_slice = connected(layout, chip)
  work = estimate(costs, chip or UNKNOWN_CHIP, expected.per_microbatch, expected.rest, per_slice)
  time, not_estimated = None, ""
  if measured is not None:
    time = measured_time(measured, streamed=program.streamed)
  elif chip is not None:
    versions = compiler_environment(device)
    not_estimated = why_not_estimated(work, costs, expected.total, versions)
    known = estimated_time(work, once, trainer.pipeline, chip, per_slice, streamed=program.streamed)
    time = None if not_estimated else known
  # As parts of the rest of a step.
  filling = [
    dataclasses.replace(cost, in_microbatch_loop=False)
    for cost in in_filling(trainer.pipeline, once)
  ]
  return CompileReport(
    title=title,
    plan=plan,
    micro_batch=micro_batch,
    program=program,
    state=state_bytes(trainer.abstract),
    capacity_bytes=capacity,
    chip=chip,
    work=work,
    time=time,
    model_flops_per_token=model_flops_per_token(trainer.model, plan.max_target_length),
    sampling=sampling,
    compiler_flags=str(trainer.compiler_flags),
    not_estimated=not_estimated,
    operations=(*costs, *filling),
  )
