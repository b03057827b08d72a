"""What a run has measured of its critical batch: its noise scale, and branches from its checkpoints."""

import dataclasses
import json
import math
import pathlib
from typing import Any, Literal

from maxbatch.batch_rules.zhang import GROWTH
from maxbatch.config.yaml_file import shown
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder

_OVER_NOISE_SCALE = 1.7
"""The critical batch of a moment over its noise scale where we have measured both: 1.5 and 2.0, more
later in training (docs/advice_check.md). One small model; Merrill et al. (2025) report far more."""

Kind = Literal["noise scale", "branches", "branches' curve"]
"""Of branches: the largest batch within the tolerance, or where known the batch of twice the data."""


@dataclasses.dataclass(frozen=True)
class Bracket:
  """Tokens of a step."""

  low: float
  value: float
  high: float
  """Infinite where no batch was too large."""

  def times(self, factor: float) -> "Bracket":
    """All of it, scaled."""
    return Bracket(self.low * factor, self.value * factor, self.high * factor)

  def clamped(self, tokens: float) -> float:
    """What is nearest to that number of tokens."""
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
    """The batch that it says; of branches within their tolerance that is one whatever the overhead."""
    return self.carried.times(1 if self.kind == "branches" else data_overhead)

  def as_dict(self) -> dict[str, object]:
    """For --json; null for no upper end."""
    ends = {
      name: {key: _finite(value) for key, value in dataclasses.asdict(bracket).items()}
      for name, bracket in (("found", self.found), ("carried", self.carried))
    }
    return {"kind": self.kind, "where": self.where, "at_tokens": self.at_tokens, **ends}


def measured_by(folder: str, tokens: float) -> list[Measured]:
  """All that a run's folder says, the newest of each kind.

  What is measured holds for the moment. A whole run's batch is what its moments are worth on average,
  with a batch that is worth using growing as tokens^p (batch_rules/zhang.py): (1 − p) of the last one.

  Args:
    folder: of the run; empty: none.
    tokens: of the run that is asked about.

  Raises:
    UserError: there is no run, or it has measured nothing.
  """
  if not folder:
    return []
  run = RunFolder(pathlib.Path(folder).expanduser())
  if not run.metrics.is_file():
    raise UserError(
      f"from_run={shown(folder)}: there is no run, which has a metrics.jsonl; for example "
      "from_run=runs/first_run"
    )
  found = [*_noise_scale(run, tokens), *_branches(run, tokens)]
  if not found:
    raise UserError(
      f"from_run={shown(folder)}: the run has measured no noise scale and no critical batch; measure "
      "with gns=norm in a run, or with python -m maxbatch.critical_batch "
      f"checkpoint={shown(folder)}"
    )
  return found


def growth_to(tokens: float, at_tokens: float) -> float:
  """The critical batch of a run of `tokens` over that of the moment `at_tokens` of a run."""
  exponent = GROWTH.exponent
  return (1 - exponent) * (tokens / at_tokens) ** exponent


def _noise_scale(run: RunFolder, tokens: float) -> list[Measured]:
  last: dict[str, Any] = {}
  with run.metrics.open(encoding="utf-8", errors="replace") as lines:
    for line in lines:
      # Of a run that is still training the last line may be half written.
      if '"gns/total_tokens"' in line and line.endswith("}\n"):
        last = json.loads(line)
  if not last or not last.get("tokens"):
    return []
  value = float(last["gns/total_tokens"])
  # Its ends are in samples.
  samples = float(last.get("gns/total", 0)) or value
  ends = [float(last.get(f"gns/total_{end}", samples)) / samples * value for end in ("low", "high")]
  found = Bracket(max(ends[0], 0.0), value, ends[1])
  at = float(last["tokens"])
  carried = found.times(_OVER_NOISE_SCALE * growth_to(tokens, at))
  return [Measured("noise scale", str(run.path), at, found, carried)]


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
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{files[-1]} cannot be read as a measurement ({error!r}); remove it, or measure again with "
      "python -m maxbatch.critical_batch"
    ) from error
  if ends:
    size, tokens_of_it = next(iter(branches.items()))
    found = ends.times(tokens_of_it / size)
    carried = found.times(growth_to(tokens, at))
    return [Measured("branches' curve", str(files[-1]), at, found, carried)]
  low = branches.get(least, min(branches.values()) / 2)
  high = branches.get(below, math.inf)
  middle = low if math.isinf(high) else (low * high) ** 0.5
  found = Bracket(low, middle, high)
  return [Measured("branches", str(files[-1]), at, found, found.times(growth_to(tokens, at)))]


def _step(path: pathlib.Path) -> int:
  number = path.parent.name.removeprefix("step-")
  return int(number) if number.isdecimal() else -1


def _finite(value: float) -> float | None:
  return value if math.isfinite(value) else None
