"""The pipeline command as people call it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxbatch.pipeline import main
from maxbatch.plan import main as plan

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["ici_pipeline_parallelism=4", "gradient_accumulation_steps=2", "pipeline_schedule=1f1b"]


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert main(["config=base", *arguments]) == 0
  return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert main(["config=base", *arguments]) == 2
  printed = capsys.readouterr()
  assert printed.out == ""
  return printed.err.removeprefix("error: ").strip()


PRINTED = """\
Pipeline  1f1b
  stages        ici_pipeline_parallelism 4 × dcn_pipeline_parallelism 1 = 4
  layers        4 stages × num_pipeline_repeats 1 × num_layers_per_pipeline_stage 2 = 8
  microbatches  num_pipeline_microbatches 4 × gradient_accumulation_steps 2 = 8 per step, of 4 samples in each of 2 groups of devices
  ticks         14, each with at most one forward and one backward per stage
  bubble        3/11 = 27.3% idle; 42.9% with a pipeline for each gradient accumulation step
  inputs kept   7 slots on every stage, 1.75 MiB a device; at most 7 5 3 1 in use on stages 0 to 3
  gradients     1 slot on every stage, 0.25 MiB a device; at most 1 1 1 1 in use on stages 0 to 3
  imbalance     0%: all stages have as many layers and compute an equal share of the logits; 4.7% if the last stage computed them alone

Schedules
  pipeline_schedule  repeats  layers each  microbatches  bubble   inputs kept  layer activations
  gpipe                    1            2             8   27.3%  8 × 0.25 MiB              16
  circular                 2            1             8   15.8%  16 × 0.25 MiB             16
  1f1b (this)              1            2             8   27.3%  7 × 0.25 MiB              14
  interleaved_1f1b         2            1             8   15.8%  11 × 0.25 MiB             11
"""


def test_what_is_printed(capsys):
  text = show(capsys, *KEYS, "base_num_decoder_layers=8")
  same = [" ".join(line.split()) for line in PRINTED.splitlines()]
  assert [" ".join(line.split()) for line in text.splitlines()][: len(same)] == same
  assert "\nstage 3  F  ·  ·  ·  0  1  2  3  4  5  6  7  ·  ·  ·\n" in text
  assert "\nNothing here is measured" in text


def test_the_bytes_of_an_input(capsys):
  keys = [*KEYS, "num_pipeline_microbatches=16", "base_emb_dim=1024", "max_target_length=1024"]
  assert "7 slots on every stage, 28 MiB a device" in show(capsys, *keys)
  assert "7 slots on every stage, 14 MiB a device" in show(capsys, *keys, "dtype=bfloat16")


def test_the_choices_of_microbatches(capsys):
  lines = show(capsys, *KEYS, "num_pipeline_microbatches=8").splitlines()
  at = lines.index("Microbatches, for 1f1b")
  assert [line.split() for line in lines[at + 2 : at + 5]] == [
    ["4", "8", "4", "27.3%", "7", "×", "0.25", "MiB", "=", "1.75", "MiB"],
    ["8", "(this)", "16", "2", "15.8%", "7", "×", "0.125", "MiB", "=", "0.875", "MiB"],
    ["16", "32", "1", "8.6%", "7", "×", "0.0625", "MiB", "=", "0.438", "MiB"],
  ]


def test_a_batch_schedule_shows_its_bubbles(capsys):
  keys = ["ici_pipeline_parallelism=4", "pipeline_schedule=1f1b", "micro_batch_size=4"]
  text = show(capsys, *keys, "batch_schedule=[[0, 32], [3200, 256]]")
  assert (
    "over the batch schedule 42.9% (gradient_accumulation_steps 1) to 8.6% (gradient_accumulation_steps 8)"
    in text
  )


def test_streamed_passes(capsys):
  text = show(capsys, *KEYS, "accumulation=streamed")
  assert "num_pipeline_microbatches 4 in each of 2 timetables per step (accumulation=" in text
  assert "3/7 = 42.9% idle\n" in text


def test_without_a_schedule_all_are_compared(capsys):
  text = show(capsys, "ici_pipeline_parallelism=4", "base_num_decoder_layers=8")
  assert [line.split()[0] for line in text.splitlines()[2:6]] == [
    "gpipe", "circular", "1f1b", "interleaved_1f1b",
  ]  # fmt: skip
  assert "for example pipeline_schedule=1f1b shows one" in text
  assert "(this)" not in text


def test_a_schedule_that_does_not_work_is_in_the_comparison_with_its_reason(capsys):
  keys = ["ici_pipeline_parallelism=2", "pipeline_delay_activation_forwarding=true"]
  keys += ["per_device_batch_size=3", "num_pipeline_microbatches=6"]
  text = show(capsys, *keys, "pipeline_schedule=1f1b")
  assert "\n  interleaved_1f1b: num_pipeline_microbatches=6 must be a multiple of 4, twice" in text
  assert "\n  circular " in text


def test_one_stage_is_refused(capsys):
  assert error(capsys) == (
    "a pipeline has at least 2 stages, but ici_pipeline_parallelism=1 × dcn_pipeline_parallelism=1 "
    "is 1 on 8 devices; nearest: ici_pipeline_parallelism=2 or ici_pipeline_parallelism=4"
  )


def test_what_residuals_add(capsys):
  keys = [
    *KEYS,
    "pipeline_saved_activations=residuals",
    "remat_policy=full",
    "base_num_decoder_layers=8",
  ]
  # 4 rows of 128 tokens, 128 wide in float32, and the same for each of 2 layers.
  text = show(capsys, *keys)
  assert (
    "\n  residuals     7 slots on every stage, 3.5 MiB a device, with remat_policy=full\n" in text
  )
  assert (
    "a stage keeps 7 × (0.25 MiB + 0.5 MiB) = 5.25 MiB; with pipeline_saved_activations=input 7 × 0.25 MiB = "
    "1.75 MiB\n"
  ) in text
  assert "residuals" not in show(capsys, *KEYS)
  assert error(capsys, *keys, "remat_policy=explore") == (
    "remat_policy=explore tries several policies, but the size of pipeline_saved_activations=residuals needs "
    "one of them; for example remat_policy=none"
  )


def test_other_devices(capsys):
  keys = [*KEYS, "gradient_accumulation_steps=1"]
  assert "in each of 16 groups" in show(capsys, *keys, "num_devices=64")
  assert "in each of 64 groups" in show(capsys, *keys, "compile_topology=v5e-256")


# --- files ---------------------------------------------------------------------------------------


def test_every_file_is_written(capsys, tmp_path):
  csv, picture, trace = tmp_path / "a.csv", tmp_path / "a.html", tmp_path / "a.json"
  show(capsys, *KEYS, "--csv", str(csv), f"--plot={picture}", "--trace", str(trace))
  assert csv.read_text().startswith("tick,stage,forward_repeat,")
  assert "timetable of" in picture.read_text()
  assert json.loads(trace.read_text())["traceEvents"]


def test_a_csv_can_be_fed_back_in(capsys, tmp_path):
  csv, again = tmp_path / "a.csv", tmp_path / "b.csv"
  text = show(capsys, *KEYS, "--csv", str(csv))
  back = show(capsys, *KEYS, "--check", str(csv), "--csv", str(again))
  assert back == text.replace("Pipeline  1f1b", f"Pipeline  1f1b, as {csv} has it", 1)
  assert again.read_text() == csv.read_text()


def edited(csv: Path, before: str, after: str) -> str:
  text = csv.read_text()
  assert text.count(before) == 1
  csv.write_text(text.replace(before, after))
  return str(csv)


def test_a_wrong_csv_is_refused_with_its_first_fault(capsys, tmp_path):
  csv = tmp_path / "a.csv"
  show(capsys, *KEYS, "--csv", str(csv))
  file = edited(csv, "\n2,1,0,1,1,,,,\n", "\n2,1,0,2,2,,,,\n")
  assert error(capsys, *KEYS, "--check", file) == (
    f"{csv}: forward of stage 1, microbatch 2 at tick 2 before its input arrives at tick 3"
  )


def test_a_csv_of_another_schedule_is_held_to_this_one_s_memory(capsys, tmp_path):
  csv = str(tmp_path / "a.csv")
  gpipe = [*KEYS, "pipeline_schedule=gpipe"]
  show(capsys, *gpipe, "--csv", csv)
  assert "3/11 = 27.3% idle" in show(capsys, *gpipe, "--check", csv)
  assert error(capsys, *KEYS, "--check", csv) == (
    f"{csv}: stage 3 holds 2 gradients at tick 4, more than the 1 that the schedule allows"
  )
  other = "num_pipeline_microbatches=8"
  assert error(capsys, *gpipe, other, "--check", csv) == (
    f"{csv}: forward of stage 0, microbatch 8 is missing"
  )


def test_a_slower_csv_shows_its_own_bubble(capsys, tmp_path):
  csv = tmp_path / "a.csv"
  gpipe = [*KEYS, "pipeline_schedule=gpipe"]
  show(capsys, *gpipe, "--csv", str(csv))
  rows = [line.split(",") for line in csv.read_text().splitlines()]
  bare = [[cell for cell, name in zip(row, rows[0], strict=True) if "slot" not in name]
          for row in rows]  # fmt: skip
  # The first backward of stage 0 comes last, in a tick of its own, which takes 2 more of 33.
  first = next(row for row in bare[1:] if row[1] == "0" and row[-1] == "0")
  first[0] = "22"
  csv.write_text("\n".join(map(",".join, bare)))
  slotted = tmp_path / "b.csv"
  text = show(capsys, *gpipe, "--check", str(csv), "--csv", str(slotted))
  assert slotted.read_text().splitlines()[1] == "0,0,0,0,0,,,,"
  assert show(capsys, *gpipe, "--check", str(slotted)).partition("\n")[2] == text.partition("\n")[2]
  assert "11/35 = 31.4% idle; 27.3% in pipeline_schedule=gpipe" in text


ERRORS = {
  ("--csv",): "--csv : name a file; for example --csv pipeline.csv",
  ("--plot", "steps=3"): "--plot steps=3: name a file; for example --plot pipeline.html",
  ("--svg", "a.svg"): "--svg is called --plot now; --help says what it does",
  ("--trace", "no/such/a.json"): (
    "--trace no/such/a.json: cannot be written: No such file or directory; for example --trace new-a.json"
  ),
  ("--check", "no.csv"): "--check no.csv: cannot be read: No such file or directory",
  ("pipeline_schedule=none", "--csv", "a.csv"): (
    "--csv needs a schedule, but pipeline_schedule=none; for example pipeline_schedule=1f1b "
    "(known: gpipe, circular, 1f1b, interleaved_1f1b)"
  ),
  ("num_device=8",): (
    "command line: there is no key 'num_device'. Did you mean num_devices? --help all lists every key."
  ),
}


@pytest.mark.parametrize("arguments", ERRORS, ids=" ".join)
def test_errors(capsys, arguments, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert error(capsys, *KEYS, *arguments) == ERRORS[arguments]


def test_a_file_that_is_not_text(capsys, tmp_path):
  file = tmp_path / "a.csv"
  file.write_bytes(b"tick\xff")
  assert error(capsys, *KEYS, "--check", str(file)) == (
    f"--check {file}: not a text file in UTF-8 (byte 4)"
  )


def test_help(capsys):
  text = show(capsys, "--help")
  assert text.startswith("Usage: maxbatch pipeline config=FILE")
  assert "--check FILE" in text
  text = show(capsys, "--help", "pipeline")
  assert "  num_pipeline_microbatches=-1  (whole number, at least 1, or -1)" in text


def test_no_device_is_touched():
  code = (
    "import sys; from maxbatch.pipeline import main; code = main(sys.argv[1:]); "
    "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized(); "
    "sys.exit(code)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, "config=base", *KEYS],
    capture_output=True, text=True, cwd=ROOT, check=False,
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, "")


# --- the plan ------------------------------------------------------------------------------------


def test_the_plan_shows_the_pipeline(capsys):
  assert plan(["config=base", *KEYS]) == 0
  assert (
    "Pipeline\n"
    "  1f1b: 4 stages × 1 repeat × 1 layer; 8 microbatches in a timetable, each of 4 samples per "
    "group of devices; bubble 27.3%; pipeline_saved_activations=input\n"
  ) in capsys.readouterr().out
  assert plan(["config=base", *KEYS, "--json"]) == 0
  printed = json.loads(capsys.readouterr().out)["pipeline"]
  assert printed == {
    "pipeline_schedule": "1f1b",
    "stages": 4,
    "num_pipeline_repeats": 1,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_microbatches": 4,
    "microbatches_in_a_timetable": 8,
    "samples_per_microbatch_and_group": 4,
    "pipeline_saved_activations": "input",
    "bubble": 3 / 11,
    "choice": "num_pipeline_microbatches=-1: a run or compile_only=true takes the fastest of 4, 8, "
    "16, compiling and timing some; shown is 4, the fewest, which num_pipeline_microbatches=4 takes "
    "at once",
    "choices": [4, 8, 16],
  }


def test_the_plan_without_a_pipeline(capsys):
  assert plan(["config=base", "ici_pipeline_parallelism=4", "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["pipeline"] is None
  assert plan(["config=base", "num_pipeline_repeats=2"]) == 2
  assert "num_pipeline_repeats=2 has no effect with" in capsys.readouterr().err
  assert plan(["config=base", "pipeline_saved_activations=residuals"]) == 2
  assert "pipeline_saved_activations=residuals has no effect with" in capsys.readouterr().err


def test_the_plan_refuses_a_pipeline_that_does_not_divide(capsys):
  assert plan(["config=base", *KEYS, "num_pipeline_microbatches=3"]) == 2
  assert "must be a multiple of the 4 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("command", "arguments"),
  [("pipeline", ["config=base", *KEYS]), ("plan", ["config=base", *KEYS]), ("train", ["--help"])],
)
def test_nobody_has_to_read_to_the_end(command, arguments):
  arguments = [sys.executable, "-m", f"maxbatch.{command}", *arguments]
  with subprocess.Popen(
    arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
  ) as process:
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
  assert process.returncode == 128 + signal.SIGPIPE
