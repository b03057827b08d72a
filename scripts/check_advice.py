"""Measures data and steps to a fixed loss at eight batch sizes, beside what the noise scale predicts.

    .venv/bin/python scripts/check_advice.py [out=advice_check] [seeds=3] [target=2.2] [branches=FOLDER]
      [key=value ...]

A small model is trained at batch sizes from 4 to 512, at a constant learning rate, until its
validation loss is `target`. Each batch has the best rate of its own on a grid of factors √2, found
by walking downhill with two seeds; then all seeds are run. To what they took, the curve
(S/Smin − 1)(E/Emin − 1) = 1 of McCandlish et al. (2018) is fitted, for the target and for higher
losses that the same runs pass on the way. Against it stands the noise scale, measured in a run of
the batch size 32.

With branches=FOLDER, what maxbatch critical_batch found there stands beside it.

The trainer is the ordinary one; the loop is its own, to stop at a loss. Finished runs are kept in
`out`, so an interrupted command continues where it was. More keys, such as adam_b2=0.99, go to every
run. Writes advice_check.md, .html and .json into `out`. It takes some 40 minutes on one core.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from runs_to_a_loss import (
  crossing,
  lowest_on_grid,
  mean_noise_scale,
  overhead_with,
  samples_with,
  steps_with,
)

from maxbatch.batch.from_config import plan_batches
from maxbatch.compile import cache
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.confidence import Interval, ratios_of_means
from maxbatch.core.noise_scale import TOTAL
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError
from maxbatch.experiments.tradeoff import Tradeoff, fit_tradeoff
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.models.registry import Parameters
from maxbatch.plots.chart import Band, Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.training import build
from maxbatch.training.noise_run import moments_by_group
from maxbatch.training.step import StepMetrics, Trainer

MODEL = """base_emb_dim=32 base_num_decoder_layers=2 base_num_query_heads=4 base_num_kv_heads=4
head_dim=8 base_mlp_dim=128 max_target_length=32 num_simulated_devices=1 steps=1000000
adam_weight_decay=0 enable_checkpointing=false block_cross_document_attention=false
remat_policy=none scan_layers=false eval_samples=512"""
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
MIDDLE = 32
"""Where the search for rates begins, and where the noise scale is measured."""
FIRST_RATE = 4
LARGEST_MICROBATCH = 64
EVALUATIONS = 1.05
"""Factor of samples from one evaluation to the next."""
EASIER = (0.4, 0.2, 0.0)
"""By how much higher the losses are that are judged besides the target."""
NOISE_WINDOW = 64
TUNING_SEEDS = 2
FIRST_LIMIT = 100_000
"""Samples after which the search for the first rate gives one up."""
HOPELESS = 1.25
"""A rate is given up when it takes so much longer than the best one."""
Run = dict[str, Any]
"""Of a run: samples and losses at its evaluations, the samples of a step, the seconds it took; where
the noise scale is measured, signal and noise of every step."""


def rate_of(place: int) -> float:
  """The learning rate at a place of the grid."""
  return 1e-3 * 2 ** (place / 2)


@dataclasses.dataclass(frozen=True)
class Lab:
  """What all runs are made with."""

  target: Target
  dataset: Dataset
  keys: tuple[str, ...]

  @classmethod
  def of(cls, keys: Sequence[str]) -> "Lab":
    """The lab of a study with these keys."""
    config = load_config(_arguments(MIDDLE, keys))
    target = find_devices(config)
    cache.enable(config.compile.jax_cache_dir)
    dataset = build_dataset(config.data, config.batch.max_target_length)
    return cls(target, dataset, tuple(keys))

  def bench(self, batch: int, *keys: str) -> "Bench":
    """Runs with this batch."""
    config = load_config(_arguments(batch, [*self.keys, *keys]))
    plan = plan_batches(config.batch, config.run, self.target.layout)
    trainer = build.build_trainer(config, plan, self.target.devices)
    return Bench(config, plan, trainer, self.dataset)


def _arguments(batch: int, keys: Sequence[str]) -> list[str]:
  sizes = (f"batch_size={batch}", f"micro_batch_size={min(batch, LARGEST_MICROBATCH)}")
  return ["config=base", *MODEL.split(), *sizes, *keys]


@dataclasses.dataclass(frozen=True)
class Bench:
  """Runs of one batch size. What is compiled for them is compiled once in a process."""

  config: Config
  plan: BatchPlan
  trainer: Trainer
  dataset: Dataset

  @functools.cached_property
  def validation(self) -> list[Any]:
    """The validation rows, on the device."""
    (rows,) = build.eval_rows(self.config, self.plan, self.trainer, self.dataset)
    with rows.open() as batches:
      return list(batches)

  def loss(self, params: Parameters) -> float:
    """On the validation rows, in nats per token."""
    assert self.dataset.validation is not None
    evaluate = build.compiled_eval(self.plan, self.trainer, self.dataset.validation)
    result = jax.device_get([evaluate(params, rows) for rows in self.validation])
    return float(sum(one.loss for one in result) / sum(one.weight for one in result))

  def train(self, rate: float, target: float, limit: float) -> Run:
    """Trains until the smoothed loss is `target`, or it has taken `limit` samples."""
    seed, micro_batch = self.config.data.data_shuffle_seed, self.plan.micro_batch_to_train
    step = build.compiled_step(
      self.config, self.plan, self.trainer, self.dataset.train, micro_batch
    )
    microbatches = self.trainer.microbatches(self.plan.phases[0].num_microbatches)
    began, state = time.perf_counter(), self.trainer.init(seed)
    batch, samples, due = self.plan.batch_at(0), 0, 0.0
    run: Run = {"samples_per_step": batch, "rate": rate, "samples": [], "losses": []}
    recent: list[float] = []
    open_at = build.train_rows(self.config, self.trainer, self.dataset)
    with open_at(self.plan, Position(0, 0)) as loader:
      while samples < limit and crossing(run["samples"], run["losses"], target) is None:
        state, metrics = step(state, next(loader), microbatches, np.float32(rate))
        samples += batch
        self._note(run, metrics)
        if samples < due:
          continue
        recent = [*recent[-4:], float(metrics.loss)]
        due = EVALUATIONS * samples
        if not math.isfinite(recent[-1]):
          break
        if statistics.fmean(recent) < target + max(EASIER) + 0.3:
          run["samples"].append(samples)
          run["losses"].append(self.loss(state.parameters))
    return run | {"limit": limit, "seconds": time.perf_counter() - began}

  def _note(self, run: Run, metrics: StepMetrics) -> None:
    """Adds what the step measured of the noise scale, if it did."""
    if metrics.noise is None:
      return
    probed = self.trainer.model.probed()
    result = moments_by_group(probed, jax.device_get(metrics), every_layer=True)[TOTAL]
    assert result is not None
    run.setdefault("signal", []).append(result.signal)
    run.setdefault("noise", []).append(result.noise)


@dataclasses.dataclass(frozen=True)
class Study:
  """Runs in files of `out`; what is missing is made."""

  lab: Lab
  out: pathlib.Path
  target: float
  seeds: int

  def run(self, batch: int, place: int, seed: int, limit: float, *keys: str) -> Run:
    """One run, to the target or the limit."""
    name = "-".join([f"b{batch}", f"lr{rate_of(place):.3g}", f"seed{seed}", *keys])
    file = self.out / "runs" / f"{name}.json"
    if file.exists():
      return json.loads(file.read_text())
    bench = self.lab.bench(batch, f"data_shuffle_seed={seed}", *keys)
    result = bench.train(rate_of(place), self.target, limit)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_run_file(file, json.dumps(result))
    took = samples_to(result, self.target)
    words = f"{took:,.0f} samples" if took else f"stopped at {limit:,.0f} samples"
    print(f"{name}: {words}, {result['seconds']:.0f} s", flush=True)
    return result

  def tuned(self) -> dict[int, int]:
    """The place of each batch's best rate."""
    places = {MIDDLE: self._best_place(MIDDLE, FIRST_RATE, FIRST_LIMIT)}
    middle = BATCHES.index(MIDDLE)
    # Twice the batch takes at most twice the samples, if its rate is right; half of it, no more.
    for batches, change, most in (
      (BATCHES[middle:], 1, 2.5),
      (BATCHES[middle::-1], -1, 1.5),
    ):
      for before, batch in itertools.pairwise(batches):
        limit = most * self._took(before, places[before])
        places[batch] = self._best_place(batch, places[before] + change, limit)
    return places

  def _took(self, batch: int, place: int) -> float:
    """Samples, by the seeds that tune; the runs are there."""
    runs = [self.run(batch, place, seed, 0) for seed in range(TUNING_SEEDS)]
    return statistics.geometric_mean(samples_to(run, self.target) or math.inf for run in runs)

  def _best_place(self, batch: int, start: int, limit: float) -> int:
    most = [limit]

    def score(place: int) -> tuple[float, float]:
      """Samples to the target; of a rate that is far from the best, the loss it came to."""
      results = []
      for seed in range(TUNING_SEEDS):
        run = self.run(batch, place, seed, most[0])
        took = samples_to(run, self.target)
        if took is None:
          return 1.0, min(run["losses"], default=math.inf)
        results.append(took)
      mean = statistics.geometric_mean(results)
      most[0] = min(most[0], HOPELESS * mean)
      return 0.0, mean

    return lowest_on_grid(score, start)

  def made(self) -> tuple[list[Run], list[Run]]:
    """All runs, and those that measure the noise scale."""
    places = self.tuned()
    for batch, place in places.items():
      limit = 2 * self._took(batch, place)
      for seed in range(TUNING_SEEDS, self.seeds):
        self.run(batch, place, seed, limit)
    limit = 2 * self._took(MIDDLE, places[MIDDLE])
    noise = [self.run(MIDDLE, places[MIDDLE], s, limit, "gns=all") for s in range(self.seeds)]
    files = sorted((self.out / "runs").glob("*.json"))
    runs = [json.loads(file.read_text()) for file in files if "gns" not in file.name]
    return runs, noise


def samples_to(run: Run, loss: float) -> float | None:
  """Samples that a run took to a loss."""
  return crossing(run["samples"], run["losses"], loss)


@dataclasses.dataclass(frozen=True)
class Noise:
  """The noise scale of a stretch of one run."""

  mean: Interval | None
  """Over the stretch, a step weighing what it gained: what Bcrit should be."""
  last: Interval | None
  """Over its last steps: what a run prints there."""

  @classmethod
  def between(cls, run: Run, high: float | None, low: float) -> "Noise":
    """Of a run that measured it, from one loss, or None for its beginning, to another."""
    size = run["samples_per_step"]
    ends = (0.0 if loss is None else samples_to(run, loss) or 0.0 for loss in (high, low))
    first, end = (round(samples / size) for samples in ends)
    signal, noise = (run[kind][first:end] for kind in ("signal", "noise"))
    last = [np.array(each[-NOISE_WINDOW:])[None] for each in (noise, signal)]
    return cls(mean_noise_scale(signal, noise, size), ratios_of_means(*last).interval(0))


@dataclasses.dataclass(frozen=True)
class Level:
  """What a loss took."""

  loss: float
  rates: dict[int, float]
  """The best of each batch."""
  samples: dict[int, list[float]]
  """Of each batch, by seed."""
  curve: Tradeoff
  noise: list[Noise]
  """By seed."""

  @classmethod
  def of(cls, loss: float, runs: Sequence[Run], noise: Sequence[Run]) -> "Level":
    """Each batch at the rate that took the fewest samples to this loss."""
    rates: dict[int, float] = {}
    samples: dict[int, list[float]] = {}
    for batch in BATCHES:
      by_rate: dict[float, list[float | None]] = {}
      for run in runs:
        if run["samples_per_step"] == batch:
          by_rate.setdefault(run["rate"], []).append(samples_to(run, loss))
      took = {
        rate: [one for one in each if one is not None]
        for rate, each in by_rate.items()
        if len(each) >= TUNING_SEEDS and None not in each
      }
      rates[batch] = min(took, key=lambda rate: statistics.geometric_mean(took[rate]))
      samples[batch] = took[rates[batch]]
    pairs = [(one, one / batch) for batch, each in samples.items() for one in each]
    curve = fit_tradeoff(*zip(*pairs, strict=True))
    return cls(loss, rates, samples, curve, [Noise.between(run, None, loss) for run in noise])

  def mean_samples(self, batch: int) -> float:
    """Over the seeds."""
    return statistics.geometric_mean(self.samples[batch])

  @property
  def predicted(self) -> Interval:
    """Bcrit by the first run's noise scale; 0 where that is not known."""
    return self.noise[0].mean or Interval(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Stretch:
  """What it took from one loss to a lower one."""

  high: float
  low: float
  curve: Tradeoff
  noise: list[Noise]
  """By seed."""

  @classmethod
  def of(
    cls, high: Level, low: Level, last: Level, runs: Sequence[Run], noise: Sequence[Run]
  ) -> "Stretch":
    """Of the runs with the rates of the `last` level."""
    pairs = []
    for run in runs:
      begin, end = (samples_to(run, level.loss) for level in (high, low))
      if run["rate"] == last.rates[run["samples_per_step"]] and begin and end:
        pairs.append((end - begin, (end - begin) / run["samples_per_step"]))
    results = [Noise.between(run, high.loss, low.loss) for run in noise]
    return cls(high.loss, low.loss, fit_tradeoff(*zip(*pairs, strict=True)), results)


def of_stretches(stretches: Sequence[Stretch]) -> list[str]:
  """The table of what lies between two losses."""
  lines = [
    "| from loss to loss | Bcrit there | off the curve | noise scale, mean there | other seeds "
    "| Bcrit over it |",
    "|---" * 6 + "|",
  ]
  for each in stretches:
    first = each.noise[0]
    others = ", ".join(one(more.mean) for more in each.noise[1:])
    lines.append(
      f"| {each.high:.2f} to {each.low:.2f} | {counts(each.curve.critical_batch)} "
      f"| {each.curve.misfit:.0%} | {counts(first.mean)} | {others} "
      f"| {factor(each.curve, first.mean)} |"
    )
  return lines


def of_batches(level: Level) -> list[str]:
  """The table of one loss, by batch."""
  curve = level.curve
  lines = [
    "| batch | learning rate | steps | samples, by seed | the curve's steps | the curve's samples "
    "| data overhead, measured | the curve's (95%) | by the noise scale (95%) |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for batch, result in level.samples.items():
    mean = level.mean_samples(batch)
    seeds = ", ".join(f"{one:,.0f}" for one in result)
    lines.append(
      f"| {batch} | {level.rates[batch]:.2g} | {mean / batch:,.0f} | {seeds} "
      f"| {steps_with(curve, batch):,.0f} | {samples_with(curve, batch):,.0f} "
      f"| {mean / curve.min_samples.value - 1:+.0%} | {percents(overhead_with(curve, batch))} "
      f"| {percents(overhead(batch, level.predicted))} |"
    )
  return lines


def overhead(batch: int, critical: Interval) -> Interval:
  """B / Bcrit."""
  low, high = batch / critical.high if critical.high else math.inf, math.inf
  high = batch / critical.low if critical.low > 0 else math.inf
  return Interval(batch / critical.value if critical.value else math.inf, low, high)


def of_losses(levels: Sequence[Level]) -> list[str]:
  """The table of losses."""
  lines = [
    "| loss | Smin, steps | Emin, samples | Bcrit = Emin / Smin | off the curve "
    "| noise scale, mean of a run | other seeds | Bcrit over it "
    f"| noise scale, its last {NOISE_WINDOW} steps | other seeds | Bcrit over it |",
    "|---" * 11 + "|",
  ]
  for level in levels:
    curve, first = level.curve, level.noise[0]
    means, lasts = (
      ", ".join(one(each) for each in others)
      for others in zip(*((each.mean, each.last) for each in level.noise[1:]), strict=True)
    )
    lines.append(
      f"| {level.loss:.2f} | {counts(curve.min_steps)} | {counts(curve.min_samples)} "
      f"| {counts(curve.critical_batch)} | {curve.misfit:.0%} | {counts(first.mean)} | {means} "
      f"| {factor(curve, first.mean)} | {counts(first.last)} | {lasts} | {factor(curve, first.last)} |"
    )
  return lines


def of_branches(folder: pathlib.Path) -> list[str]:
  """What the branches of one checkpoint say."""
  report = json.loads((folder / "critical_batch.json").read_text())
  samples, curve = report["checkpoint"]["samples"], report["tradeoff"]
  if curve is None:
    return [f"The branches from {samples:,} samples do not tell Bcrit."]
  result = Interval(**curve["critical_batch"])
  least, below = report["critical_batch_at_least"], report["critical_batch_below"]
  return [
    f"Branches from {samples:,} samples: Bcrit {counts(result)}, {curve['misfit']:.0%} off the curve; "
    f"within {report['tolerance']:g} nats of every smaller one: {least}, and no more {below}."
  ]


def factor(curve: Tradeoff, predicted: Interval | None) -> str:
  """By how much Bcrit is larger than a noise scale, with both intervals' ends."""
  if predicted is None or not predicted.low > 0:
    return "–"
  result = curve.critical_batch
  ends = result.low / predicted.high, result.high / predicted.low
  return f"{result.value / predicted.value:.2f} ({ends[0]:.2f}–{ends[1]:.2f})"


def one(result: Interval | None) -> str:
  """The value alone."""
  return "–" if result is None else f"{result.value:,.1f}"


def counts(result: Interval | None) -> str:
  """A value with its interval, in samples or steps."""
  if result is None:
    return "–"
  digits = 0 if result.value >= 100 else 1
  return f"{result.value:,.{digits}f} ({result.low:,.{digits}f}–{result.high:,.{digits}f})"


def percents(result: Interval) -> str:
  """A share with its interval."""
  return f"{result.value:.0%} ({result.low:.0%}–{result.high:.0%})"


def drawing(levels: Sequence[Level], noise: Run) -> list[Chart]:
  """Steps against samples; data overhead over the batch; the noise scale over the run."""
  sizes = np.geomspace(BATCHES[0], BATCHES[-1], 100)
  marks: list[Line] = []
  for number, level in enumerate(levels):
    points = [(took, took / batch) for batch, each in level.samples.items() for took in each]
    curve = [(samples_with(level.curve, size), steps_with(level.curve, size)) for size in sizes]
    group = f"loss {level.loss:.2f}"
    marks.append(_line(group, curve, color=number, dash=number, group=group))
    marks.append(_line("", points, color=number, style="dots", group=group))
  panel = Panel("steps S", marks, log=True)
  return [
    Chart("steps against samples", ["samples E"], [panel], log_x=True),
    _overheads(levels[-1], sizes),
    _scales(levels, noise),
  ]


def _line(label: str, points: Sequence[tuple[float, float]], **look: Any) -> Line:
  x, y = zip(*points, strict=True)
  return Line(label, [x], y, **look)


def _overheads(level: Level, sizes: np.ndarray) -> Chart:
  """Measured, as the curve has it, and as the noise scale says."""
  least = level.curve.min_samples.value
  points = [(b, took / least) for b, each in level.samples.items() for took in each]
  marks: list[Line | Band] = [_line("measured", points, style="dots")]
  x = [sizes.tolist()]
  for number, (name, critical) in enumerate(
    (("the curve", level.curve.critical_batch), ("by the noise scale", level.predicted))
  ):
    results = [overhead(size, critical) for size in sizes]
    look = {"color": number, "group": name}
    marks.append(Line(name, x, [1 + one.value for one in results], dash=number, **look))
    ends = [1 + one.low for one in results], [1 + one.high for one in results]
    marks.append(Band("", x, *ends, **look))
  panel = Panel(f"samples to loss {level.loss:.2f}, over Emin", marks, log=True)
  return Chart("overhead", ["batch (samples per step)"], [panel], log_x=True, ticks=BATCHES)


def _scales(levels: Sequence[Level], run: Run) -> Chart:
  """The noise scale along the run, and Bcrit where each loss was reached."""
  whole = len(run["signal"]) // NOISE_WINDOW * NOISE_WINDOW
  windows = [np.array(run[kind][:whole]).reshape(-1, NOISE_WINDOW) for kind in ("noise", "signal")]
  result = ratios_of_means(*windows)
  x = [((np.arange(len(result.ratio)) + 0.5) * NOISE_WINDOW * run["samples_per_step"]).tolist()]
  name, black = f"noise scale, {NOISE_WINDOW} steps each", len(levels)
  marks: list[Line | Band] = [
    Line(name, x, result.ratio.tolist(), color=black, group=name),
    Band("", x, result.low.tolist(), result.high.tolist(), color=black, group=name),
  ]
  for number, level in enumerate(levels):
    place = samples_to(run, level.loss) or math.nan
    label = f"Bcrit to loss {level.loss:.2f}"
    marks += _spot(label, place, level.curve.critical_batch, color=number)
    if mean := level.noise[0].mean:
      marks += _spot(
        f"mean noise scale until {level.loss:.2f}", place, mean, color=number, faint=True
      )
  panel = Panel("samples per step", marks, log=True)
  return Chart("noise scale", [f"samples, at batch {MIDDLE}"], [panel])


def _spot(label: str, place: float, result: Interval, **look: Any) -> list[Line]:
  """A value with its interval."""
  return [
    Line(label, [[place]], [result.value], style="dots", group=label, **look),
    Line("", [[place] * 2], [result.low, result.high], group=label, **look),
  ]


def main(arguments: Sequence[str]) -> int:
  """Reads the arguments, runs, prints and writes."""
  given = dict(argument.split("=", 1) for argument in arguments)
  out, branches = pathlib.Path(given.pop("out", "advice_check")), given.pop("branches", "")
  seeds, target = int(given.pop("seeds", "3")), float(given.pop("target", "2.2"))
  try:
    lab = Lab.of([f"{key}={value}" for key, value in given.items()])
    runs, noise = Study(lab, out, target, seeds).made()
  except UserError as error:
    print(error, file=sys.stderr)
    return 2
  levels = [Level.of(target + more, runs, noise) for more in EASIER]
  stretches = [
    Stretch.of(high, low, levels[-1], runs, noise) for high, low in itertools.pairwise(levels)
  ]
  tables = [of_losses(levels), of_stretches(stretches), of_batches(levels[-1])]
  tables += [of_branches(pathlib.Path(branches))] if branches else []
  text = "\n\n".join("\n".join(table) for table in tables)
  (out / "advice_check.md").write_text(text + "\n")
  title = "Data and steps to a fixed loss"
  (out / "advice_check.html").write_bytes(picture(title, drawing(levels, noise[0])))
  result = json.dumps([dataclasses.asdict(each) for each in (*levels, *stretches)], indent=2)
  (out / "advice_check.json").write_text(result + "\n")
  print(f"\n{text}\n\nWritten: {out}/advice_check.md, .html, .json")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
