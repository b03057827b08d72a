"""What the plan command says: the same facts as plain values and as text."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from maxbatch.advice.goodput import ExpectedGoodput
from maxbatch.batch.host_loads import HostLoad
from maxbatch.batch.learning_rate import LearningRate
from maxbatch.batch.limits import limits
from maxbatch.batch.rl_plan import RLPlan
from maxbatch.command_line.screen import Table, section
from maxbatch.core.keys import counted, text
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.tuning.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class PlanReport:
  """A plan with everything that is shown beside it."""

  plan: BatchPlan
  rate: LearningRate
  loads: Sequence[HostLoad]
  """Empty where nothing is loaded."""
  given: Sequence[str]
  """The sizes that were given, as key=value."""
  choice: str
  """What the microbatch is chosen from when the run starts; empty if it is known."""
  pipeline: Pipeline | None = None
  assumption: str = ""
  """Why there are as many devices, where nothing says how many."""
  sizes: Sequence[Candidate] = ()
  """What micro_batch_size=explore ranks."""
  offer: str = ""
  """How to have the microbatch chosen, where no key gives it."""
  rl: RLPlan | None = None
  """The plan of reinforcement learning, whose completions are the plan's samples; nothing loads
  them."""
  sparse_experts: Sequence[str] = ()
  """Whether experts see too few tokens of a step; empty: they do not."""
  goodput: ExpectedGoodput | None = None
  """What to expect where hosts fail; None: it is not asked for."""

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values for --json: numbers are numbers, fractions text."""
    plan = self.plan
    return {
      "given": list(self.given),
      "choice": self.choice,
      "offer": self.offer,
      "mesh": plan.topology.shape,
      "num_slices": plan.topology.num_slices,
      "num_hosts": sum(load.num_hosts for load in self.loads),
      "sizes": plan.as_dict(),
      "hosts": [
        {"first_host": one.first_host, "last_host": one.last_host, "samples_per_step": one.samples}
        for one in self.loads
      ],
      "phases": [self._phase(phase) for phase in plan.phases],
      "phases_not_reached": list(self.plan.phases_not_reached),
      "limits": self._limits(),
      "pipeline": self.pipeline and self.pipeline.as_dict(),
      **({"rl": self.rl.as_dict()} if self.rl else {}),
      **({"goodput": self.goodput.as_dict()} if self.goodput else {}),
    }

  def __str__(self) -> str:
    parts = [
      "\n".join(self._given_lines()),
      *([section("Sizes to explore", _sizes(self.sizes).lines(""))] if self.sizes else []),
      *([f"{self.rl}\n\nTraining on the completions, each a sample"] if self.rl else []),
      self.plan.derivation(),
      *([section("Loading", map(_load_line, self.loads))] if self.loads else []),
      self._table(),
      *([self._pipeline(self.pipeline)] if self.pipeline else []),
      *([section("Limits", self._limits())] if not self.rl else []),
      *([section("Goodput", self.goodput.lines())] if self.goodput else []),
    ]
    return "\n\n".join(parts)

  def _limits(self) -> list[str]:
    """Returns the limits of samples; those of completions, in whole groups, are in the plan of these."""
    return [] if self.rl else [*limits(self.plan), *self.sparse_experts]

  def _given_lines(self) -> Iterator[str]:
    """Says what was given, what is still to be chosen, and what the numbers below assume instead."""
    yield f"Given  {', '.join(self.given) or 'nothing; 1 microbatch of 4 samples per device'}"
    if self.choice:
      whole, each = self.plan.micro_batch_to_train, self.plan.per_device
      assumed = counted(whole, "completion") if self.rl else counted(each(whole), "sample")
      yield f"Open   {self.choice}; below as if it were {assumed}"
    if self.offer:
      yield f"Auto   {self.offer}"
    if self.assumption:
      yield f"On     {self.assumption}"

  def _pipeline(self, pipeline: Pipeline) -> str:
    lines = ["Pipeline", str(pipeline), *pipeline.open_choices]
    return "\n  ".join(lines)

  def _phase(self, phase: Phase) -> dict[str, Any]:
    plan = self.plan
    last = max(phase.first.step, phase.end.step - 1)
    return {
      "phase": phase.number,
      "first_step": phase.first.step,
      "first_sample": phase.first.samples,
      "first_token": plan.tokens(phase.first.samples),
      "steps": phase.num_steps,
      "global_batch_to_train": phase.batch,
      "per_device_batch_size": text(plan.per_device(phase.micro_batch)),
      "gradient_accumulation_steps": phase.num_microbatches,
      "learning_rate_first": self.rate(phase.first),
      "learning_rate_highest": self.rate.highest(phase) if phase.num_steps else 0.0,
      "learning_rate_last": self.rate(Position(last, plan.samples_at(last))),
      "same_shape_as_the_run": phase.micro_batch == plan.micro_batch_to_train,
      "is_cut": phase.is_cut,
    }

  def _table(self) -> str:
    above = ("", "first", "first", "first", "", "", "per", "micro-", "learning", "")
    head = ("", "step", "sample", "token", "steps", "batch", "device", "batches", "rate", "")
    rows = [head, *(_cells(self._phase(phase)) for phase in self.plan.phases)]
    lines = Table(above, rows).lines("")
    missed = ", ".join(map(str, self.plan.phases_not_reached))
    return section("Phases", [*lines, *([f"without a step: {missed}"] if missed else [])])


def _cells(phase: dict[str, Any]) -> tuple[str, ...]:
  numbers = ("first_step", "first_sample", "first_token", "steps", "global_batch_to_train")
  note = "" if phase["same_shape_as_the_run"] else "another shape"
  rates = [f"{phase[f'learning_rate_{at}']:.3g}" for at in ("first", "highest", "last")]
  return (
    str(phase["phase"]),
    *(f"{phase[key]:,}" for key in numbers),
    phase["per_device_batch_size"],
    f"{phase['gradient_accumulation_steps']:,}",
    "…".join(rate for rate, _ in itertools.groupby(rates)),
    "the rest of the budget" if phase["is_cut"] else note,
  )


def _sizes(sizes: Sequence[Candidate]) -> Table:
  head = ("micro_batch_size", "microbatch", "accumulation", "batch")
  rows = [(text(one.size), one.micro_batch, one.num_microbatches, one.batch) for one in sizes]
  return Table(head, [(size, *(f"{number:,}" for number in rest)) for size, *rest in rows])


def _load_line(load: HostLoad) -> str:
  several = load.num_hosts > 1
  hosts = (
    f"hosts {load.first_host:,} to {load.last_host:,}" if several else f"host {load.first_host:,}"
  )
  if load.samples == 0:
    rest = (
      "read nothing, and get their samples" if several else "reads nothing, and gets its samples"
    )
    return f"{hosts}: {rest} from the others"
  return f"{hosts}: {counted(load.samples, 'sample')} per step{' each' if several else ''}"
