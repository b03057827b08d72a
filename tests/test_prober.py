"""Real steps on 8 simulated devices: auto's fit holds, the next size up exceeds the budget."""

import dataclasses
import functools
from fractions import Fraction

import jax
import pytest
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import compile_step, measured_time
from maxbatch.compile.measured_time import Timing
from maxbatch.compile.program import compile_eval_program, compile_program, state_bytes
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.data.registry import build_dataset
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.modes.method import Purpose
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.training.build import build_trainer
from maxbatch.tuning.candidates import Candidate, candidates
from maxbatch.tuning.eval_candidates import eval_sizes_of
from maxbatch.tuning.microbatch_size import choose, choose_to_evaluate, explore_sizes
from maxbatch.tuning.search import EvalProber, Prober, ProbeResult

GIB = 1 << 30
KEYS = {"dataset_type": "synthetic", "batch_size": 32, "steps": 3, "base_num_decoder_layers": 1}


def settings(value: object = "auto", **keys: object) -> Config:
  return config(micro_batch_size=value, **KEYS | keys)


PLACE = Target(jax.devices(), topology(settings().mesh, 8))
SOURCE = build_dataset(settings().data, settings().batch.max_target_length).train


def sizes(of: Config) -> tuple[Candidate, ...]:
  return candidates(of.batch, of.run, PLACE.layout)


@pytest.fixture(autouse=True)
def _quick_clock(monkeypatch):
  monkeypatch.setattr(measured_time, "SECONDS", 0.05)


def test_evaluation_takes_the_largest_batch_that_fits_beside_the_state(tmp_path, monkeypatch):
  monkeypatch.setattr(compile_step, "measure_evaluation", lambda *_: Timing(1.0, 0.0, 0.0, 3))
  of = settings(2, eval_per_device_batch_size="auto", eval_samples=64)
  sizes = {int(one.size): one for one in eval_sizes_of(of, PLACE.layout)}
  assert list(sizes) == [1, 2, 4, 8]
  prober = EvalProber(of, PLACE.devices, PLACE.layout)
  two, four = (prober(sizes[size]).peak_bytes for size in (2, 4))
  assert two < four
  within = dataclasses.replace(of.compile, device_memory_gb=(two + four) / 2 / GIB)
  of = dataclasses.replace(of, compile=within)
  lines: list[str] = []
  limited = EvalProber(of, PLACE.devices, PLACE.layout)
  chosen = choose_to_evaluate(of, PLACE, limited, tmp_path, say=lines.append)
  assert chosen.batch == dataclasses.replace(of.batch, eval_per_device_batch_size=Fraction(2))
  assert lines[0].startswith(
    "eval_per_device_batch_size auto: 2 samples per device (largest that fits"
  )
  # The optimizer's state and the accumulators lie there too, though no evaluation reads them.
  plan = plan_batches(chosen.batch, chosen.run, PLACE.layout)
  state = state_bytes(build_trainer(chosen, plan, PLACE.devices).abstract)
  alone = prober.reports[sizes[2]].program.step.memory_analysis()
  assert alone is not None
  beside = two - alone.argument_size_in_bytes - alone.temp_size_in_bytes
  assert beside == pytest.approx(state.total - state.parameters, abs=1024)


def test_an_evaluation_is_timed(monkeypatch):
  ticks = iter(range(1000))
  of = settings(2, eval_samples=64)
  plan = plan_batches(of.batch, of.run, PLACE.layout)
  trainer = build_trainer(of, plan, PLACE.devices)
  program = compile_eval_program(of, plan, trainer, SOURCE)
  timing = measured_time.measure_evaluation(
    trainer, program.step, program.rows, clock=lambda: float(next(ticks))
  )
  assert (timing.seconds_per_microbatch, timing.seconds_rest, timing.repeats) == (1.0, 0.0, 3)


class Counted:
  """A probe that keeps what it saw."""

  def __init__(self, of: Config):
    self.probe = Prober(of, PLACE.devices, PLACE.layout)
    self.probes: list[ProbeResult] = []
    self.sizes: list[Fraction] = []

  def __call__(self, candidate: Candidate) -> ProbeResult:
    self.probes.append(self.probe(candidate))
    self.sizes.append(candidate.per_device)
    return self.probes[-1]


@pytest.fixture
def _no_clock(monkeypatch):
  """A pass takes a second, however large: the largest is the fastest."""
  monkeypatch.setattr(compile_step, "measure_step", lambda *_, **__: Timing(1.0, 0.0, 0.0, 3))


@functools.cache
def peak_by_hand(size: int, **keys: object) -> int:
  """The peak of the step that a run with this number compiles."""
  of = settings(size, **keys)
  plan = plan_batches(of.batch, of.run, PLACE.layout)
  trainer = build_trainer(of, plan, PLACE.devices)
  return compile_program(of, plan, trainer, SOURCE, plan.micro_batch_to_train).memory.peak


@pytest.mark.usefixtures("_no_clock")
def test_auto_takes_the_largest_that_fits_the_budget_and_the_next_exceeds_it(tmp_path):
  two, four = peak_by_hand(2), peak_by_hand(4)
  assert two < four
  of = settings(device_memory_gb=(two + four) / 2 / GIB)
  probe, lines = Counted(of), []
  chosen = choose(of, PLACE, probe, tmp_path, say=lines.append)
  # The same configuration as by hand, and so the same run: nothing else is handed on.
  assert chosen == settings(2, device_memory_gb=of.compile.device_memory_gb)
  peaks = {size: one.peak_bytes for size, one in zip(probe.sizes, probe.probes, strict=True)}
  assert (peaks[Fraction(2)], peaks[Fraction(4)]) == (two, four)
  assert "micro_batch_size auto: 2 samples per device (largest that fits of 1…4" in lines[0]
  # The second start compiles nothing.
  again = Counted(of)
  assert choose(of, PLACE, again, tmp_path, say=lines.append) == chosen
  assert again.probes == []


@pytest.mark.usefixtures("_no_clock")
def test_the_budget_is_exact():
  two = peak_by_hand(2)
  for budget, fits in ((two, True), (two - 1, False)):
    of = settings(device_memory_gb=budget / GIB)
    (candidate,) = [one for one in sizes(of) if one.per_device == 2]
    assert Prober(of, PLACE.devices, PLACE.layout)(candidate).fits is fits


@pytest.mark.parametrize("accumulation", ["fused", "streamed"])
def test_what_fits_is_timed_and_what_does_not_is_not(accumulation):
  budget = (peak_by_hand(4, accumulation=accumulation) - 1) / GIB
  of = settings(
    "{explore: {min: 2, max: 4}}",
    accumulation=accumulation,
    compile_only=True,
    device_memory_gb=budget,
  )
  probe = Counted(of)
  chosen, result = explore_sizes(of, PLACE, probe, say=lambda line: None)
  assert {one.fits for one in probe.probes} == {True, False}
  for one in probe.probes:
    assert (one.seconds_per_microbatch is not None) == one.fits
    assert one.how == "measured" or not one.fits
  assert result.best is not None
  assert chosen.batch.micro_batch_size == result.best.candidate.per_device
  assert result.best.samples_per_second > 0


def test_long_rows_are_tried_shared_by_devices_too(monkeypatch):
  """Rows of 16 tokens are long here; two devices have a row each, half of one, or of two."""
  monkeypatch.setattr("maxbatch.core.topology.LONG_ROW_TOKENS", 16)
  of = settings(
    "{explore: {min: 1, max: 1}}", batch_size=2, max_target_length=16, compile_only=True
  )
  place, lines = Target(jax.devices()[:2], topology(of.mesh, 2)), []
  probe = Prober(of, place.devices, place.layout)
  chosen, result = explore_sizes(of, place, probe, say=lines.append)
  found = {(one.candidate.context, one.size): one.probe for one in result.ranked}
  assert set(found) == {(1, "1"), (2, "0.5"), (2, "1")}
  assert {one.how for one in found.values()} == {"measured"}
  shapes = {key.context: report.plan.topology.shape for key, report in probe.reports.items()}
  assert [(shapes[n]["data"], shapes[n].get("context", 1)) for n in (1, 2)] == [(2, 1), (1, 2)]
  best = result.ranked[0].candidate
  assert (chosen.mesh.ici_context_parallelism, chosen.batch.micro_batch_size) == (
    best.context,
    best.per_device,
  )
  assert f"ici_context_parallelism: {best.context}" in lines[-2]
  # A run in which a whole row does not fit a device has two devices share it.
  half, row = (found[key].peak_bytes for key in ((2, "0.5"), (1, "1")))
  assert half < row
  within = {"device_memory_gb": (half + row) / 2 / GIB, "enable_checkpointing": False}
  of = settings("auto", batch_size=2, max_target_length=16, **within)
  resolved = PRETRAINING.resolve(of, place, Purpose.RUN)
  assert resolved.config.mesh.ici_context_parallelism == 2
  assert resolved.target.layout == resolved.plan.topology == Topology.of(context=2)


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.", "X"])
def test_who_runs_out_of_memory_while_timed_does_not_fit(monkeypatch, message):
  def exhausted(*_, **__):
    raise jax.errors.JaxRuntimeError(message)

  monkeypatch.setattr(compile_step, "measure_step", exhausted)
  of = settings()
  (candidate, *_), probe = sizes(of), Prober(of, PLACE.devices, PLACE.layout)
  if message == "X":
    with pytest.raises(jax.errors.JaxRuntimeError):
      probe(candidate)
    return
  result = probe(candidate)
  assert (result.fits, result.peak_bytes) == (False, result.capacity_bytes + 1)
  assert candidate not in probe.reports
  plan = plan_batches(settings(1).batch, settings(1).run, PLACE.layout)
  trainer = build_trainer(settings(1), plan, PLACE.devices)
  with pytest.raises(UserError, match="per_device_batch_size=1: the step needs more memory a dev"):
    compile_step.compile_reports(settings(1), plan, trainer, PLACE.devices)


def test_nothing_is_left_on_the_devices():
  of = settings()
  before = {id(array) for array in jax.live_arrays()}
  Counted(of)(sizes(of)[0])
  # The trainer's dropout key goes with the trainer.
  assert [x for x in jax.live_arrays() if id(x) not in before and x.nbytes > 8] == []
