"""Finds what of a loss depends on how a batch is split, and says what it is likely to come from.

The same rows are summed in one piece, in microbatches, one by one, in another order, beside rows of
padding, over two devices, and with each row's tokens over two devices. A term's value, the objective's gradient and every statistic must come
out alike, to rounding. What does not is looked at further (split_causes.py).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxbatch.core.accumulate import Accumulated
from maxbatch.core.split_causes import CAUSES, PADDED, REPLICAS, SINGLES, TOKENS, Cause, cause_of
from maxbatch.core.split_probe import (
  Arrangement,
  Probe,
  Results,
  Tolerances,
  difference,
  norm,
  perturbed,
  results,
  tolerances,
)
from maxbatch.core.terms import Loss, sample_keys

_SHOWN = 3
"""Parameters that a finding names."""


@dataclasses.dataclass(frozen=True)
class Finding:
  """A term or statistic that depends on the split."""

  what: str
  """`term "loss"`, `statistic "entropy"`, `denominator of term "loss"`."""
  cause: Cause
  errors: Mapping[str, float]
  """By split, how much its value differs from the batch's in one piece, relative to that."""
  gradient_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Likewise of its gradient, relative to the norm of that."""
  parameters: tuple[str, ...] = ()
  """Paths of the parameters whose gradient differs, the worst first."""

  @property
  def splits(self) -> tuple[str, ...]:
    """The splits that changed the value or the gradient."""
    return tuple(dict.fromkeys([*self.errors, *self.gradient_errors]))

  def __str__(self) -> str:
    lines = [f"{self.what} depends on the split"]
    for name, errors in {"value": self.errors, "gradient": self.gradient_errors}.items():
      if errors:
        under = ", ".join(f"{split} {_percent(error)}" for split, error in errors.items())
        lines.append(f"  {name} differs by: {under}")
    if self.parameters:
      rest = len(self.parameters) - _SHOWN
      shown = ", ".join(self.parameters[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
      lines.append(f"  gradient of: {shown}")
    return "\n".join([*lines, f"  likely cause: {CAUSES[self.cause]}"])


@dataclasses.dataclass(frozen=True)
class SplitReport:
  """What `check_split` found."""

  findings: tuple[Finding, ...]
  tried: tuple[str, ...]
  """The splits that were compared with the batch in one piece."""
  skipped: tuple[str, ...]
  """Splits that could not be tried, with the reason."""
  tolerance: float
  """Relative differences that are rounding; a model may make them larger."""

  @property
  def ok(self) -> bool:
    """Whether nothing depends on the split."""
    return not self.findings

  def raise_if_any(self) -> None:
    """Raises an error with all findings.

    Raises:
      ValueError: something depends on the split.
    """
    if self.findings:
      raise ValueError(str(self))

  def __str__(self) -> str:
    result = [str(finding) for finding in self.findings] or ["nothing depends on the split"]
    tried = f"tried: {', '.join(self.tried)}; {self.tolerance:.1g} and less is rounding"
    return "\n".join([*result, tried, *(f"not tried: {split}" for split in self.skipped)])


def check_split(
  loss: Loss,
  params: Any,
  rows: Any,
  keys: jax.Array | None = None,
  *,
  devices: Sequence[Any] | None = None,
) -> SplitReport:
  """Returns which terms and statistics depend on how the rows are split, by how much, and why.

  It compiles a few programs of a gradient: take a small model, and a few rows.

  Args:
    loss: terms and statistics of some rows.
    params: what the gradient is taken by; random ones, as nothing shows where they are 0.
    rows: a pytree of arrays (N, …), at least 4 rows, all different; a multiple of 4 is taken.
    keys: one random key for each row (N,); None: some.
    devices: two of them are replicas, or share each row's tokens, the second dim of arrays that have an even
      number of them, along an axis `context`; None: those of this process.

  Raises:
    ValueError: there are too few rows, or the batch in one piece has no finite gradient.
  """
  given = len(jax.tree.leaves(rows)[0])
  num_rows = given - given % 4
  if not num_rows:
    raise ValueError(f"a batch of {given} rows cannot be split; give it at least 4")
  keys = sample_keys(jax.random.key(0), np.arange(num_rows)) if keys is None else keys[:num_rows]
  devices = jax.local_devices() if devices is None else devices
  # Else a TPU rounds products to bfloat16, which comes near what is looked for.
  with jax.default_matmul_precision("highest"):
    return _Check(Probe(loss, params, rows, keys), devices).report()


class _Check:
  """The sums of one loss under every split."""

  def __init__(self, probe: Probe, devices: Sequence[Any]):
    self._probe, self._devices = probe, devices
    whole = probe.sums(probe.every_row)
    self._terms, self._whole = list(whole.terms), results(whole)
    # The terms whose denominator is another one for other parameters.
    other = probe.sums(probe.every_row, perturbed(probe.params, 0.01)).terms
    self._parametric = [
      name
      for name, term in whole.terms.items()
      if not np.array_equal(term.denominator, other[name].denominator)
    ]
    if not all(np.isfinite(g).all() for g in self._whole.gradients):
      raise ValueError("the gradient of the batch in one piece is not finite")
    splits = _splits(probe)
    names = (REPLICAS, TOKENS) if probe.shares_rows else (REPLICAS,)
    self._skipped = tuple(f"{name}, as there is one device" for name in names)
    if len(devices) > 1:
      splits[REPLICAS], self._skipped = probe.on(devices[:2]), ()
      if probe.shares_rows:
        splits[TOKENS] = probe.over_tokens(devices[:2])
    self._tolerances: Tolerances = tolerances(probe, whole, splits[SINGLES])
    self._splits: dict[str, Results] = {name: results(sums) for name, sums in splits.items()}

  def report(self) -> SplitReport:
    """Returns the findings of terms, each for itself, and of statistics."""
    gradient, _ = self._gradient_errors()
    result = [*self._term_findings()] if len(self._terms) == 1 else []
    if len(self._terms) > 1 and (gradient or any(map(self._errors, map(_term, self._terms)))):
      for name in self._terms:
        result += _Check(self._probe.only(name), self._devices)._term_findings()
    for what in self._whole.values:
      if what.startswith("statistic") and (errors := self._errors(what)):
        name = what.split('"')[1]
        result.append(Finding(what, self._cause(name, list(errors), is_stat=True), errors))
    names = (f"denominator of {_term(name)}" for name in self._parametric)
    result += [Finding(name, "parameters", {}) for name in names]
    if gradient and not result:
      result.append(Finding("the objective", "unknown", {}, gradient))
    return SplitReport(tuple(result), tuple(self._splits), self._skipped, self._tolerances.share)

  def _term_findings(self) -> list[Finding]:
    """Returns what there is to say of a single term."""
    [name] = self._terms
    errors, (gradient, paths) = self._errors(_term(name)), self._gradient_errors()
    if not errors and not gradient:
      return []
    cause = self._cause(name, [*errors, *gradient], is_stat=False)
    return [Finding(_term(name), cause, errors, gradient, paths)]

  def _cause(self, name: str, under: list[str], *, is_stat: bool) -> Cause:
    splits = sorted(set(under), key=list(self._splits).index)
    share = self._tolerances.share
    return cause_of(self._probe, name, is_stat=is_stat, under=splits, share=share)

  def _errors(self, what: str) -> dict[str, float]:
    """Returns by how much a value differs, relatively, under the splits where it is not rounding."""
    reference, tolerance = self._whole.values[what], self._tolerances.values[what]
    errors = {name: difference(one.values[what], reference) for name, one in self._splits.items()}
    beyond = {name: error for name, error in errors.items() if error > tolerance}
    return {name: _share(error, norm(reference)) for name, error in beyond.items()}

  def _gradient_errors(self) -> tuple[dict[str, float], tuple[str, ...]]:
    """Returns the relative errors of the gradient by split, with the paths of the parameters."""
    reference, result = self._whole.gradients, {}
    excess_L = np.zeros(len(reference))
    for name, one in self._splits.items():
      pairs = zip(one.gradients, reference, strict=True)
      errors_L = np.array([difference(*both) for both in pairs])
      out = np.zeros_like(errors_L)
      beyond_L = np.divide(errors_L, self._tolerances.gradients, out=out, where=errors_L > 0)
      if (beyond_L > 1).any():
        size = np.linalg.norm([norm(g) for g in reference])
        result[name] = _share(float(np.linalg.norm(errors_L)), float(size))
        excess_L = np.maximum(excess_L, beyond_L)
    leaves = jax.tree_util.tree_leaves_with_path(self._probe.params)
    worst = [at for at in np.argsort(-excess_L) if excess_L[at] > 1]
    return result, tuple(jax.tree_util.keystr(leaves[at][0]) for at in worst)


def _splits(probe: Probe) -> dict[str, Accumulated]:
  """Returns the sums of every split, by two programs: of N rows, and of up to N times N / 2."""
  num_rows = probe.num_rows
  every_N = np.arange(num_rows)
  halves = every_N.reshape(2, -1)
  first, second = halves[1].reshape(2, -1)
  zeros = np.full_like(first, -1)
  padded = [halves[0], np.concatenate([zeros, first]), np.concatenate([second, zeros])]
  singles = np.full((num_rows, num_rows // 2), -1)
  singles[:, 0] = every_N

  def microbatches(*rows: np.ndarray) -> Arrangement:
    # What stands behind is not read.
    return Arrangement(np.concatenate([np.stack(rows), singles[len(rows) :]]), len(rows))

  splits = {
    "rows in another order": Arrangement(every_N[None, ::-1]),
    "2 microbatches": microbatches(*halves),
    PADDED: microbatches(*padded),
    SINGLES: microbatches(*singles),
  }
  return {name: probe.sums(split) for name, split in splits.items()}


def _term(name: str) -> str:
  return f'term "{name}"'


def _share(error: float, size: float) -> float:
  return error / size if size > 0 else math.inf


def _percent(share: float) -> str:
  return f"{share:.2g}" if share < 1e-3 else f"{share:.1%}" if share < 10 else f"{share:.2g} times"
