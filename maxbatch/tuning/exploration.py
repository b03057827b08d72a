"""explore: every microbatch in the range, the best so far said after each, all ranked at the end.

With policies or flags beside the sizes, what grid_search.py finds worth a compilation.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxbatch.batch.from_config import is_rl, mesh_of
from maxbatch.command_line.screen import Table
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted, text
from maxbatch.core.topology import Topology, row_shares
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import EXPLORE, NONE, explored
from maxbatch.hardware.devices import Device
from maxbatch.models.remat import POLICIES, offload_obstacle
from maxbatch.tuning.candidates import Candidate, with_policy
from maxbatch.tuning.grid_search import INTERACTION, Grid, LeftOut, misfit
from maxbatch.tuning.search import ProbeSize, Tried, name_of, nothing_fits, search

_GUESSED_TOKENS = 2048
"""Tokens of a microbatch on a device that are worth a first look: matrix products of that many rows
keep a device busy, and a large model rarely fits with many more."""
MOST_CONFIDENCE = 99
"""A compiler or a clock that saw a few steps is never quite the run itself."""


_SHOWN = 4
"""Candidates not tried for one reason that are named below the table."""


@dataclasses.dataclass(frozen=True)
class Skipped:
  """A candidate that was not probed, because a smaller one does not fit."""

  candidate: Candidate
  smaller: Tried


@dataclasses.dataclass(frozen=True)
class Exploration:
  """What is known so far of `total` candidates, in the order in which it was learnt."""

  total: int
  tried: tuple[Tried, ...] = ()
  skipped: tuple[Skipped, ...] = ()
  left_out: tuple[LeftOut, ...] = ()
  """Those that are not worth a probe."""

  @property
  def ranked(self) -> list[Tried]:
    """The candidates that fit, the fastest first."""
    fitting = [one for one in self.tried if one.probe.fits]
    return sorted(fitting, key=lambda one: -one.samples_per_second)

  @property
  def best(self) -> Tried | None:
    """The recommendation so far."""
    return next(iter(self.ranked), None)

  @property
  def share_explored(self) -> float:
    """The share of the exploration that is done, 0 to 1: of the candidates that are not left out."""
    return (len(self.tried) + len(self.skipped)) / (self.total - len(self.left_out))

  @property
  def confidence(self) -> int:
    """The percentage of certainty, 0 to 99, that no other candidate is faster.

    The product of these shares, of 99: the candidates explored; the model's work that the best
    one's time accounts for (1 where it was measured); the chance that the best is truly faster
    than the second, Φ((a − b) / s), where a and b are their samples per second and s joins the
    spreads of both (1/2 for equals, 1 where times have no spread); and the chance that it is faster
    than what the nearest of those left out is expected to reach, where s is the error of that.
    """
    if self.best is None:
      return 0
    share = self.share_explored * self.best.probe.coverage * _chance_of_order(self.ranked[:2])
    share *= self._chance_of_rest()
    return math.floor(MOST_CONFIDENCE * min(share, 1.0))

  def __str__(self) -> str:
    """Returns the ranked table, with what its numbers mean."""
    head = (
      "",
      self.tried[0].candidate.key,
      "microbatches",
      "peak memory",
      "step",
      "samples/s",
      "tokens/s",
    )
    head += ("utilisation", "suggested global batches")
    rows = [_fitting_row(rank, one) for rank, one in enumerate(self.ranked, 1)]
    rows += [
      ("", *_start_of_row(one.candidate), f"does not fit: {one.probe.memory}")
      for one in self._too_large()
    ]
    if not self.left_out:
      rows += [
        ("", *_start_of_row(one.candidate), f"does not fit (as {one.smaller.size})")
        for one in self.skipped
      ]
    return "\n".join([*Table(head, rows).lines(indent=""), *self._left_out(), *self._notes()])

  def as_dict(self) -> dict[str, Any]:
    """Returns the table as plain values: numbers are numbers, fractions text."""
    return {
      "recommended": self.best.size if self.best else None,
      "confidence": self.confidence,
      "fitting": [one.as_dict() for one in self.ranked],
      "not_fitting": [one.as_dict() for one in self._too_large()]
      + [_named(one.candidate) for one in self.skipped],
      "left_out": [_named(one.candidate) | {"why": one.why} for one in self.left_out],
    }

  def _too_large(self) -> list[Tried]:
    return [one for one in self.tried if not one.probe.fits]

  def _chance_of_rest(self) -> float:
    """Returns the chance that the best is faster than the nearest of those left out."""
    assert self.best is not None
    best = self.best.samples_per_second
    expected = max((one.expected or 0.0 for one in self.left_out), default=0.0)
    lead = (best / expected - 1) / INTERACTION if expected else math.inf
    return 0.5 * (1 + math.erf(lead / math.sqrt(2)))

  def _left_out(self) -> list[str]:
    """Returns a line for each reason for which candidates are left out."""
    if not self.left_out:
      return []
    reasons: dict[str, list[str]] = {}
    for one in self.skipped:
      why = f"does not fit, as {name_of(one.smaller.candidate)}"
      reasons.setdefault(why, []).append(name_of(one.candidate))
    for one in self.left_out:
      reasons.setdefault(one.why, []).append(name_of(one.candidate))
    return [
      f"Tried: {len(self.tried)} of {counted(self.total, 'candidate')}. Not tried:",
      *(f"  {_listed(names)}: {why}" for why, names in reasons.items()),
    ]

  def _notes(self) -> list[str]:
    hows = sorted({one.probe.how for one in self.ranked})
    coverage = min((one.probe.coverage for one in self.ranked), default=0.0)
    covered = f"; they account for {coverage:.0%} of the model's work or more"
    return [
      f"Times are {' and '.join(hows)}{covered if 'estimated' in hows else ''}.",
      f"Confidence {self.confidence} of {MOST_CONFIDENCE}: {self.share_explored:.0%} of the "
      "candidates are explored, times the share of work",
      "that the best one's time accounts for, times the chance that it is faster than the second, "
      "given their spread" + ("." if not self.left_out else ","),
      *self._expected_note(),
      *self._batch_note(),
    ]

  def _expected_note(self) -> list[str]:
    """Returns what the confidence makes of those left out."""
    if not self.left_out:
      return []
    return [
      f"times the chance, {self._chance_of_rest():.0%}, that it is faster than what those left out are "
      f"expected to reach, within {INTERACTION:.0%}."
    ]

  def _batch_note(self) -> list[str]:
    """Returns which batch the recommended size needs, where it does not divide the one that is given."""
    if self.best is None or not self.best.candidate.batch_is_near:
      return []
    exact = next((one for one in self.ranked if not one.candidate.batch_is_near), None)
    given = (
      f", {exact.candidate.batch_size:,}, the fastest is {exact.size}" if exact else " none fits"
    )
    return [
      f"micro_batch_size={self.best.size} does not divide the batch that is given; the nearest that it "
      f"does is batch_size={self.best.candidate.batch_size}. For the one given{given}."
    ]


def explore(
  candidates: Sequence[Candidate],
  probe: ProbeSize,
  suggested_fixes: str,
  say: Callable[[str], None],
  grid: Grid | None = None,
) -> Exploration:
  """Probes the candidates, and says before each which it is, and after each the recommendation so far.

  Memory grows with the microbatch: above a size that does not fit, none is compiled.

  Args:
    candidates: ascending in size; those of the same variant are explored together.
    suggested_fixes: keys that reduce the memory needed, for the message when nothing fits.
    grid: those that are worth it; None: all are.

  Raises:
    UserError: nothing fits.
  """
  order = _order(candidates)

  def so_far(known: Mapping[Candidate, Tried]) -> Exploration:
    tried, skipped = tuple(known.values()), _skipped(candidates, tuple(known.values()))
    return Exploration(len(candidates), tried, skipped, tuple(grid.left_out(known) if grid else ()))

  def pending(known: Mapping[Candidate, Tried]) -> Sequence[Candidate]:
    if grid:
      return grid.pending(known)
    done = {*known, *(one.candidate for one in so_far(known).skipped)}
    return [one for one in order if one not in done]

  def next_candidate(known: Mapping[Candidate, Tried]) -> Candidate | None:
    return next(iter(pending(known)), None)

  def probed(candidate: Candidate) -> Tried:
    say(_trying(candidate, len(tried) + 1, len(tried) + len(pending(tried))))
    tried[candidate] = Tried(candidate, probe(candidate))
    return tried[candidate]

  tried = dict[Candidate, Tried]()
  known = search(next_candidate, probed, len(candidates), lambda known: say(_line(so_far(known))))
  result = so_far(known)
  if result.best is None:
    raise UserError(
      nothing_fits(min(result.tried, key=lambda one: one.probe.peak_bytes), suggested_fixes)
    )
  return result


def _order(candidates: Sequence[Candidate]) -> list[Candidate]:
  """Orders up from a good first guess, then down from it; one variant after the other."""
  ordered: list[Candidate] = []
  for variant in dict.fromkeys(one.variant for one in candidates):
    sizes = [one for one in candidates if one.variant == variant]
    small = [one for one in sizes[:-1] if one.device_tokens < _GUESSED_TOKENS]
    ordered += [*sizes[len(small) :], *reversed(small)]
  return ordered


def _skipped(candidates: Sequence[Candidate], tried: Sequence[Tried]) -> tuple[Skipped, ...]:
  """Returns the candidates that cannot fit because one that needs less does not."""
  known = {one.candidate for one in tried}
  return tuple(
    Skipped(candidate, smaller)
    for candidate in candidates
    if candidate not in known and (smaller := misfit(candidate, tried))
  )


def _trying(candidate: Candidate, index: int, count: int) -> str:
  """Returns which candidate is tried now, and how many there are as far as is known."""
  return f"INFO: Trying {candidate.key}: {name_of(candidate)} ({index} of {count})"


def _line(result: Exploration) -> str:
  """Returns the recommendation so far."""
  progress = f"exploration progress: {result.share_explored:.0%}"
  base = next((one for one in result.tried if one.probe.fits), None)
  if result.best is None or base is None:
    last = result.tried[-1]
    return f"INFO: {last.candidate.key}: {last.size} does not fit ({last.probe.memory}), {progress}"
  best, speed = result.best.candidate, base.samples_per_second
  gain = f"{result.best.samples_per_second / speed:.2f}x base" if speed else "not known"
  return (
    f"INFO: Current recommended {best.key}: {result.best.size}, {result.best.probe.how} "
    f"performance: {gain}, {progress}, confidence: {result.confidence} (of "
    f"{MOST_CONFIDENCE})"
    + (f", ici_context_parallelism: {best.context}" if best.context else "")
    + (f", remat_policy: {best.remat_policy}" if best.remat_policy else "")
    + (f", compiler_flags: {best.compiler_flags}" if best.compiler_flags else "")
  )


def _chance_of_order(fastest: Sequence[Tried]) -> float:
  """Returns the chance that the first is truly faster than the second."""
  if len(fastest) < 2:
    return 1.0
  first, second = fastest
  lead = first.samples_per_second - second.samples_per_second
  if lead == 0:
    return 0.5
  spread = math.hypot(*(one.probe.spread * one.samples_per_second for one in fastest))
  return 0.5 * (1 + math.erf(lead / spread / math.sqrt(2))) if spread else 1.0


def _fitting_row(rank: int, one: Tried) -> tuple[str, ...]:
  speed, used = one.samples_per_second, one.probe.utilisation
  return (
    str(rank),
    *_start_of_row(one.candidate),
    one.probe.memory,
    _step_time(one),
    f"{speed:,.4g}" if speed else "",
    f"{speed * one.candidate.max_target_length:,.0f}" if speed else "",
    "" if used is None else f"{used:.1%}",
    ", ".join(f"{batch:,}" for batch in one.candidate.suggested_batches()),
  )


def _listed(names: Sequence[str]) -> str:
  """Returns the first of them, and how many more there are."""
  more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return ", ".join(names[:_SHOWN]) + more


def _named(candidate: Candidate) -> dict[str, str]:
  """Returns the keys that a candidate sets, as plain values."""
  variant = {"remat_policy": candidate.remat_policy, "compiler_flags": candidate.compiler_flags}
  return {candidate.key: text(candidate.size)} | {k: v for k, v in variant.items() if v}


def _step_time(one: Tried) -> str:
  """Formats `0.41 s ± 2%`; without a spread where there is none."""
  spread = f" ± {one.probe.spread:.1%}" if one.probe.spread else ""
  return "" if one.step_seconds is None else f"{one.step_seconds:.4g} s{spread}"


def _start_of_row(candidate: Candidate) -> tuple[str, str]:
  variant = f" {candidate.variant}" if candidate.variant else ""
  return text(candidate.size) + variant, f"{candidate.num_microbatches:,}"


def with_variants(
  sizes: Sequence[Candidate], config: Config, device: Device
) -> tuple[Candidate, ...]:
  """Returns every size with every remat_policy and set of compiler flags that is to be explored,
  one variant after the other."""
  policies = _policies(config, device) if config.model.remat_policy == "explore" else (None,)
  sets = explored(device) if config.compile.compiler_flags == EXPLORE else (None,)
  return tuple(
    dataclasses.replace(size, remat_policy=policy, compiler_flags=flags)
    for policy, flags in itertools.product(policies, sets)
    for size in sizes
  )


def with_shared_rows(
  find: Callable[[Config, Topology], Sequence[Candidate]], config: Config, layout: Topology
) -> Sequence[Candidate]:
  """Returns the sizes of a mesh and, where rows are long and the mesh leaves open how devices are divided
  otherwise, those of meshes on which devices share rows.

  Args:
    find: the sizes of a configuration on a mesh.
  """
  sizes, mesh = find(config, layout), config.mesh
  is_open = -1 in (mesh.ici_data_parallelism, mesh.ici_fsdp_parallelism)
  given = mesh.ici_context_parallelism > 1 or config.pipeline.pipeline_schedule != "none"
  if not is_open or given or is_rl(config.rl):
    return sizes
  shares = list(row_shares(config.batch.max_target_length, layout.devices_per_slice))
  if len(shares) == 1:
    return sizes
  result = [dataclasses.replace(one, context=1) for one in sizes]
  for context in shares[1:]:
    shared = dataclasses.replace(
      config, mesh=dataclasses.replace(mesh, ici_context_parallelism=context)
    )
    with contextlib.suppress(
      UserError
    ):  # Other axes leave too few devices, or this batch too many rows.
      found = find(shared, mesh_of(shared, layout.num_devices, layout.num_slices))
      result += [dataclasses.replace(one, context=context) for one in found]
  return result


def _policies(config: Config, device: Device) -> list[str]:
  """Returns the policies that can be had on a device, the fastest where it fits first."""
  is_pipeline = config.pipeline.pipeline_schedule != "none"
  models = {each: with_policy(config.model, each) for each in ("none", *POLICIES)}
  return [
    each
    for each, model in models.items()
    if not offload_obstacle(model, device.platform, is_pipeline=is_pipeline)
  ]


def without_variants(config: Config) -> Config:
  """Returns the configuration with what is to be explored beside the size as it is by default."""
  model, keys = config.model, config.compile
  if model.remat_policy == "explore":
    model = dataclasses.replace(model, remat_policy="none")
  if keys.compiler_flags == EXPLORE:
    keys = dataclasses.replace(keys, compiler_flags=NONE)
  return dataclasses.replace(config, model=model, compile=keys)
