"""The noise scale in a run: which program a step takes, what is measured, reported and decided.

Moments are those of every group of parameters: the whole model, a type of layer (norm, attention,
mlp, embedding, head) or one layer of the stack. Squared norms are summed over a group's parameters
before moments are formed.

A step's gradient is Σ s_b / W: s_b is the gradient of row b's summed loss, W the step's tokens.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import jax
import numpy as np

from maxbatch.config.schema import NoiseConfig
from maxbatch.core.keys import text
from maxbatch.core.noise_scale import TOTAL, Estimate, Moments, moments
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.placement import alone_at_first
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import sync_errors
from maxbatch.models.registry import Model, Probed
from maxbatch.noise.advice import NORM, NoiseTracker, advice
from maxbatch.noise.controller import Steering
from maxbatch.run_folder.metrics import Record
from maxbatch.training.state import TrainState, measured_by
from maxbatch.training.step import NoiseSums, Step, StepMetrics


class StepPrograms:
  """Compiled steps by microbatch size; a context manager."""

  def __init__(self, compile_for: Callable[[int], Step], micro_batches: Sequence[int]):
    """Takes the shapes of `micro_batches` in the order in which the run first meets them."""
    self._compile_for, self._order = compile_for, list(micro_batches)
    self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
    self._programs: dict[int, Future[Step]] = {}
    self._alone: dict[int, Step] = {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    # A compilation under way cannot be stopped; it is waited for unless a person is in a hurry.
    hurried = kind is not None and issubclass(kind, KeyboardInterrupt)
    self._pool.shutdown(wait=not hurried, cancel_futures=True)

  def __call__(self, micro_batch: int) -> Step:
    """Returns the step for this microbatch; begins to compile the one that comes after it."""
    program = self._program(micro_batch)
    step = self._alone.setdefault(micro_batch, alone_at_first(program.result()))
    after = self._order.index(micro_batch) + 1
    if after < len(self._order):
      self._program(self._order[after])
    return step

  def all(self) -> dict[int, Step]:
    """Returns every step of the run by microbatch, once all are compiled."""
    return {size: self._program(size).result() for size in self._order}

  def _program(self, micro_batch: int) -> Future[Step]:
    if micro_batch not in self._programs:
      self._programs[micro_batch] = self._pool.submit(self._compile_for, micro_batch)
    return self._programs[micro_batch]


class Meter(Protocol):
  """What takes in each step's metrics, in order, and knows the noise scale from them."""

  def is_calibration(self, step: int) -> bool:
    """Returns whether the update after `step` others measures all layers, to calibrate what the
    norms measure."""
    ...

  def model_at(self, step: int) -> Model:
    """Returns the model that the update after `step` others runs."""
    ...

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what the update after `step` others adds to its record; `metrics` are on the host."""
    ...

  def total(self) -> Estimate:
    """Returns the noise scale of the whole model."""
    ...

  def line(self, batch: int) -> str:
    """Says what is known, and what it means for steps of `batch` samples."""
    ...

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON, from which a resumed run goes on as this one would."""
    ...

  def restore(self, content: Mapping[str, Any]) -> None:
    """Takes up what `as_dict` gave; a window of another length begins anew."""
    ...


@dataclasses.dataclass(frozen=True)
class Noise:
  """What a run needs to measure the noise scale, and to steer by it."""

  meter: Meter
  calibration: StepPrograms | None
  """The steps that measure all layers where others measure the normalization layers."""
  report_every: int
  steering: Steering | None
  folder: pathlib.Path

  def programs_at(self, step: int, ordinary: StepPrograms) -> StepPrograms:
    """Returns the programs for the update after `step` others."""
    calibrating = self.calibration if self.meter.is_calibration(step) else None
    return calibrating or ordinary

  def ready(self, step: int, state: TrainState) -> TrainState:
    """Returns the state as that program takes it: between steps its sums are zeros, in their own
    shapes."""
    return state if self.calibration is None else measured_by(state, self.meter.model_at(step))

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what the update after `step` others adds to its record; `metrics` are on the host."""
    if self.steering is not None:
      self.steering.observe(float(metrics.loss))
    return self.meter.observe(step, metrics)

  def report(self, record: Record, say: Callable[[str], None]) -> None:
    """Says what the batch of a step is worth, when it is time to."""
    if self.report_every and int(record["step"]) % self.report_every == 0 and record["step"]:
      say(self.meter.line(int(record["global_batch_to_train"])))

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON, from which a resumed run goes on as this one would."""
    steering = self.steering.as_dict() if self.steering else None
    return {"meter": self.meter.as_dict(), "steering": steering}

  def restore(self, notes: Mapping[str, Any], position: Position) -> None:
    """Takes up what `as_dict` gave in the run that goes on at `position`."""
    if "meter" in notes:
      self.meter.restore(notes["meter"])
      if self.steering is not None and notes["steering"] is not None:
        self.steering.restore(notes["steering"], position)

  def write_decisions(self) -> None:
    """Writes the batches so far for another run to follow, also where there is one alone."""
    if self.steering is None:
      return
    with sync_errors():
      if jax.process_index() == 0:
        self.steering.write(self.folder)

  def planned(self, plan: BatchPlan) -> BatchPlan:
    """Returns the plan of a run with what was decided in it so far.

    Raises:
      UserError: the run cannot go on from there with its present sizes.
    """
    if self.steering is None or self.steering.is_dry:
      return plan
    changes = [(change.samples, change.batch) for change in self.steering.changes]
    check_can_continue(plan, first=changes[0][1], now=changes[-1][1])
    return plan.with_schedule(changes)


def decides(noise: Noise | None, position: Position) -> bool:
  """Returns whether something is decided before the step at `position`."""
  return noise is not None and noise.steering is not None and noise.steering.is_due(position)


def decided(
  noise: Noise | None, plan: BatchPlan, position: Position, say: Callable[[str], None]
) -> BatchPlan:
  """Returns the plan from `position` on: the same object unless the batch changes."""
  if noise is None or noise.steering is None or not decides(noise, position):
    return plan
  steering = noise.steering
  before = steering.changes[-1].batch
  decision = steering.decide(position, noise.meter.total())
  if not decision.grew:
    return plan
  noise.write_decisions()
  verb = "would go" if steering.is_dry else "goes"
  say(
    f"step {position.step}: the batch {verb} from {before:,} to {decision.batch:,}: {decision.reason}"
  )
  return plan if steering.is_dry else plan.with_batch_from(position, decision.batch)


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
    for name, of_parts, of_step in _of_experts(noise):
      results[name] = moments(rows, share, of_parts / weight_squared, of_step / weight_squared)
  return results


_MOST_EXPERTS = 512
"""Experts, over all layers, up to which each is a group; of more, all of them are one."""


def _of_experts(noise: NoiseSums) -> Iterator[tuple[str, float, float]]:
  """Yields groups of a mixture with their squares, by microbatch and of the step."""
  if noise.of_experts is None:
    return
  router, experts_2LE = (np.asarray(each, np.float64) for each in noise.of_experts)
  yield "router", *router
  yield "experts", *experts_2LE.sum((1, 2))
  if experts_2LE[0].size <= _MOST_EXPERTS:
    for layer, expert in np.ndindex(experts_2LE[0].shape):
      yield f"expert/{layer}/{expert}", *experts_2LE[:, layer, expert]


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


_RAW = (TOTAL, *TYPES, FROM_MICROBATCHES)
"""Groups of which a record has the step's own moments too."""


class NoiseMeter:
  """Takes in each step's metrics, in order."""

  def __init__(self, config: NoiseConfig, model: Model, calibrating: Model | None):
    """Makes a meter that has seen nothing.

    Args:
      model: the model of ordinary steps.
      calibrating: the model of calibration steps, if there are any.
    """
    self._gns, self._every = config.gns, config.gns_calibrate_every
    self._models = {False: model, True: calibrating or model}
    self._calibrates = calibrating is not None
    self._tracker = NoiseTracker(config.gns_window_steps)
    self._tokens_per_sample = 0.0

  def is_calibration(self, step: int) -> bool:
    return self._calibrates and (step + 1) % self._every == 0

  def model_at(self, step: int) -> Model:
    return self._models[self.is_calibration(step)]

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    if metrics.noise is None or metrics.weight == 0:
      return {}
    every_layer = self._gns == "all" or self.is_calibration(step)
    measured = moments_by_group(self.model_at(step).probed(), metrics, every_layer=every_layer)
    self._tracker.add(measured)
    self._tokens_per_sample = float(metrics.weight) / max(float(metrics.noise.rows), 1.0)
    record: Record = {}
    for name in _RAW:
      result = measured.get(name)
      if result is not None:
        record |= {f"gns/{name}/signal": result.signal, f"gns/{name}/noise": result.noise}
    return record | self._figures()

  def total(self) -> Estimate:
    """Returns the whole model's noise scale, measured or predicted; else by microbatches."""
    if self._gns == "off":
      return self._tracker.estimate(FROM_MICROBATCHES)
    return self._tracker.predicted_total() if self._gns == "norm" else self._tracker.estimate(TOTAL)

  def line(self, batch: int) -> str:
    return advice(self.total(), batch, self._tokens_per_sample or 1.0, self._left_out())

  def as_dict(self) -> dict[str, Any]:
    return {"tracker": self._tracker.as_dict(), "tokens_per_sample": self._tokens_per_sample}

  def restore(self, content: Mapping[str, Any]) -> None:
    tracker = NoiseTracker.from_dict(content["tracker"])
    if tracker.window_steps == self._tracker.window_steps:
      self._tracker, self._tokens_per_sample = tracker, content["tokens_per_sample"]

  def _figures(self) -> Record:
    """Returns the known scales by group, in samples; of the whole with what is known about it."""
    estimates = self._tracker.estimates()
    known = {name: each.scale for name, each in estimates.items() if each.scale}
    record: Record = {f"gns/{name}": scale.value for name, scale in known.items()}
    record.pop(f"gns/{TOTAL}", None)
    total = self.total()
    if total.scale is not None:
      record["gns/total"] = total.scale.value
      record["gns/total_tokens"] = total.scale.value * self._tokens_per_sample
      record["gns/total_low"], record["gns/total_high"] = total.scale.low, total.scale.high
    if total.negative_share is not None:
      record["gns/negative_share"] = total.negative_share
    calibration = total.calibration
    if calibration is not None and calibration.slope is not None:
      record["gns/slope"] = calibration.slope.value
    return record

  def _left_out(self) -> list[str]:
    """Lists parameters that train and that no probe sees."""
    if self._gns != "all" and not self._calibrates:
      return []
    model = self._models[True]
    seen = {path for probe in model.probed() for path in probe.parameters}
    return [".".join(path) for path in sorted(set(model.axes()) - model.frozen - seen)]


def check_can_continue(plan: BatchPlan, first: int, now: int) -> None:
  """Refuses sizes with which a run with batch_schedule=gns cannot be resumed.

  Such a run began with `first` samples per step, and had come to `now` at the checkpoint.

  Raises:
    UserError: the run began with another batch, or the microbatch does not divide the present one.
  """
  batch, micro = plan.global_batch_to_train, plan.micro_batch_to_train
  if batch != first:
    raise UserError(
      f"global_batch_to_train={batch} must be the {first} samples per step with which this run "
      f"began, because batch_schedule=gns continues from there; for example batch_size={first}, or "
      "another run_name"
    )
  if now % micro:
    raise UserError(
      f"micro_batch_to_train={micro} must divide the {now} samples per step that "
      f"batch_schedule=gns has reached in this run; for example {_micro_batch_that_works(plan, now)}"
    )


def _micro_batch_that_works(plan: BatchPlan, batch: int) -> str:
  common = math.gcd(batch, plan.micro_batch_to_train)
  if common % plan.topology.num_batch_groups:
    return "another mesh, or another run_name"
  return f"per_device_batch_size={text(plan.per_device(common))} gradient_accumulation_steps=-1"
