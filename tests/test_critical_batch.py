"""The command on a tiny run: its branches are what they claim, it goes on, and it refuses clearly."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import statistics
from fractions import Fraction
from typing import Any

import pytest
from damage import flip_bits
from several_processes import records
from support import SMALLEST, stop_at

from maxbatch import critical_batch
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.command_line.arguments import parse
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.critical_batch import main
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.experiments import running
from maxbatch.experiments.branching import BranchBase, BranchRequest, plan_branches
from maxbatch.experiments.origin import Checkpoint
from maxbatch.experiments.running import Experiment, at_checkpoint, branch_config
from maxbatch.modes import pretraining
from maxbatch.modes.run import run
from maxbatch.noise.controller import check_noise, measures_noise
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training import build
from maxbatch.tuning.search import ProbeResult

START, STEPS = 4, 8
"""The checkpoint's step, and those of the smallest branch."""
TOKENS = STEPS * 8 * 16
"""Of a branch: samples of 16 tokens, 8 in a step."""
BRANCHES = ("factors=1,2", f"branch_tokens={TOKENS}", "smoothing=1", "checkpoint_period=100")


def train(folder: pathlib.Path, **keys: object) -> None:
  text = folder / "words.txt"
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  defaults = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": folder / "cache",
    "eval_samples": 16,
    "eval_interval": -1,
    "checkpoint_period": 2,
    "max_num_checkpoints_to_keep": 10,
    "generate_length": 0,
    "per_device_batch_size": 1,
    **SMALLEST,
    "dropout_rate": 0.1,
    "run_name": "mine",
  }
  run(load_config(["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]))


@pytest.fixture(scope="module")
def cosine(tmp_path_factory) -> pathlib.Path:
  """A run of 8 steps whose rate falls, and which measures the noise scale."""
  folder = tmp_path_factory.mktemp("cosine")
  train(folder, steps=8, gns="norm")
  return folder


@pytest.fixture(scope="module")
def constant(tmp_path_factory) -> pathlib.Path:
  """A run of 12 steps at one rate."""
  folder = tmp_path_factory.mktemp("constant")
  rate = {"lr_schedule_type": "constant", "warmup_steps": 0, "learning_rate_batch_coupling": "none"}
  train(folder, steps=START + STEPS, checkpoint_period=START, **rate)
  return folder


def place(folder: pathlib.Path, step: int = START, name: str = "mine") -> pathlib.Path:
  return folder / f"{name}-critical_batch" / f"step-{step}"


def measure(folder: pathlib.Path, *arguments: str, name: str = "mine") -> dict[str, Any]:
  """Runs the command from step 4 under a run_name; what it wrote."""
  checkpoint = folder / "mine" / "checkpoints" / str(START)
  assert main([f"checkpoint={checkpoint}", f"run_name={name}", *BRANCHES, *arguments]) == 0
  return json.loads((place(folder, name=name) / "critical_batch.json").read_text())


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  capsys.readouterr()
  assert main(list(arguments)) == 2
  printed = capsys.readouterr()
  assert "Traceback" not in printed.err + printed.out
  assert printed.err.startswith("error: ")
  return printed.err.removeprefix("error: ").strip()


def checkpoint_files(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
  step = folder / "mine" / "checkpoints" / str(START)
  return {path: path.read_bytes() for path in step.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def files_before(cosine) -> dict[pathlib.Path, bytes]:
  """The checkpoint's files before any branch started from it."""
  return checkpoint_files(cosine)


@pytest.fixture(scope="module")
def measured(cosine, files_before) -> dict[str, Any]:
  del files_before
  return measure(cosine)


def test_batches_rates_steps_and_tokens_are_what_the_table_says(cosine, measured):
  rate = next(one for one in records(cosine / "mine") if one["step"] == START + 1)["learning_rate"]
  assert measured["checkpoint"]["learning_rate"] == rate
  assert [one["factor"] for one in measured["branches"]] == [1, 2]
  for one, factor in zip(measured["branches"], (1, 2), strict=True):
    trained = records(place(cosine) / f"x{factor}")
    assert {record["global_batch_to_train"] for record in trained} == {one["batch"]} == {8 * factor}
    assert {record["micro_batch_to_train"] for record in trained} == {8}
    rates = {record["learning_rate"] for record in trained}
    assert rates == {one["learning_rate"]} == {rate * factor**0.5}
    assert len(trained) == one["steps"] == STEPS // factor
    assert trained[0]["samples"] == START * 8 + 8 * factor
    assert trained[-1]["tokens"] == START * 8 * 16 + TOKENS
    losses = [record["loss"] for record in trained]
    assert one["loss"] == pytest.approx(statistics.fmean(losses))
    assert one["eval_loss"] == trained[-1]["eval/loss"]


def test_factor_one_goes_on_exactly_as_the_run_did(constant, monkeypatch):
  """Same state, same samples, same dropout: bit by bit what came after the checkpoint."""
  monkeypatch.setattr(running, "run", diverge_at_2)
  result = measure(constant)
  expected = [one for one in records(constant / "mine") if one["step"] > START]
  for mine, its in zip(records(place(constant) / "x1"), expected, strict=True):
    assert {key: mine[key] for key in its} == its
  assert result["checkpoint"]["learning_rate"] == 3e-3


def test_every_branch_sees_the_same_samples(constant):
  """With a rate that moves nothing, the loss of a step is the mean of the small steps it covers."""
  result = measure(constant, "learning_rate=1e-30", name="still")
  small = [one["loss"] for one in records(place(constant, name="still") / "x1")]
  large = [one["loss"] for one in records(place(constant, name="still") / "x2")]
  groups = zip(small[::2], small[1::2], strict=True)
  assert large == pytest.approx([statistics.fmean(group) for group in groups], rel=1e-5)
  assert result["critical_batch_at_least"] == 16
  assert result["conclusion"][0].startswith(
    "The critical batch is at least 16 samples (256 tokens)"
  )


def test_branches_of_muon_and_experts_go_on_as_the_run_did_with_the_step_it_traced(
  tmp_path, monkeypatch
):
  """Their rates differ, and those are an input of the step."""
  traced: list[object] = []
  step_function = build.step_function
  monkeypatch.setattr(build, "step_function", lambda *x: traced.append(x) or step_function(*x))
  rate = {"lr_schedule_type": "constant", "warmup_steps": 0, "max_target_length": 24}
  experts = {"opt_type": "muon", "num_experts": 2, "base_moe_mlp_dim": 16, "routed_bias": True}
  train(tmp_path, steps=START + STEPS, checkpoint_period=START, **rate, **experts)
  result = measure(tmp_path, f"branch_tokens={STEPS * 8 * 24}")
  assert [one["learning_rate"] for one in result["branches"]] == [3e-3, 3e-3 * 2**0.5]
  assert len(traced) == 1
  expected = [one for one in records(tmp_path / "mine") if one["step"] > START]
  for mine, its in zip(records(place(tmp_path) / "x1"), expected, strict=True):
    assert {key: mine[key] for key in its} == its


def test_once_more_trains_nothing(cosine, measured, monkeypatch, capsys):
  def refuse(*_: object) -> None:
    raise AssertionError("a finished branch was run again")

  monkeypatch.setattr(running, "run", refuse)
  assert measure(cosine) == measured
  assert capsys.readouterr().out.count("Finished before.") == 2


def test_stopped_in_a_branch_it_goes_on_there_and_then_with_more_tokens(
  cosine, measured, monkeypatch, capsys
):
  checkpoint, folder = cosine / "mine" / "checkpoints" / str(START), place(cosine, name="stopped")
  with monkeypatch.context() as patch:
    stop_at(patch, 3)
    assert main([f"checkpoint={checkpoint}", "run_name=stopped", *BRANCHES]) == 0
  printed = capsys.readouterr().out
  assert "Stopped in branch x1; the same command continues from there." in printed
  assert len(records(folder / "x1")) == 3
  assert not (folder / "x2").exists()

  resumed = measure(cosine, name="stopped")
  printed += capsys.readouterr().out
  assert f"Resuming after step {START + 3}" in printed
  # Branches have their length from branch_tokens, and refuse the keys that a run may go on with.
  assert not any(advice in printed for advice in ("steps=", "Next:", "resume:", "budget"))
  losses = [one["loss"] for one in records(place(cosine) / "x1")]
  assert [one["loss"] for one in records(folder / "x1")] == losses
  assert [one["loss"] for one in resumed["branches"]] == [
    one["loss"] for one in measured["branches"]
  ]

  longer = measure(cosine, f"branch_tokens={2 * TOKENS}", name="stopped")
  trained = [one["loss"] for one in records(folder / "x1")]
  assert trained[:STEPS] == losses
  assert len(trained) == longer["branches"][0]["steps"] == 2 * STEPS
  assert len(records(folder / "x2")) == longer["branches"][1]["steps"] == STEPS

  monkeypatch.setattr(running, "run", None)
  shorter = measure(cosine, name="stopped")
  assert shorter["branches"][1]["loss"] == resumed["branches"][1]["loss"]


def diverge_at_2(config: Config, **keys: Any) -> Any:
  """A run, unless it is branch x2."""
  if config.run.run_name == "x2":
    raise TrainingDivergedError("step 6: loss=nan")
  return run(config, **keys)


def test_a_branch_that_diverges_is_a_result_and_stays_one(cosine, monkeypatch, capsys):
  monkeypatch.setattr(running, "run", diverge_at_2)
  result = measure(cosine, name="diverging")
  assert [one["diverged"] for one in result["branches"]] == [False, True]
  assert result["branches"][1]["loss"] is None
  assert "Branch x2 diverged: step 6: loss=nan" in capsys.readouterr().out
  monkeypatch.setattr(running, "run", None)
  assert measure(cosine, name="diverging") == result


def test_nothing_can_be_compared_with_a_smallest_branch_that_diverges(cosine, monkeypatch, capsys):
  def diverge(*_: object, **__: object) -> None:
    raise TrainingDivergedError("step 6: loss=nan")

  monkeypatch.setattr(running, "run", diverge)
  checkpoint = cosine / "mine" / "checkpoints" / str(START)
  assert main([f"checkpoint={checkpoint}", "run_name=lost", *BRANCHES]) == 3
  assert capsys.readouterr().err == "stopped: step 6: loss=nan\n"


def test_a_run_s_folder_means_its_newest_checkpoint(cosine, monkeypatch, capsys):
  def refuse(config: Config, **_: object) -> None:
    forked.extend(RunFolder.of(config.run).checkpoints.glob("*/record"))
    enough()

  forked: list[pathlib.Path] = []
  monkeypatch.setattr(running, "run", refuse)
  assert main([f"checkpoint={cosine / 'mine'}"]) == 2
  assert forked == [place(cosine, 8) / "x1" / "checkpoints" / "8" / "record"]
  # A branch that is refused before it trains leaves nothing.
  assert not place(cosine, 8).exists()
  printed = capsys.readouterr().out
  assert f"  start     {cosine}/mine/checkpoints/8\n" in printed
  # The rate of a run that is over is the last of its schedule.
  assert "            64 samples, 1,024 tokens; rate 0.0003\n" in printed


PIPELINE = (
  "ici_pipeline_parallelism=2",
  "base_num_decoder_layers=2",
  "pipeline_schedule=1f1b",
  "per_device_batch_size=4",
)
"""8 samples for a group of devices, in microbatches of 2, 4 or 8; half as many in 2 or 4."""


@pytest.mark.parametrize(("factors", "choices"), [("1,2", (2, 4, 8)), ("1/2,1", (2, 4))])
def test_all_branches_take_the_microbatch_chosen_for_the_largest(
  cosine, tmp_path, monkeypatch, factors, choices
):
  shutil.copytree(cosine / "mine", tmp_path / "mine")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  asked: list[int] = []

  class Prober:
    def __init__(self, config, *_):
      self.batch = config.batch.batch_size

    def __call__(self, num_pipeline_microbatches):
      asked.append(self.batch)
      assert num_pipeline_microbatches in choices
      return ProbeResult(1, 2, True, 1.0 if num_pipeline_microbatches == max(choices) else 2.0)

  monkeypatch.setattr(pretraining, "PipelineMicrobatchProber", Prober)
  checkpoint = tmp_path / "mine" / "checkpoints" / str(START)
  arguments = [f"checkpoint={checkpoint}", f"factors={factors}", *PIPELINE]
  experiment = critical_batch._prepare(
    critical_batch.request_of(parse(critical_batch.COMMAND, arguments))
  )
  branches = [branch_config(experiment, one) for one in experiment.branching.branches]
  assert {one.pipeline.num_pipeline_microbatches for one in branches} == {max(choices)}
  assert set(asked) == {branches[-1].batch.batch_size}


def test_a_number_that_cannot_cut_the_branches_is_refused_before_any_trains(
  cosine, tmp_path, capsys
):
  shutil.copytree(cosine / "mine", tmp_path / "mine")
  checkpoint = tmp_path / "mine" / "checkpoints" / str(START)
  eight = "num_pipeline_microbatches=8"
  printed = error(capsys, f"checkpoint={checkpoint}", "factors=1/2,1", *PIPELINE, eight)
  assert printed.startswith(
    f"{eight} must divide the 4 samples of one microbatch in each of 4 groups"
  )
  assert not place(tmp_path).exists()


def test_the_checkpoint_stays_as_it_was(cosine, files_before, measured):
  del measured
  assert files_before
  assert checkpoint_files(cosine) == files_before
  # The branch has dropped its copy for its own last checkpoint.
  assert [path.name for path in (place(cosine) / "x2" / "checkpoints").glob("[0-9]*")] == ["8"]


def enough(*_: object, **__: object) -> None:
  raise UserError("enough")


@pytest.mark.parametrize(
  ("arguments", "rates"),
  [
    (["coupling=linear"], ["0.003", "0.006", "0.012"]),
    (["coupling=none"], ["0.003", "0.003", "0.003"]),
    ([], ["0.003", "0.00424", "0.006"]),
    (["opt_type=sgd"], ["0.003", "0.006", "0.012"]),
    (["opt_type=muon"], ["0.003", "0.00424", "0.006"]),
  ],
)
def test_the_rate_follows_the_batch_as_asked(constant, monkeypatch, capsys, arguments, rates):
  monkeypatch.setattr(running, "run", enough)
  checkpoint = constant / "mine" / "checkpoints" / str(START)
  more = ["factors=1,2,4", "branch_tokens=2048", *arguments]
  assert main([f"checkpoint={checkpoint}", "run_name=rates", *BRANCHES, *more]) == 2
  printed = capsys.readouterr()
  assert printed.err.startswith("error: enough\n")
  table = printed.out.partition("learning rate  steps\n")[2].splitlines()[:3]
  assert [line.split()[3] for line in table] == rates


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      [],
      "checkpoint=: it has no value; name a run's folder, for its newest checkpoint, or one of its "
      "steps; for example checkpoint=runs/first_run or checkpoint=runs/first_run/checkpoints/200",
    ),
    (
      ["checkpoint=/no/where"],
      "checkpoint=/no/where: there is no such folder; name a run's folder, for its newest "
      "checkpoint, or one of its steps; for example checkpoint=runs/first_run or "
      "checkpoint=runs/first_run/checkpoints/200",
    ),
    (
      ["checkpoint={folder}"],
      "checkpoint={folder}: that is not a run's folder; name a run's folder, for its newest "
      "checkpoint, or one of its steps; for example checkpoint=runs/first_run or "
      "checkpoint=runs/first_run/checkpoints/200",
    ),
    (
      ["checkpoint={folder}/mine/checkpoints/3"],
      "checkpoint={folder}/mine/checkpoints/3: there is no checkpoint of that step; there are 2, "
      "4, 6, 8",
    ),
    (
      ["factors=1,two"],
      "factors=1,two: 'two' is not a number; for example factors=1,2,4,8",
    ),
    (
      ["factors=1," + "9" * 5000],
      f"factors=1,{'9' * 95}...: '{'9' * 97}...' is not a number; for example factors=1,2,4,8",
    ),
    (
      ["factors=" + ",".join(map(str, range(1, 3001)))],
      "factors: these are 3,000, each a training run, of which there can be 100; for example "
      "factors=1,2,4,8",
    ),
    (
      ["checkpoint={folder}/mine", "factors=1,1e20"],
      f"factors: {10**20} × batch 8 is {8 * 10**20} samples, and a step has at most "
      "1,099,511,627,776; for example factors=1,2,4,8",
    ),
    (
      ["factors=1,-2"],
      "factors=1,-2: -2 must be more than 0; for example factors=1,2,4,8",
    ),
    (
      ["factors=2"],
      "factors=2 must be at least two different numbers; for example factors=1,2,4,8",
    ),
    (
      ["factors=1,2,2"],
      "factors=1,2,2 must be at least two different numbers; for example factors=1,2,4,8",
    ),
    (
      ["checkpoint={folder}/mine", "factors=0.5,1"],
      "factors: 0.5 × batch 8 is 4 samples, which must be a positive multiple of the 8 "
      "data-parallel groups (data 8 × fsdp 1); nearest: factor 1",
    ),
    (
      ["checkpoint={folder}/mine", "branch_tokens=1000"],
      "branch_tokens=1000 is too few: 0.977 times 1024 tokens (a step of 64 samples), and the "
      "last smoothing=0.25 of a branch, which is judged, needs 4; the smallest that works: "
      "branch_tokens=16384, less with smaller factors",
    ),
    (
      ["branch_tokens=many"],
      "command line: branch_tokens=many: branch_tokens must be a whole number, at least 1, or -1. "
      "A value that works: branch_tokens=1",
    ),
    (
      ["smoothing=2"],
      "command line: smoothing=2: smoothing must be at least 0.01 and at most 1. The nearest value "
      "that works: smoothing=1",
    ),
    (
      ["tolerance=-1"],
      "command line: tolerance=-1: tolerance must be at least 0. The nearest value that works: "
      "tolerance=0",
    ),
    (
      ["coupling=root"],
      "command line: coupling=root: coupling must be one of auto, none, sqrt, linear. A value that "
      "works: coupling=auto",
    ),
    (
      ["factor=1,2"],
      "command line: there is no key 'factor'. Did you mean factors? --help all lists every key.",
    ),
    (
      ["checkpoint={folder}/mine", "--json"],
      "--json: options have no dashes; write json=...",
    ),
    (
      ["checkpoint={folder}/mine", "steps=100"],
      "steps=100: branches set steps themselves; the length of branches is branch_tokens; leave it "
      "out",
    ),
    (
      ["checkpoint={folder}/mine", "eval_interval=5"],
      "eval_interval=5: branches set eval_interval themselves; leave it out",
    ),
    (
      ["checkpoint={folder}/mine", "compile_only=true"],
      "validate_only and compile_only: branches are trained; leave both false, for example "
      "validate_only=false compile_only=false",
    ),
    (
      ["checkpoint={folder}/mine/checkpoints/8", "learning_rate_final_fraction=0"],
      "checkpoint={folder}/mine/checkpoints/8: the learning rate after step 8 is 0 "
      "(lr_schedule_type=cosine), so no branch would learn; take an earlier checkpoint, "
      "or set a learning rate, for example lr_schedule_type=constant warmup_steps=0 "
      "learning_rate=1e-3",
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_refused_before_anything_trains(
  cosine, capsys, monkeypatch, arguments, message
):
  monkeypatch.setattr(running, "run", None)
  given = [argument.format(folder=cosine) for argument in arguments]
  assert error(capsys, *given) == message.format(folder=cosine)


def test_a_batch_that_no_device_holds_is_refused_before_any_branch_trains(
  cosine, capsys, monkeypatch
):
  monkeypatch.setattr(running, "run", None)
  keys = [f"checkpoint={cosine / 'mine'}", "factors=1,1000000000", "run_name=huge"]
  assert "a device needs at least" in error(capsys, *keys)
  assert not place(cosine, name="huge").exists()


def test_a_branch_that_was_trained_otherwise_is_not_taken_for_this_one(cosine, measured, capsys):
  del measured
  folder = place(cosine) / "x2"
  checkpoint = cosine / "mine" / "checkpoints" / str(START)
  message = error(capsys, f"checkpoint={checkpoint}", *BRANCHES, "coupling=none")
  rate = load_config([f"config={folder / 'config.yml'}"]).optimizer.learning_rate
  assert message == (
    f"{folder} holds a branch trained with other settings:\n"
    f"  learning_rate is {rate} there and {rate / 2**0.5} now\n"
    "Remove that folder, or choose another run_name for new branches."
  )
  message = error(capsys, f"checkpoint={checkpoint}", *BRANCHES, "dataset_path=stdlib")
  assert "dataset_path is" in message
  twice = ["gradient_accumulation_steps=2", "branch_tokens=4096"]
  message = error(capsys, f"checkpoint={checkpoint}", *BRANCHES, *twice)
  assert "  batch_size is 8 there and 16 now\n" in message


def test_branches_of_another_checkpoint_of_that_step_are_not_gone_on_with(
  cosine, measured, constant, capsys, tmp_path
):
  del measured
  shutil.copytree(cosine / "mine-critical_batch", tmp_path / "mine-critical_batch")
  shutil.copytree(constant / "mine", tmp_path / "mine")
  message = error(capsys, f"checkpoint={tmp_path}/mine/checkpoints/{START}", *BRANCHES)
  assert message == (
    f"the branches in {place(tmp_path)} come from another checkpoint of step {START} than "
    f"{tmp_path}/mine/checkpoints/{START} is now; remove that folder, or choose another run_name "
    "for new branches"
  )


def test_a_damaged_checkpoint_is_refused(cosine, capsys, tmp_path):
  shutil.copytree(cosine / "mine", tmp_path / "mine")
  step = tmp_path / "mine" / "checkpoints" / str(START)
  flip_bits(step)
  message = error(capsys, f"checkpoint={step}", *BRANCHES)
  assert message.startswith("No checkpoint in ")
  assert message.endswith(f"(In branch x1, which starts as a copy of {step}.)")
  record = step / "record" / "metadata"
  record.write_text(record.read_text().replace('"samples": 32', '"samples": 40'))
  assert error(capsys, f"checkpoint={step}", *BRANCHES) == (
    f"checkpoint={step} is damaged (its record is not the one written); take another, for example "
    f"checkpoint={tmp_path}/mine/checkpoints/8"
  )
  record.unlink()
  assert error(capsys, f"checkpoint={step}", *BRANCHES).startswith(
    f"checkpoint={step} is damaged ("
  )


def test_a_folder_that_cannot_be_written_to_is_named(cosine, capsys):
  keys = [f"checkpoint={cosine / 'mine'}", "base_output_directory=/proc/nowhere"]
  assert error(capsys, *keys) == (
    "/proc/nowhere/mine-critical_batch/step-8/origin.json cannot be written (No such file or "
    "directory); make room there, or choose another folder, for example base_output_directory=runs"
  )


INTRODUCTION = """\
Critical batch size by branches (Merrill et al. 2025)

  start     {folder}/mine/checkpoints/8
            64 samples, 1,024 tokens; rate 0.0003
  branches  4,096 tokens each, the same samples; microbatch 8 samples
  rate      constant, times the root of the factor (coupling=sqrt)
  judged    mean training loss of the last 2,048 tokens (smoothing=0.5)
            at most tolerance=0.02 above every smaller batch
  folder    {folder}/mine-critical_batch/step-8

  factor  batch  tokens/step  learning rate  steps
       1      8          128         0.0003     32
       4     32          512         0.0006      8

=== Branch x1, 1 of 2: 8 samples per step
"""


def test_what_is_compared_is_said_first(cosine, monkeypatch, capsys):
  monkeypatch.setattr(running, "run", enough)
  keys = ["factors=4,1", "branch_tokens=4096", "smoothing=0.5", "tolerance=0.02"]
  assert main([f"checkpoint={cosine / 'mine'}", *keys]) == 2
  expected = INTRODUCTION.format(folder=cosine)
  assert capsys.readouterr().out == expected


def test_without_its_config_a_checkpoint_needs_one(cosine, capsys, tmp_path):
  shutil.copytree(cosine / "mine" / "checkpoints", tmp_path / "mine" / "checkpoints")
  assert error(capsys, f"checkpoint={tmp_path / 'mine'}") == (
    f"checkpoint={tmp_path}/mine/checkpoints/8: there is no {tmp_path}/mine/config.yml to tell how "
    "the run was configured; give its configuration, for example config=my.yml"
  )


RAMP_PER_DEVICE = ("per_device_batch_size_increment=0.5", "gradient_accumulation_steps=4")


def checkpoint_at(step: int, samples: int) -> Checkpoint:
  return Checkpoint(pathlib.Path(str(step)), Position(step, samples), {}, "")


@pytest.mark.parametrize(
  ("keys", "at", "batch", "micro_batch"),
  [
    # In the middle of a ramp, at its second batch; and where that has a microbatch of its own.
    (["batch_schedule=[[0,16],[160,32],[320,64]]", "micro_batch_size=2"], (13, 224), 32, 16),
    (["batch_schedule=[[0,16],[160,24],[304,64]]", "micro_batch_size=2"], (11, 184), 24, 8),
    # Complete; and one step before the end, which the budget would cut to 16 samples.
    (["batch_size=32", "steps=10", "micro_batch_size=2"], (10, 320), 32, 16),
    (["batch_size=32", "steps=-1", "total_samples=336", "micro_batch_size=2"], (10, 320), 32, 16),
  ],
)
def test_the_batch_in_force_at_the_checkpoint(keys, at, batch, micro_batch):
  config = load_config(["config=base", "lr_schedule_type=constant", "warmup_steps=0", *keys])
  result = at_checkpoint(config, checkpoint_at(*at), topology(config.mesh, 8))
  assert (result.phase.batch, result.phase.micro_batch) == (batch, micro_batch)
  assert result.learning_rate == config.optimizer.learning_rate


def test_a_run_that_the_noise_scale_steers_has_the_batch_it_had_decided_on():
  keys = [
    "batch_schedule=gns",
    "gns=norm",
    "steps=-1",
    "total_samples=6400",
    "lr_schedule_type=wsd",
  ]
  keys += ["batch_size=32", "micro_batch_size=2", "schedule_unit=samples", "warmup_steps=0"]
  config = load_config(["config=base", *keys])
  decided = {"batch_schedule": [["0", 32], ["640", 64]]}
  checkpoint = dataclasses.replace(checkpoint_at(25, 960), plan=decided)
  result = at_checkpoint(config, checkpoint, topology(config.mesh, 8))
  assert (result.phase.batch, result.phase.micro_batch) == (64, 16)
  assert result.learning_rate == config.optimizer.learning_rate * 2**0.5
  assert result.plan.as_dict()["batch_schedule"] == decided["batch_schedule"]
  dry = load_config(["config=base", *keys, "gns_dry_run=true"])
  assert at_checkpoint(dry, checkpoint, topology(dry.mesh, 8)).phase.batch == 32


def test_the_rate_at_the_checkpoint_is_that_of_the_whole_run_s_schedule():
  keys = [
    "lr_schedule_type=linear",
    "warmup_steps=0",
    "steps=100",
    "learning_rate_final_fraction=0",
  ]
  config = load_config(["config=base", *keys, "learning_rate=1.0"])
  result = at_checkpoint(config, checkpoint_at(25, 800), topology(config.mesh, 8))
  assert result.learning_rate == pytest.approx(0.75)


@pytest.mark.parametrize(
  "ramp",
  [
    ["batch_schedule_type=doubling", "batch_size_start=16", "batch_schedule_length=600"],
    ["batch_schedule=[[0,16],[100,64]]"],
    ["batch_schedule_type=linear", "batch_size_start=16", "batch_schedule_length=600"],
    ["enable_rampup_batch_size=true", "per_device_batch_size_start=0.5", *RAMP_PER_DEVICE],
  ],
)
def test_a_branch_s_batch_and_rate_are_the_same_throughout_whatever_the_run_s_were(ramp):
  rates = ["learning_rate_batch_coupling=sqrt", "warmup_steps=-1", "warmup_steps_fraction=0.5"]
  noise = ["gns=all", "gns_from_microbatches=true", "gns_dry_run=true"]
  keys = ["batch_size=64", "micro_batch_size=2", *noise, *ramp, *rates]
  config = load_config(["config=base", *keys])
  checkpoint, layout = checkpoint_at(1, 16), topology(config.mesh, 8)
  now = at_checkpoint(config, checkpoint, layout)
  wish = BranchRequest((Fraction(1), Fraction(2)), -1, Fraction(1, 4))
  branching = plan_branches(BranchBase(now.phase, layout, 128), wish)
  experiment = Experiment(config, checkpoint, branching, 0.5, "linear", pathlib.Path("here"))
  result = branch_config(experiment, branching.branches[1])
  plan = plan_batches(result.batch, result.run, layout).starting_at(checkpoint.position)
  rate = learning_rate(result.optimizer, plan, result.run.schedule_unit)
  assert [(phase.batch, phase.num_steps) for phase in plan.phases] == [(32, 40)]
  assert {rate(Position(step, 16 + 32 * (step - 1))) for step in range(1, 41)} == {1.0}
  assert plan.end() == Position(41, 16 + 40 * 32)
  assert (result.run.eval_interval, result.run.generate_length) == (-1, 0)
  assert not measures_noise(result.noise)
  check_noise(result, plan)


def test_another_batch_than_the_checkpoint_was_written_under_is_said(cosine, capsys, monkeypatch):
  monkeypatch.setattr(running, "run", None)
  checkpoint = cosine / "mine" / "checkpoints" / str(START)
  given = [f"checkpoint={checkpoint}", "gradient_accumulation_steps=2", "branch_tokens=16"]
  assert main(given) == 2
  assert capsys.readouterr().out == (
    "Factor 1 is 16 samples by the configuration's batch schedule [['0', 16]]; the checkpoint was "
    "written under [['0', 8]] ([from samples, samples per step])\n"
  )


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_has_the_command_s_keys_and_all_others(word, capsys):
  assert main([word]) == 0
  printed = capsys.readouterr().out
  for key in critical_batch.BranchArguments.__dataclass_fields__:
    assert f"  {key}=" in printed
  assert max(map(len, printed.splitlines())) <= 100
  assert main([word, "optimizer"]) == 0
  assert "  adam_b2=0.95" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_outside_the_steps_ends_with_a_sentence(cosine, monkeypatch, capsys, number, code):
  monkeypatch.setattr(
    critical_batch, "resolve_micro_batch_size", lambda *_: os.kill(os.getpid(), number)
  )
  assert main([f"checkpoint={cosine / 'mine'}"]) == code
  assert capsys.readouterr().err == "interrupted; what was saved before is kept\n"
