"""What the rules say together: an interval of batches at one data overhead, and one taken from it.

Rules for the critical batch, and for the batch at some data overhead, are carried to the overhead
that is asked for (B = x · Bcrit). Rules for the optimal batch answer another question, and so stand
beside them. What is taken is the middle one, so that a single rule far off moves nothing. What a run has
measured, its noise scale and branches from its checkpoints, is joined to them.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Literal

from maxbatch.batch_rules.published import GROWTH, batch_rules
from maxbatch.batch_rules.rule import BatchRule, Training, at_overhead
from maxbatch.config.find import shown, user_path
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder

_OVER_NOISE_SCALE = 1.7
"""The critical batch of a moment over its noise scale where we have measured both: 1.5 and 2.0, more
later in training (docs/advice_check.md). One small model; Merrill et al. (2025) report far more."""

Kind = Literal["noise scale", "branches", "branches' curve"]
"""From branches: the largest batch within the tolerance, or where known the batch of twice the
data."""


@dataclasses.dataclass(frozen=True)
class Bracket:
  """Tokens of a step."""

  low: float
  value: float
  high: float
  """Infinite where no batch was too large."""

  def times(self, factor: float) -> "Bracket":
    """Returns all of it, scaled."""
    return Bracket(self.low * factor, self.value * factor, self.high * factor)

  def clamped(self, tokens: float) -> float:
    """Returns what is nearest to that number of tokens."""
    return min(max(tokens, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class Measured:
  """One measurement, at some point of a run, and what it says of the run that is asked about."""

  kind: Kind
  where: str
  at_tokens: float
  """Tokens that the run had seen."""
  found: Bracket
  carried: Bracket
  """At the length of the run that is asked about."""

  def at_overhead(self, data_overhead: float) -> Bracket:
    """Returns the batch that it says; of branches within their tolerance whatever the overhead."""
    return self.carried.times(1 if self.kind == "branches" else data_overhead)

  def as_dict(self) -> dict[str, object]:
    """Returns plain values for --json; null for no upper end."""
    ends = {
      name: {
        key: end if math.isfinite(end) else None for key, end in dataclasses.asdict(one).items()
      }
      for name, one in (("found", self.found), ("carried", self.carried))
    }
    return {"kind": self.kind, "where": self.where, "at_tokens": self.at_tokens, **ends}


def measured_by(folder: str, tokens: float) -> list[Measured]:
  """Returns all that a run's folder says, the newest of each kind.

  What is measured holds for the moment. A whole run's batch is what its moments are worth on average,
  with a batch that is worth using growing as tokens^p (batch_rules/published.py): (1 − p) of the last one.

  Args:
    folder: of the run; empty: none.
    tokens: of the run that is asked about.

  Raises:
    UserError: there is no run, or it has measured nothing.
  """
  if not folder:
    return []
  run = RunFolder(user_path(folder))
  if not run.metrics.is_file():
    raise UserError(
      f"from_run={shown(folder)}: there is no run with a metrics.jsonl; for example "
      "from_run=runs/first_run"
    )
  results = [*_noise_scale(run, tokens), *_branches(run, tokens)]
  if not results:
    raise UserError(
      f"from_run={shown(folder)}: the run has measured neither noise scale nor critical batch; "
      "measure with gns=norm in a run, or with maxbatch critical_batch "
      f"checkpoint={shown(folder)}"
    )
  return results


def last_record_with(folder: pathlib.Path, *keys: str) -> dict[str, float] | None:
  """Returns the newest record of a run with all of these keys; None: there is none. Raises UserError: it
  cannot be read."""
  path, last = RunFolder(folder).metrics, b""
  wanted = [f'"{key}"'.encode() for key in keys]
  try:
    with path.open("rb") as lines:
      for line in lines:
        # Of a run that is still training the last line may be half written.
        if line.endswith(b"}\n") and all(key in line for key in wanted):
          last = line
    record = json.loads(last or b"null")
  except (OSError, ValueError, RecursionError):
    record = {}
  if record is not None and not _is_record(record, keys):
    raise UserError(
      f"from_run: {path} cannot be read as metrics of a run; put back the file, or name another run"
    )
  return record


def _is_record(record: object, keys: Sequence[str]) -> bool:
  if not isinstance(record, dict) or not record.keys() >= {*keys}:
    return False
  return all(isinstance(value, int | float) for value in record.values())


def growth_to(tokens: float, at_tokens: float) -> float:
  """Returns the critical batch of a run of `tokens` over that of its moment `at_tokens`."""
  exponent = GROWTH.exponent
  return (1 - exponent) * (tokens / at_tokens) ** exponent


def _noise_scale(run: RunFolder, tokens: float) -> list[Measured]:
  last = last_record_with(run.path, "gns/total_tokens", "tokens")
  if last is None or not last["tokens"]:
    return []
  value = float(last["gns/total_tokens"])
  # Its ends are in samples.
  samples = float(last.get("gns/total", 0)) or value
  ends = [float(last.get(f"gns/total_{end}", samples)) / samples * value for end in ("low", "high")]
  result = Bracket(max(ends[0], 0.0), value, ends[1])
  at = float(last["tokens"])
  carried = result.times(_OVER_NOISE_SCALE * growth_to(tokens, at))
  return [Measured("noise scale", str(run.path), at, result, carried)]


def _branches(run: RunFolder, tokens: float) -> list[Measured]:
  parent = run.path.with_name(f"{run.path.name}-critical_batch")
  files = sorted(parent.glob("step-*/critical_batch.json"), key=_step)
  if not files:
    return []
  try:
    report = json.loads(files[-1].read_text(encoding="utf-8"))
    branches = {one["batch"]: float(one["tokens_per_step"]) for one in report["branches"]}
    at = float(report["checkpoint"]["tokens"]) + float(report["branch_tokens"])
    least, below = report["critical_batch_at_least"], report["critical_batch_below"]
    curve = (report.get("tradeoff") or {}).get("critical_batch")
    ends = curve and Bracket(*(float(curve[end]) for end in ("low", "value", "high")))
  except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise UserError(
      f"{files[-1]} cannot be read as a measurement ({error!r}); remove it, or measure again with "
      "maxbatch critical_batch"
    ) from error
  if ends:
    size, tokens_of_it = next(iter(branches.items()))
    result = ends.times(tokens_of_it / size)
    carried = result.times(growth_to(tokens, at))
    return [Measured("branches' curve", str(files[-1]), at, result, carried)]
  low = branches.get(least, min(branches.values()) / 2)
  high = branches.get(below, math.inf)
  middle = low if math.isinf(high) else (low * high) ** 0.5
  result = Bracket(low, middle, high)
  return [Measured("branches", str(files[-1]), at, result, result.times(growth_to(tokens, at)))]


def _step(path: pathlib.Path) -> int:
  number = path.parent.name.removeprefix("step-")
  return int(number) if number.isdecimal() else -1


@dataclasses.dataclass(frozen=True)
class Said:
  """What one rule says of this training."""

  rule: BatchRule
  tokens: float
  """Its own value, tokens of a step."""
  at_overhead: float | None
  """At the data overhead that was asked for; None where the rule answers another question."""
  beyond: float
  """The factor by which the training is outside of what was fitted; 1 inside."""

  def as_dict(self) -> dict[str, object]:
    """Returns plain values for --json."""
    return {
      "rule": self.rule.name,
      "means": self.rule.means,
      "tokens_per_step": self.tokens,
      "tokens_per_step_at_overhead": self.at_overhead,
      "times_beyond_fitted_range": self.beyond,
      "formula": self.rule.formula,
      "source": self.rule.source,
      "constants_from": self.rule.read,
      "caveat": self.rule.caveat,
    }


@dataclasses.dataclass(frozen=True)
class BatchSize:
  """The answer in tokens of a step, before it is divided over devices."""

  data_overhead: float
  said: Sequence[Said]
  measured: Sequence[Measured]
  low: float
  high: float
  """The range of the rules and measurements at the asked overhead."""
  by_rules: float
  """The middle of the rules, without what was measured."""
  tokens: float
  """What is taken."""

  @property
  def critical_tokens(self) -> float:
    """The critical batch that follows from what is taken."""
    return self.tokens / self.data_overhead

  @property
  def spread(self) -> float:
    """The factor between the ends of the interval."""
    return self.high / self.low


def joined(
  training: Training, data_overhead: float, measured: Sequence[Measured] = ()
) -> BatchSize:
  """Returns the rules of a training, at a data overhead."""
  said = [
    Said(
      rule,
      rule.batch_tokens(training),
      at_overhead(rule, training, data_overhead),
      rule.beyond(training),
    )
    for rule in batch_rules()
    if rule.speaks_of(training)
  ]
  estimates = [one.at_overhead for one in said if one.at_overhead is not None]
  noise = [one.at_overhead(data_overhead).value for one in measured if one.kind == "noise scale"]
  by_rules, taken = _middle(estimates), _middle([*estimates, *noise])
  low, high = min([*estimates, *noise]), max([*estimates, *noise])
  for one in measured:
    # Up to its lower end branches lost nothing, and beyond its upper end they did.
    if one.kind != "noise scale":
      ends = one.at_overhead(data_overhead)
      low, high, taken = (ends.clamped(each) for each in (low, high, taken))
  return BatchSize(data_overhead, said, measured, low, high, by_rules, taken)


def _middle(values: Sequence[float]) -> float:
  """Returns the median; of an even number the geometric mean of the two in the middle."""
  return (statistics.median_low(values) * statistics.median_high(values)) ** 0.5
