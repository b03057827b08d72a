"""maxbatch critical_batch checkpoint=RUN: up to which batch training loses nothing.

The branched measurement of Merrill et al. (2025): from one checkpoint, branches train on the same
next samples with k times the batch and a rate that follows it, and the largest batch whose loss
ends within a tolerance of every smaller one is the critical batch at this point of the run. What
"within" means, and why the best smaller branch is what counts: maxbatch/experiments/losses.py.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from maxbatch.batch.from_config import check_supervised, plan_batches
from maxbatch.checkpoints.find import config_of, find_checkpoint
from maxbatch.command_line.arguments import Arguments, Command, Key
from maxbatch.command_line.run import run_command
from maxbatch.config.declare import CountOrUnset, FileName, NonNegativeFloat, Range
from maxbatch.config.find import shown
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.config.value import exact_number
from maxbatch.core.keys import text
from maxbatch.errors import UserError
from maxbatch.experiments.branching import BranchBase, BranchRequest, plan_branches
from maxbatch.experiments.losses import Measured, judge
from maxbatch.experiments.origin import (
  Checkpoint,
  read_checkpoint,
  record_origin,
  removed_if_refused,
)
from maxbatch.experiments.plot import critical_batch_charts, title
from maxbatch.experiments.report import CriticalBatchReport, Origin, plan_table
from maxbatch.experiments.running import (
  SET_HERE,
  AtCheckpoint,
  Experiment,
  at_checkpoint,
  branch_config,
  train_branch,
)
from maxbatch.hardware.agreement import check_alike, sync_errors, write_shared_file
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.heap import share_one_heap
from maxbatch.hardware.processes import leave_together, refusing_together
from maxbatch.modes.method import Purpose
from maxbatch.modes.prepare import check_memory, purpose_of
from maxbatch.modes.pretraining import (
  PRETRAINING,
  check_plan,
  resolve_micro_batch_size,
  with_batch_of,
)
from maxbatch.modes.start import connected_devices, started
from maxbatch.plots.page import picture
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import build_trainer

_MOST_FACTORS = 100
_RULES = {
  "none": "the same for all",
  "sqrt": "times the root of the factor",
  "linear": "times the factor",
}


@dataclasses.dataclass(frozen=True)
class BranchArguments:
  """Beside the configuration's keys."""

  checkpoint: Annotated[
    str,
    FileName(),
    Key(
      "a run's folder, for its newest checkpoint, or .../checkpoints/200", "checkpoint=runs/mine"
    ),
  ] = ""
  factors: Annotated[
    str, Key("of the batch in force at the checkpoint; 0.5 and 1/2 work too", "factors=1,2,4,8")
  ] = "1,2,4,8"
  branch_tokens: Annotated[
    CountOrUnset,
    Key(
      "tokens that every branch trains on; -1: 40 steps of the largest batch", "branch_tokens=-1"
    ),
  ] = -1
  tolerance: Annotated[
    NonNegativeFloat,
    Key("nats per token that a batch may lose to a smaller one", "tolerance=0.01"),
  ] = 0.01
  smoothing: Annotated[
    Fraction,
    Range(low=0.01, high=1),
    Key("share of a branch, at its end, over which its loss is averaged", "smoothing=0.25"),
  ] = Fraction(1, 4)
  coupling: Annotated[
    Literal["auto", "none", "sqrt", "linear"],
    Key(
      "the learning rate times k (linear), its root (sqrt) or 1 (none); auto: linear for sgd, sqrt "
      "for the others",
      "coupling=auto",
    ),
  ] = "auto"


COMMAND = Command(
  "critical_batch",
  """\
Measures the critical batch size at a checkpoint: branches train from it on the same samples with k
times its batch, and the largest batch whose loss ends within a tolerance of every smaller one is
reported (Merrill et al. 2025). Branches are runs beside RUN; the same command again continues them.
The configuration is RUN's own config.yml, or config=FILE; keys change it.
""",
  BranchArguments,
  "checkpoint=RUN [config=FILE]",
  leaves_files=True,
  before_threads=share_one_heap,
)


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be measured."""

  config: Config
  step_folder: pathlib.Path
  factors: tuple[Fraction, ...]
  options: BranchArguments


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _run)


def _run(arguments: Arguments[BranchArguments]) -> None:
  with refusing_together(arguments.configuration):
    measure(request_of(arguments))


def request_of(arguments: Arguments[BranchArguments]) -> Request:
  """Finds the checkpoint, and the configuration of the run that wrote it.

  Raises:
    UserError: a mistake in either.
  """
  own, rest = arguments.own, arguments.configuration
  for argument in rest:
    name = argument.partition("=")[0]
    if name in SET_HERE:
      instead = f"; the length of branches is {SET_HERE[name]}" if SET_HERE[name] else ""
      raise UserError(f"{argument}: branches set {name} themselves{instead}; leave it out")
  factors = _factors(own.factors)
  step_folder = find_checkpoint(own.checkpoint)
  config = config_of(step_folder, rest)
  check_supervised(config.rl)
  if purpose_of(config) is not Purpose.RUN:
    raise UserError(
      "validate_only and compile_only: branches are trained; leave both false, for example "
      "validate_only=false compile_only=false"
    )
  return Request(config, step_folder, factors, own)


def measure(request: Request) -> CriticalBatchReport | None:
  """Trains what is missing of the branches, reports, and returns the report; None if stopped.

  Of several processes, which all call it, the first looks at the branches' files and writes them.

  Raises:
    UserError: something in the request does not work.
    TrainingDivergedError: the smallest batch diverges.
  """
  # A branch has a log of each process; what is between them the first one says.
  with started(request.config, leaves_files=False), ending_together():
    experiment = _prepare(request)
    with removed_if_refused(experiment.folder):
      record_origin(experiment.folder, experiment.checkpoint)
      return _measured(request, experiment)


def _measured(request: Request, experiment: Experiment) -> CriticalBatchReport | None:
  _introduce(request, experiment)
  measured: list[Measured] = []
  for number, branch in enumerate(experiment.branching.branches, 1):
    count = len(experiment.branching.branches)
    print(f"\n=== Branch {branch.name}, {number} of {count}: {branch.batch:,} samples per step")
    one = train_branch(experiment, branch)
    if one is None:
      print(f"\nStopped in branch {branch.name}; the same command continues from there.")
      return None
    measured.append(one)
  return _conclude(request, experiment, measured)


def _factors(given: str) -> tuple[Fraction, ...]:
  """Returns at least two different positive numbers."""
  example = "for example factors=1,2,4,8"
  factors: list[Fraction] = []
  words = [word.strip() for word in given.strip("[]").split(",")]
  if len(words) > _MOST_FACTORS:
    raise UserError(
      f"factors: these are {len(words):,}, each a training run, of which there can be "
      f"{_MOST_FACTORS}; {example}"
    )
  for word in words:
    try:
      factors.append(exact_number(word))
    except ValueError:
      raise UserError(
        f"factors={shown(given)}: {shown(word)!r} is not a number; {example}"
      ) from None
  if min(factors) <= 0:
    raise UserError(f"factors={shown(given)}: {text(min(factors))} must be more than 0; {example}")
  if len(set(factors)) < max(2, len(factors)):
    raise UserError(f"factors={shown(given)} must be at least two different numbers; {example}")
  return tuple(factors)


def _prepare(request: Request) -> Experiment:
  """Plans all branches, so that what does not work is refused before any of them trains.

  Raises:
    UserError: a batch, a rate or a length does not work.
  """
  own = {key: str(value) for key, value in dataclasses.asdict(request.options).items()}
  check_alike(own | {"checkpoint": str(request.step_folder)})
  target = connected_devices(request.config)
  with sync_errors():
    checkpoint = read_checkpoint(request.step_folder)
  check_alike({f"checksum of {request.step_folder}": checkpoint.checksum})
  config = with_batch_of(request.config, checkpoint.plan, _changed(request), target.layout)
  config, _ = resolve_micro_batch_size(config, target)
  now = at_checkpoint(config, checkpoint, target.layout)
  base = BranchBase(now.phase, target.layout, config.batch.max_target_length)
  options = request.options
  wish = BranchRequest(request.factors, options.branch_tokens, options.smoothing)
  _tell_changes(now, checkpoint)
  coupling = options.coupling
  if coupling == "auto":
    # The rule of the optimizer's kind (Merrill et al. 2025, section 3.1).
    coupling = "linear" if config.optimizer.opt_type == "sgd" else "sqrt"
  experiment = Experiment(
    config=config,
    checkpoint=checkpoint,
    branching=plan_branches(base, wish),
    learning_rate=now.learning_rate,
    coupling=coupling,
    folder=_folder(config, checkpoint),
  )
  branches = [branch_config(experiment, branch) for branch in experiment.branching.branches]
  for branch in branches:
    check_plan(branch, plan_batches(branch.batch, branch.run, target.layout, branch.optimizer))
  # Refuses if the model's step cannot be split into microbatches. These are the same in all
  # branches, so that num_pipeline_microbatches of the largest serves all; the run's may be another.
  largest = PRETRAINING.resolve(branches[-1], target, Purpose.RUN)
  state = build_trainer(largest.config, largest.plan, target.devices).abstract
  with sync_errors():
    try:
      check_memory(largest.config, largest.plan, state, target.devices)
    except UserError as error:
      raise UserError(f"{error}\n(In the largest branch of factors={options.factors}.)") from error
  config = dataclasses.replace(config, pipeline=largest.config.pipeline)
  return dataclasses.replace(experiment, config=config)


def _changed(request: Request) -> set[str]:
  """Returns the keys that have other values than in the run."""
  now, written = to_flat_dict(request.config), RunFolder(request.step_folder.parent.parent).config
  before = to_flat_dict(load_config([f"config={written}"])) if written.exists() else {}
  return {key for key, value in now.items() if before.get(key) != value}


def _folder(config: Config, checkpoint: Checkpoint) -> pathlib.Path:
  """Returns a folder beside the run's; every checkpoint has its own."""
  own = RunFolder.of(config.run).path
  return own.with_name(f"{own.name}-critical_batch") / f"step-{checkpoint.position.step}"


def _tell_changes(now: AtCheckpoint, checkpoint: Checkpoint) -> None:
  """Says if the batch that is multiplied is not of the schedule the checkpoint was written under."""
  before, after = checkpoint.plan.get("batch_schedule"), now.plan.as_dict()["batch_schedule"]
  if before != after:
    print(
      f"Factor 1 is {now.phase.batch} samples by the configuration's batch schedule {after}; the "
      f"checkpoint was written under {before} ([from {now.plan.schedule.unit}, samples per step])"
    )


def _origin(experiment: Experiment) -> Origin:
  position, length = experiment.checkpoint.position, experiment.config.batch.max_target_length
  return Origin(
    folder=str(experiment.checkpoint.folder),
    step=position.step,
    samples=position.samples,
    tokens=position.samples * length,
    learning_rate=experiment.learning_rate,
  )


def _introduce(request: Request, experiment: Experiment) -> None:
  origin, branching = _origin(experiment), experiment.branching
  options, rule = request.options, experiment.coupling
  share, tokens = text(options.smoothing), f"{branching.window_tokens:,} tokens"
  micro_batch = f"microbatch {branching.micro_batch:,} samples"
  rows = [
    ("start", origin.folder),
    ("", f"{origin.samples:,} samples, {origin.tokens:,} tokens; rate {origin.learning_rate:.3g}"),
    ("branches", f"{branching.tokens:,} tokens each, the same samples; {micro_batch}"),
    ("rate", f"constant, {_RULES[rule]} (coupling={rule})"),
    ("judged", f"mean training loss of the last {tokens} (smoothing={share})"),
    ("", f"at most tolerance={options.tolerance:g} above every smaller batch"),
    ("folder", str(experiment.folder)),
  ]
  rates = [experiment.rate_of(branch) for branch in branching.branches]
  print("Critical batch size by branches (Merrill et al. 2025)\n")
  print("\n".join(f"  {name:<8}  {words}" for name, words in rows), end="\n\n")
  print(plan_table(branching, rates), flush=True)


def _conclude(
  request: Request, experiment: Experiment, measured: Sequence[Measured]
) -> CriticalBatchReport:
  """Prints the report and writes it beside the branches."""
  tolerance, window = request.options.tolerance, experiment.branching.window_blocks
  report = CriticalBatchReport(
    origin=_origin(experiment),
    branching=experiment.branching,
    coupling=experiment.coupling,
    tolerance=tolerance,
    judged=tuple(judge(measured, window, tolerance)),
  )
  print(f"\n=== After {report.branching.tokens:,} tokens each\n\n{report}\n")
  written = json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n"
  drawn = picture(title(report), critical_batch_charts(report))
  files = {"critical_batch.json": written.encode(), "critical_batch.html": drawn}
  for name, content in files.items():
    write_shared_file(experiment.folder / name, content)
  print(f"Written: {', '.join(str(experiment.folder / name) for name in files)}", flush=True)
  return report


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
