"""What to change in a run now, from its own metrics, and what that saves: five or six findings.

Each says its figure and where that is from, the keys to set, and what they save as far as the run's
records tell. What they do not tell is said to be unknown.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxbatch.advice.words import DAY, percent, span, wrapped
from maxbatch.batch_rules.findings import WSD, Setting
from maxbatch.core.confidence import Interval
from maxbatch.errors import UserError
from maxbatch.estimate.failures import Recovery, best_interval, goodput
from maxbatch.noise.advice import WELL_BELOW, cost_of_change, place, shown
from maxbatch.run_folder.events import EVALUATED, SAVED, START, TEXT
from maxbatch.run_folder.history import RunHistory

FEWEST_STEPS = 20
_RECENT = 100
"""Steps that figures of now are from."""
_SMALL = 0.02
"""Share of the time not worth a change; chosen, not measured, as are the next three."""
_LONG = 1.5
"""Times the median, from which a step counts as held up."""
_NOISIER = 4
"""Times the whole model's noise scale, from which a type of layer could have a batch of its own."""
_FEWEST_RESTARTS = 3
"""From which on the time between them is taken to be known."""
_FEWEST_PAUSES = 4
"""Evaluations and checkpoints that are left of a run, whatever they take."""
_PATTERNS = {"embedding": "embedding", "head": "head", "attention": "layers/attention/*"}
_PATTERNS |= {"mlp": "layers/mlp/*"}
"""Parameters of each type of layer whose noise scale is measured."""
_MOST_STEPS = 8
"""The largest group that is proposed; speed runs have 2 (modded-nanogpt)."""
_BUDGETS = {"steps": "steps", "samples": "total_samples", "tokens": "total_tokens"}
"""Derived keys of a run's length by schedule_unit."""
_OTHER_SIZES = (
  "tokens_per_step",
  "global_batch_to_train",
  "gradient_accumulation_steps",
  "per_device_batch_size",
)
"""Keys that would say the size of a batch, or of its microbatch, a second time."""
_CHANGING = ("batch_schedule", "enable_rampup_batch_size", "batch_schedule_type")


@dataclasses.dataclass(frozen=True)
class Finding:
  """One thing about a run."""

  about: str
  says: str
  """The figure, and which records it is from."""
  change: str = ""
  """Keys to set; empty: nothing to change."""
  saves: str = ""
  time_share: float = 0.0
  """The share of the run's time that the change saves."""

  @property
  def sentence(self) -> str:
    """All of it."""
    change = f" Set {self.change}: {self.saves}." if self.change else ""
    return f"{self.about}: {self.says}.{change}"


def run_advice(run: RunHistory) -> list[Finding]:
  """Returns findings about a run: batch, data, pauses, restarts if there were any, steps, what is left.

  Raises:
    UserError: it has too few steps to say anything.
  """
  num_steps = len(_recent(run, "step_seconds"))
  if num_steps < FEWEST_STEPS:
    raise UserError(
      f"{run.folder}: metrics.jsonl times {num_steps} steps, and advice about a run needs at least "
      f"{FEWEST_STEPS}; train on, for example to 100 steps"
    )
  findings = [_batch(run), _data(run), _pauses(run), *_restarts(run), _steps(run)]
  return [*findings, _left(run, sum(one.time_share for one in findings))]


def lines(findings: list[Finding]) -> Iterator[str]:
  """Yields them as they are printed."""
  for one in findings:
    yield from wrapped(one.sentence, "")


def _recent(run: RunHistory, key: str) -> np.ndarray:
  """Returns the latest values of a key, float64; without the first, which also warms up."""
  curve = run.metrics.curves.get(key)
  return np.zeros(0) if curve is None else curve.values[1:][-_RECENT:]


def _batch(run: RunHistory) -> Finding:
  last = run.metrics.last
  batch, about = int(last.get("global_batch_to_train", 0)), "Batch"
  ends = [last.get(f"gns/total{end}") for end in ("", "_low", "_high")]
  if run.config.get("num_generations", -1) != -1:
    says = (
      f"{batch:,} completions a step; prompts and completions of each are weighed by completions="
    )
    return Finding(about, says)
  if batch < 1 or None in ends:
    return _unmeasured(run, batch)
  scale = Interval(*(float(end or 0) for end in ends))
  value, low, high = shown(scale)
  says = (
    f"{batch:,} samples a step, noise scale {value} (95% {low}–{high}, the latest gns/total), so it is "
    f"{place(scale, batch)}{_groups(run, scale.low)}"
  )
  changing = _scheduled(run.config)
  factor = 1.0 if scale.low <= 0 else _factor(batch, scale)
  if changing or factor == 1:
    return Finding(about, says + (f"; {changing[0]} decides on it" if changing else ""))
  cost = cost_of_change(batch, factor, scale.value)
  change = _sized(run, round(batch * factor)) + _rate(run.config, factor)
  theory = f"a heuristic, McCandlish 2018{_crossing(run.config)}"
  if factor > 1:
    saves = (
      f"saves {percent(1 - cost.steps)} of the steps for {percent(cost.data - 1)} more data, time where the "
      f"devices are more or not busy ({theory})"
    )
    return Finding(about, says, change, saves)
  saves = f"saves {percent(1 - cost.data)} of the data for {percent(cost.steps - 1)} more steps ({theory})"
  return Finding(about, says, change, saves, 1 - cost.data)


def _unmeasured(run: RunHistory, batch: int) -> Finding:
  """Says that the noise scale is not known, and the keys that measure it in such a run."""
  says = f"{batch:,} samples a step; whether another number is better is not known, for the "
  config, then = run.config, "the next advice then says"
  if config.get("gns", "off") != "off" or config.get("gns_from_microbatches"):
    every = config.get("gns_calibrate_every")
    says += "gradient cannot be distinguished from its noise yet"
    if config.get("gns") != "norm" or type(every) is not int or every == 1:
      return Finding("Batch", f"{says}; more steps may suffice")
    says += f" (gns_calibrate_every={every})"
    return Finding("Batch", says, f"gns_calibrate_every={every // 2 or 10}", then)
  says += "run does not measure its noise scale"
  of_rows = config.get("num_experts", 1) == 1
  if of_rows and batch > 1:
    return Finding("Batch", says, "gns=norm", then)
  if not of_rows and run.metrics.last.get("gradient_accumulation_steps", 1) > 1:
    return Finding("Batch", says, "gns_from_microbatches=true", then)
  return Finding("Batch", says)


def _crossing(config: Mapping[str, Any]) -> str:
  """Returns what speaks against the trade-off of data against steps under a run's schedule, if anything."""
  schedule = str(config.get("lr_schedule_type"))
  if WSD.misfit(Setting(str(config.get("opt_type")), schedule, has_experts=False)):
    return ""
  return f", which does not hold with lr_schedule_type={schedule}: {WSD.title}"


def _sized(run: RunHistory, batch: int, *, auto: bool = False) -> str:
  """Returns the keys of a batch, beside those of the run; with its microbatch, where that divides it."""
  config, micro_batch = run.config, int(run.metrics.last.get("micro_batch_to_train", 1))
  keys = {"batch_size": str(batch)} if batch else {}
  if batch % max(micro_batch, 1) or auto:
    keys |= {"micro_batch_size": "auto", "gradient_accumulation_steps": "-1"}
  unset = [key for key in _OTHER_SIZES if config.get(key) not in (None, -1, "-1")]
  if keys.get("micro_batch_size") != "auto":
    unset = [key for key in unset if key != "per_device_batch_size"]
  keys |= dict.fromkeys(unset, "-1")
  return " ".join(f"{key}={value}" for key, value in keys.items())


def _groups(run: RunHistory, low: float) -> str:
  """Proposes a batch of their own for types of layers that are far noisier than the whole."""
  scales = {name: run.metrics.last.get(f"gns/{name}", 0.0) for name in _PATTERNS}
  steps = {
    _PATTERNS[name]: min(2 ** math.floor(math.log2(scale / low) - 1), _MOST_STEPS)
    for name, scale in scales.items()
    if low > 0 and scale >= _NOISIER * low
  }
  if not steps or run.config.get("batch_by_group"):
    return ""
  pairs = ",".join(f"[{pattern},{number}]" for pattern, number in steps.items())
  return (
    f"; some layers have {_NOISIER} times that noise and more: another run could try "
    f"batch_by_group=[{pairs}]"
  )


def _scheduled(config: Mapping[str, Any]) -> list[str]:
  """Returns the keys by which the batch changes during a run."""
  return [key for key in _CHANGING if config.get(key) not in (None, [], False, "constant")]


def _factor(batch: int, scale: Interval) -> float:
  """Returns the power of 2 by which to change the batch, if all of the interval agrees; else 1."""
  if batch > scale.high and batch % 2 == 0:
    return 0.5
  if batch >= WELL_BELOW * scale.low:
    return 1.0
  return 2.0 ** max(1, math.floor(math.log2(WELL_BELOW * scale.low / batch)))


def _rate(config: Mapping[str, Any], factor: float) -> str:
  """Returns the learning rate that goes with the batch, as a key: by its root, for SGD by itself."""
  rate = config.get("learning_rate")
  if not isinstance(rate, int | float) or rate <= 0:
    return ""
  return f" learning_rate={rate * factor ** (1 if config.get('opt_type') == 'sgd' else 0.5):.3g}"


def _data(run: RunHistory) -> Finding:
  seconds, waited = _recent(run, "step_seconds"), _recent(run, "data_wait_seconds")
  share = float(waited.sum() / seconds.sum()) if seconds.sum() else 0.0
  says = f"{percent(share)} of the last {len(seconds)} steps' time is waiting for rows (data_wait_seconds)"
  if share < _SMALL:
    return Finding("Data", says)
  workers = run.config.get("grain_worker_count", 0)
  more = 2 * workers if isinstance(workers, int) and workers else 2
  saves = (
    f"saves up to {percent(share)} of the time; maxbatch input_analyzer config={run.folder}/config.yml "
    f"run_metrics={run.folder} says how many suffice"
  )
  return Finding("Data", says, f"grain_worker_count={more}", saves, share)


def _pauses(run: RunHistory) -> Finding:
  """Says what evaluating and saving take, and how much rarer they could be."""
  curve = run.metrics.curves["step_seconds"].values
  spent = {
    key: sum(_number(event.get("seconds")) for kind in kinds for event in run.of_kind(kind))
    for key, kinds in {"eval_interval": (EVALUATED, TEXT), "checkpoint_period": (SAVED,)}.items()
  }
  total = float(curve.sum()) + sum(spent.values())
  shares = {key: seconds / total for key, seconds in spent.items()} if total else spent
  says = (
    f"evaluating takes {percent(shares['eval_interval'])} and saving "
    f"{percent(shares['checkpoint_period'])} of the time (events.jsonl)"
  )
  changes, saved = list[str](), 0.0
  for key, share in shares.items():
    now = run.config.get(key)
    if share <= 2 * _SMALL or type(now) is not int or now <= 0:
      continue
    times = min(math.ceil(share / _SMALL), _longest(run) // now)
    if times > 1:
      changes.append(f"{key}={now * times}")
      saved += share * (1 - 1 / times)
  if not changes:
    few = f"; rarer, fewer than {_FEWEST_PAUSES} of either would be left"
    return Finding("Pauses", says + (few if max(shares.values()) > 2 * _SMALL else ""))
  return Finding("Pauses", says, " ".join(changes), f"saves {percent(saved)} of the time", saved)


def _restarts(run: RunHistory) -> Iterator[Finding]:
  """Says what starting again has cost, and how often to save with so many restarts."""
  account, count = run.time_account(), len(run.of_kind(START)) - 1
  if count < 1 or not account.wall_seconds:
    return
  causes = {
    "repeated": "steps trained again",
    "restart": "time between starts",
    "start": "starting",
  }
  parts = [
    f"{name} {percent(account.lost[one] / account.wall_seconds)}" for one, name in causes.items()
  ]
  says = (
    f"{count} so far, with goodput {percent(account.goodput)}: {', '.join(parts)} of the time "
    "(events.jsonl)"
  )
  saves = [_number(event.get("seconds")) for event in run.of_kind(SAVED)]
  step, now = float(np.median(_recent(run, "step_seconds"))), run.config.get("checkpoint_period")
  period = now if type(now) is int and run.config.get("schedule_unit") == "steps" else 0
  if period <= 0 or not saves or step <= 0 or count < _FEWEST_RESTARTS:
    yield Finding("Restarts", says)
    return
  recovery, mtbf = Recovery(float(np.median(saves)), 0.0), account.wall_seconds / count
  best = max(round(best_interval(recovery.save_seconds, mtbf) / step), 1)
  gain = goodput(best * step, recovery, mtbf) - goodput(period * step, recovery, mtbf)
  if gain <= _SMALL:
    yield Finding("Restarts", says)
    return
  change = f"saves about {percent(gain)} of the time with as many restarts, by docs/goodput.md"
  yield Finding("Restarts", says, f"checkpoint_period={best}", change, gain)


def _longest(run: RunHistory) -> int:
  """Returns the longest period, in schedule_unit, with which a run still has its fewest pauses."""
  total = run.derived.get(_BUDGETS.get(run.config.get("schedule_unit", "steps"), ""), 0)
  return total // _FEWEST_PAUSES if type(total) is int else 0


def _number(value: object) -> float:
  return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0  # pyright: ignore


def _steps(run: RunHistory) -> Finding:
  """Says how even the steps are, and how they are divided."""
  seconds = _recent(run, "step_seconds")
  median = float(np.median(seconds))
  held_up = float(np.maximum(seconds - _LONG * median, 0).sum() / seconds.sum()) if median else 0.0
  last, speeds = run.metrics.last, _recent(run, "tokens_per_second")
  count = int(last.get("gradient_accumulation_steps", 1))
  speed = f", {np.median(speeds):,.0f} tokens/s" if len(speeds) else ""
  says = (
    f"{median:.3g} s{speed} (medians of {len(seconds)} steps), with {count:,} × "
    f"{int(last.get('micro_batch_to_train', 0)):,} samples; what steps take beyond {_LONG:g} times "
    f"their median is {percent(held_up)} of the time"
  )
  if count == 1 or run.config.get("micro_batch_size") == "auto":
    return Finding("Steps", says)
  saves = "what a larger microbatch saves is not known before it is timed, which auto does"
  batch = 0 if _scheduled(run.config) else int(last.get("global_batch_to_train", 0))
  return Finding("Steps", says, _sized(run, batch, auto=True), saves)


def _left(run: RunHistory, saved: float) -> Finding:
  """Says what is left of the budget, in samples: steps may differ, and nobody knows those of a steered batch."""
  total, step = run.derived.get("total_samples"), int(run.metrics.last.get("step", 0))
  left = total - int(run.metrics.last.get("samples", 0)) if type(total) is int else 0
  if left <= 0 or type(total) is not int:
    return Finding(
      "Left", f"nothing of its budget after step {step:,}; the next run can have these"
    )
  seconds = _recent(run, "step_seconds")
  done = run.metrics.positions["samples"][-len(seconds) - 1 :]
  each = float(seconds.sum() / max(done[-1] - done[0], 1))
  says = f"{left:,} of {total:,} samples, {span(left * each / DAY)} at the speed of the last steps"
  if saved:
    says += f"; the changes save up to {span(min(saved, 1.0) * left * each / DAY)} of it"
  return Finding("Left", says)
