"""The modes of the training command: what is done before a run or instead of one, and what is refused."""

import datetime
import json
import pathlib
import re
from typing import Any

import jax
import pytest
from support import TINY, config, counted_plans
from test_coupling import FSDP, register

from maxbatch import train, train_rl
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import compile_step, step_cache
from maxbatch.compile.compile_step import compile_reports
from maxbatch.compile.measured_time import Timing
from maxbatch.modes.method import Purpose
from maxbatch.modes.prepare import purpose_of
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main
from maxbatch.training.build import build_trainer

KEYS = TINY | {
  "dataset_type": "synthetic",
  "base_num_decoder_layers": 1,
  "batch_size": 32,
  "steps": 3,
  "eval_samples": 8,
  "generate_length": 0,
  "enable_checkpointing": "false",
  "run_name": "run",
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> list[int]:
  """Passes of 16 samples are the fastest; lists the microbatches that are timed."""
  timed: list[int] = []

  def measure(trainer: Any, step: Any, shapes: Any, **_: Any) -> Timing:
    del trainer, step
    size = shapes.inputs.shape[1]
    timed.append(size)
    return Timing(1.0 if size == 16 else float(size), 0.0, 0.0, 3)

  monkeypatch.setattr(compile_step, "measure_step", measure)
  return timed


def command(folder: pathlib.Path, *options: str, **keys: object) -> list[str]:
  given = KEYS | {"base_output_directory": folder} | keys
  return ["config=base", *(f"{key}={value}" for key, value in given.items()), *options]


def losses(folder: pathlib.Path) -> list[tuple[float, float]]:
  """Loss and gradient norm of every step, as they are written."""
  records = [record for record in read_metrics(folder / "run") if "loss" in record]
  return [(record["loss"], record["grad_norm"]) for record in records]


def trained(folder: pathlib.Path, *options: str, **keys: object) -> list[tuple[float, float]]:
  assert main(command(folder, *options, **keys)) == 0
  result = losses(folder)
  assert len(result) == 3
  return result


# --- compile_only ---------------------------------------------------------------------------------


def test_compile_only_writes_the_report_and_trains_nothing(tmp_path, capsys):
  given = command(tmp_path, compile_only="true", micro_batch_size=2, enable_checkpointing="true")
  assert main(given) == 0
  folder = tmp_path / "run"
  assert sorted(path.name for path in folder.iterdir()) == [
    "compile_report.json",
    "compile_report.txt",
  ]
  text = (folder / "compile_report.txt").read_text()
  (report,) = json.loads((folder / "compile_report.json").read_text())
  assert report["micro_batch_to_train"] == 16
  assert report["gradient_accumulation_steps"] == 2
  assert report["time"] == {
    "how": "measured",
    "step_seconds": 2.0,
    "seconds_per_microbatch": 1.0,
    "seconds_rest": 0.0,
    "tokens_per_second": 256.0,
    "spread": 0.0,
  }
  out = capsys.readouterr().out
  assert out.startswith("Batch plan\n")
  assert text in out
  assert f"Written: {folder / 'compile_report.txt'}, {folder / 'compile_report.json'}" in out


def test_every_shape_of_a_run_has_its_report(tmp_path):
  schedule = {"batch_schedule": "[[0, 8], [16, 32]]", "batch_size": -1, "micro_batch_size": "none"}
  assert main(command(tmp_path, compile_only="true", **schedule)) == 0
  reports = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert [report["micro_batch_to_train"] for report in reports] == [8, 32]
  # What is known of the data is the same for all, and stands once.
  assert ["input_function" in report for report in reports] == [False, True]
  text = (tmp_path / "run" / "compile_report.txt").read_text()
  assert text.count("Input function\n") == 1
  assert "  loads: host 0, 32 rows per step\n" in text


def test_what_compiles_but_exceeds_the_budget_is_not_timed(tmp_path, clock, capsys):
  given = command(tmp_path, compile_only="true", micro_batch_size=2, device_memory_gb=0.0001)
  assert main(given) == 2
  said = capsys.readouterr()
  assert "of 0.10: DOES NOT FIT" in said.out
  assert re.match(
    r"error: per_device_batch_size=2: the step needs [\d,]+ bytes a device, which has 107,374 bytes; ",
    said.err,
  )
  assert "a device, which has 107,374 bytes; micro_batch_size=auto finds the largest" in said.err
  assert clock == []


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("keys", [{}, {"accumulation": "streamed"}, {"ici_fsdp_parallelism": 2}])
def test_the_report_is_of_the_program_that_training_runs(tmp_path, monkeypatch, keys):
  ran: list[str] = []
  compiled = step_cache.compiled_step

  def keep(*arguments: Any) -> Any:
    step: Any = compiled(*arguments)
    ran.append(step.as_text())
    return step

  monkeypatch.setattr(step_cache, "compiled_step", keep)
  trained(tmp_path, micro_batch_size=2, **keys)
  of = config(**KEYS | {"micro_batch_size": 2} | keys)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  trainer = build_trainer(of, plan, jax.devices())
  (report,) = compile_reports(of, plan, trainer, jax.devices())
  assert len(ran) == 1
  assert len(ran[0]) > 10_000
  assert without_places(report.program.text) == without_places(ran[0])


def without_places(program: str) -> str:
  """A program's text without the lines of code that its instructions come from."""
  instructions = program[program.index("\n%") :]
  return re.sub(r", metadata=\{[^}]*\}", "", instructions)


# --- explore --------------------------------------------------------------------------------------


def test_explore_ranks_every_size_and_reports_the_best(tmp_path, capsys):
  given = command(tmp_path, compile_only="true", micro_batch_size="{explore: {max: 8}}")
  assert main(given) == 0
  folder = tmp_path / "run"
  assert sorted(path.name for path in folder.iterdir()) == [
    "compile_report.json",
    "compile_report.txt",
    "exploration.json",
    "exploration.log",
  ]
  result = json.loads((folder / "exploration.json").read_text())
  assert result["recommended"] == "2"
  ranked = [one["micro_batch_size"] for one in result["fitting"]]
  assert ranked[0] == "2"
  assert sorted(ranked) == ["1", "2", "4", "8"]
  (report,) = json.loads((folder / "compile_report.json").read_text())
  assert report["per_device_batch_size"] == "2"
  out = capsys.readouterr().out
  assert re.search(
    r"INFO: Current recommended micro_batch_size: 2, measured performance: [\d.]+x base, "
    r"exploration progress: 100%",
    out,
  )
  log = (folder / "exploration.log").read_text().splitlines()
  interim = [line for line in log if "Current recommended micro_batch_size" in line]
  assert len(interim) == len(ranked)
  for line in interim:
    time, said = line.split(" INFO: ")
    assert datetime.datetime.fromisoformat(time).tzinfo is not None
    assert f"INFO: {said}" in out


def test_explore_ranks_the_batches_of_an_evaluation(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(compile_step, "measure_evaluation", slow_beyond(16))
  given = command(
    tmp_path, compile_only="true", eval_per_device_batch_size="explore", eval_samples=30
  )
  assert main(given) == 0
  result = json.loads((tmp_path / "run" / "exploration.json").read_text())
  assert result["recommended"] == "2"
  # Samples that count, without the padding of the last batch.
  tried = {
    one["eval_per_device_batch_size"]: (one["evaluation_batches"], one["evaluation_samples"])
    for one in result["fitting"]
  }
  assert tried == {"2": (2, 30), "1": (4, 30), "4": (1, 30)}
  speeds = [one["samples_per_second"] for one in result["fitting"]]
  assert speeds == pytest.approx([30 / 2, 30 / 4, 30 / 32])
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert report["title"].startswith("Compile report of evaluation: ")
  assert report["per_device_batch_size"] == "2"
  assert "Current recommended eval_per_device_batch_size: 2, measured" in capsys.readouterr().out


def slow_beyond(samples: int):
  """Evaluations of more samples take a second for each, others one."""

  def measure(trainer: Any, step: Any, shapes: Any) -> Timing:
    del trainer, step
    size = shapes.inputs.shape[0]
    return Timing(1.0 if size <= samples else float(size), 0.0, 0.0, 3)

  return measure


def test_auto_evaluates_what_training_s_batch_evaluates(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(compile_step, "measure_evaluation", slow_beyond(16))
  keys: dict[str, object] = {"eval_samples": 30, "steps": 1}
  given = {name: tmp_path / name for name in ("auto", "same")}
  assert main(command(given["auto"], eval_per_device_batch_size="auto", **keys)) == 0
  out = capsys.readouterr().out
  assert "eval_per_device_batch_size auto: 2 samples per device (" in out
  assert re.search(r"eval_batch +16 samples = 8 × eval_per_device_batch_size 2\n", out)
  assert main(command(given["same"], **keys)) == 0
  assert re.search(r"eval_batch +32 samples", capsys.readouterr().out)
  chosen, same = (
    [one["eval/loss"] for one in read_metrics(folder / "run") if "eval/loss" in one]
    for folder in given.values()
  )
  assert len(chosen) == 2
  assert chosen == pytest.approx(same, rel=1e-6)
  # A second start takes what is remembered.
  monkeypatch.setattr(compile_step, "measure_evaluation", None)
  again = command(
    tmp_path / "again", eval_per_device_batch_size="auto", compile_only="true", **keys
  )
  assert main(again) == 0
  assert "(remembered from " in capsys.readouterr().out


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
  (
    {"validate_only": "true", "compile_only": "true"},
    "validate_only=true and compile_only=true: only one can be set; validate_only=true takes "
    "seconds, "
    "so begin with it",
  ),
  (
    {"compile_topology": "v5e-4"},
    "compile_topology=v5e-4 names devices that this machine does not have, so nothing can run on them; "
    "compile for them with compile_only=true, or check with validate_only=true",
  ),
  (
    {"compiled_step": "a", "save_compiled_step": "b"},
    "compiled_step=a runs what was compiled before, and save_compiled_step asks for compiling; "
    "keep "
    'one of them, for example with compiled_step=""',
  ),
  (
    {"compiled_step": "a", "compile_only": "true"},
    "compiled_step=a runs what was compiled before, and compile_only or validate_only asks for "
    'compiling; keep one of them, for example with compiled_step=""',
  ),
  (
    {"compiled_step": "a", "validate_only": "true"},
    "compiled_step=a runs what was compiled before, and compile_only or validate_only asks for "
    'compiling; keep one of them, for example with compiled_step=""',
  ),
  (
    {"micro_batch_size": "explore"},
    "micro_batch_size=explore tries every size before it ranks them, and needs compile_only=true "
    "(now false); micro_batch_size=auto chooses one for a run",
  ),
  (
    {"eval_per_device_batch_size": "explore"},
    "eval_per_device_batch_size=explore tries every size before it ranks them, and needs "
    "compile_only=true (now false); eval_per_device_batch_size=auto chooses one for a run",
  ),
  (
    {
      "micro_batch_size": "explore",
      "eval_per_device_batch_size": "{explore: {max: 4}}",
      "compile_only": "true",
    },
    "micro_batch_size=explore eval_per_device_batch_size={explore: {min: 1, max: 4}}: the evaluation is "
    "tried beside a training whose microbatch is known; first eval_per_device_batch_size=0",
  ),
]


@pytest.mark.parametrize(("keys", "printed"), REFUSED, ids=["-".join(keys) for keys, _ in REFUSED])
def test_what_excludes_each_other_is_refused(tmp_path, capsys, keys, printed):
  assert main(command(tmp_path, **keys)) == 2
  assert capsys.readouterr().err == f"error: {printed}\n"
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("keys", "runs"),
  [
    ({}, True),
    ({"compiled_step": "a"}, True),
    ({"save_compiled_step": "a"}, True),
    ({"compile_only": "true", "save_compiled_step": "a"}, False),
    ({"compile_only": "true", "compile_topology": "v5e-4"}, False),
    ({"validate_only": "true", "compile_topology": "v5e-4"}, False),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_trains_and_what_does_not(keys, runs):
  assert (purpose_of(config(**keys)) is Purpose.RUN) is runs


# --- saved steps ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("how", ["training", "compile_only"])
def test_a_saved_step_trains_to_the_same_bits(tmp_path, monkeypatch, capsys, how):
  file = tmp_path / "step"
  keys = {"micro_batch_size": 2, "dropout_rate": 0.1}
  expected = trained(tmp_path / "compiled", **keys)
  saving = keys | {"save_compiled_step": file}
  if how == "training":
    assert trained(tmp_path / "saving", **saving) == expected
  else:
    assert main(command(tmp_path / "saving", **saving, compile_only="true")) == 0
  assert f"The compiled step is in {file}; compiled_step={file} runs it" in capsys.readouterr().out
  monkeypatch.setattr(step_cache, "compiled_step", lambda *_: pytest.fail("compiled"))
  assert trained(tmp_path / "loaded", **keys, compiled_step=file) == expected
  other = keys | {"micro_batch_size": 4, "compiled_step": file}
  assert main(command(tmp_path / "other", **other)) == 2
  printed = capsys.readouterr().err
  assert "micro_batch_to_train: the file has 16, this run 32" in printed
  assert not (tmp_path / "other").exists()


# --- auto -----------------------------------------------------------------------------------------


def test_auto_trains_what_the_number_by_hand_trains(tmp_path, capsys, clock):
  by_hand = trained(tmp_path / "hand", micro_batch_size=2)
  assert trained(tmp_path / "auto", micro_batch_size="auto") == by_hand
  said = capsys.readouterr().out
  assert "micro_batch_size auto: 2 samples per device (" in said
  assert "; remembered in " in said
  assert 16 in clock
  config_file = (tmp_path / "auto" / "run" / "config.yml").read_text()
  assert re.search(r"^micro_batch_size: '?2'?$", config_file, re.M)
  # The second start asks neither compiler nor clock.
  clock.clear()
  assert trained(tmp_path / "again", micro_batch_size="auto") == by_hand
  assert clock == []
  assert "; --retune measures again)" in capsys.readouterr().out
  # And --retune does.
  assert trained(tmp_path / "forgot", "--retune", micro_batch_size="auto") == by_hand
  assert 16 in clock
  assert "; remembered in " in capsys.readouterr().out


@pytest.mark.parametrize(
  "schedule",
  [
    {"batch_schedule": "[[0, 16], [100000, 32]]"},
    {"enable_rampup_batch_size": "true", "global_rampup_samples": 100000},
  ],
  ids=["listed", "ramp-up"],
)
def test_auto_with_a_schedule_that_ends_after_the_run(tmp_path, capsys, schedule):
  trained(tmp_path, micro_batch_size="auto", **schedule)
  assert "micro_batch_size auto: " in capsys.readouterr().out


def test_compile_only_with_auto_reports_the_choice(tmp_path, capsys):
  assert main(command(tmp_path, compile_only="true", micro_batch_size="auto")) == 0
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert report["per_device_batch_size"] == "2"
  assert "micro_batch_size auto: 2 samples per device (" in capsys.readouterr().out


# --- models that cannot be split ------------------------------------------------------------------


@pytest.fixture
def _batch_norm(monkeypatch):
  register(monkeypatch, "batch_norm")


@pytest.mark.usefixtures("_batch_norm")
def test_coupled_samples_are_trained_in_one_pass_with_a_warning(tmp_path, capsys, clock):
  keys = {"decoder_block": "batch_norm"} | FSDP
  result = trained(tmp_path / "auto", micro_batch_size="auto", **keys)
  printed = capsys.readouterr().err
  assert printed.startswith("warning: decoder_block=batch_norm couples the samples of a batch")
  assert "micro_batch_size=none instead of micro_batch_size=auto" in printed
  assert clock == []
  records = [record for record in read_metrics(tmp_path / "auto" / "run") if "loss" in record]
  assert {record["gradient_accumulation_steps"] for record in records} == {1}
  assert trained(tmp_path / "none", micro_batch_size="none", **keys) == result


@pytest.mark.usefixtures("_batch_norm")
def test_coupled_samples_in_several_passes_are_refused(tmp_path, capsys):
  keys = {"decoder_block": "batch_norm", "gradient_accumulation_steps": 2} | FSDP
  assert main(command(tmp_path, **keys)) == 2
  printed = capsys.readouterr().err
  assert printed.startswith("error: decoder_block=batch_norm couples the samples of a batch")
  assert printed.endswith(
    "but gradient_accumulation_steps=2 takes 2 microbatches; for example "
    "gradient_accumulation_steps=1\n"
  )
  assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_batch_norm")
def test_coupled_samples_leave_nothing_to_explore(tmp_path, capsys):
  keys = {"decoder_block": "batch_norm", "compile_only": "true", "micro_batch_size": "explore"}
  assert main(command(tmp_path, **keys, **FSDP)) == 2
  assert "error: micro_batch_size=explore: the model's samples depend on each other" in (
    capsys.readouterr().err
  )


@pytest.mark.parametrize("mode", [{"validate_only": "true"}, {"compile_only": "true"}, {}])
def test_a_start_plans_its_batches_once(tmp_path, monkeypatch, mode):
  plans = counted_plans(monkeypatch)
  assert main(command(tmp_path, **mode)) == 0
  assert len(plans) == 1


@pytest.mark.parametrize(
  ("command", "file"), [(train, "base"), (train_rl, "configs/post_train/rl.yml")]
)
def test_a_run_with_a_budget_and_no_size_begins_with_the_offer_to_choose(
  command, file, capsys, monkeypatch
):
  monkeypatch.setattr(command, "prepare_only", lambda *_, **more: print("prepared"))
  keys = [f"config={file}", "device_memory_gb=4"]
  # rl.yml gives a size.
  assert command.main([*keys, "micro_batch_size=-1", "validate_only=true", "steps=3"]) == 0
  first, *_, last = capsys.readouterr().out.splitlines()
  asked = f"{' '.join(keys)} steps=3 micro_batch_size=auto"
  module = command.__name__.removeprefix("maxbatch.")
  assert first == (
    f"Auto  no key gives the microbatch; the largest that fits and is fast takes: maxbatch {module} {asked}"
  )
  assert last == "prepared"
  assert command.main([*keys, "validate_only=true", "gradient_accumulation_steps=1"]) == 0
  assert "Auto" not in capsys.readouterr().out
  # Nothing is offered for a slice that there is none of.
  wrong = [*keys, "micro_batch_size=-1", "compile_topology=v5e-17", "validate_only=true"]
  assert command.main(wrong) == 2
  assert "Auto" not in capsys.readouterr().out
