"""maxbatch advise RUN: findings from a run's own records, each with its figure and its keys."""

import json
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from maxbatch import advise
from maxbatch.advice.run_advice import run_advice
from maxbatch.errors import UserError
from maxbatch.plan import main as plan
from maxbatch.run_folder.history import read_history
from maxbatch.run_report.page import page


@pytest.fixture
def made(tmp_path):
  """Writes a run whose records have other values."""

  def make(*keys: str, steps: int = 40, **values: Any) -> Path:
    folder = write_run(tmp_path / "mine", steps, *keys)
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [
      {k: v for k, v in (one | (values if one["step"] else {})).items() if v is not None}
      for one in records
    ]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return folder

  return make


def of(folder: Path) -> dict[str, Any]:
  return {one.about: one for one in run_advice(read_history(folder))}


def gns(value: float, low: float, high: float) -> dict[str, float]:
  return {"gns/total": value, "gns/total_low": low, "gns/total_high": high}


def test_five_findings_with_figures_of_the_run(made):
  found = of(made())
  assert list(found) == ["Batch", "Data", "Pauses", "Restarts", "Steps", "Left"]
  assert "32 samples a step, noise scale 90 (95% 60–150" in found["Batch"].says
  assert "in the efficient range" in found["Batch"].says
  assert not found["Batch"].change
  assert found["Data"].says.startswith("2% of the last 39 steps' time")
  assert "nothing of its budget after step 40" in found["Left"].says


def test_a_run_that_often_restarts_is_told_how_often_to_save(made):
  folder = made("checkpoint_period=1000", step_seconds=1.0)
  assert not of(folder)["Restarts"].change  # One alone says little.
  lines = (folder / "events.jsonl").read_text().splitlines()
  start = json.loads(lines[0])
  again = [json.dumps(start | {"time": start["time"] + 60 + n}) for n in (1, 2, 3)]
  (folder / "events.jsonl").write_text("\n".join([*lines[:-1], *again, lines[-1]]))
  found = of(folder)["Restarts"]
  # Four restarts in 136 s: √(2 · 0.5 · 34) is 5.8 s.
  assert found.says.startswith("4 so far, with goodput ")
  assert found.change == "checkpoint_period=6"
  assert found.time_share > 0.5
  config = folder / "config.yml"
  config.write_text(config.read_text().replace("checkpoint_period: 1000", "checkpoint_period: 6"))
  assert not of(folder)["Restarts"].change


def test_a_batch_far_below_the_noise_scale_is_doubled_until_it_is_not(made):
  found = of(made("opt_type=adamw", "learning_rate=0.001", **gns(1100, 1040, 1160)))["Batch"]
  # A quarter of 1,040 is 260: 256 is the largest doubling of 32 below it.
  assert found.change == "batch_size=256 learning_rate=0.00283"
  # (1 + 1100/256) / (1 + 1100/32) of the steps, (1 + 256/1100) / (1 + 32/1100) of the data.
  assert "85% of the steps for 20% more data" in found.saves
  assert found.time_share == 0


def test_a_batch_above_the_noise_scale_is_halved_and_saves_data(made):
  found = of(made("opt_type=sgd", "learning_rate=0.1", **gns(8, 6, 10)))["Batch"]
  # A microbatch of 32 samples is more than that.
  assert found.change == (
    "batch_size=16 micro_batch_size=auto gradient_accumulation_steps=-1 learning_rate=0.05"
  )
  assert found.time_share == pytest.approx(1 - (1 + 16 / 8) / (1 + 32 / 8))


def test_layers_with_far_more_noise_are_proposed_a_batch_of_their_own(made):
  folder = made(**gns(90, 60, 150), **{"gns/embedding": 500.0, "gns/head": 239.0, "gns/mlp": 90.0})
  assert "could try batch_by_group=[[embedding,4]]" in of(folder)["Batch"].says


def test_a_batch_that_a_schedule_decides_on_is_left_alone(made):
  found = of(made("batch_schedule=[[0,8],[99,32]]", **gns(1100, 1040, 1160)))["Batch"]
  assert not found.change
  assert found.says.endswith("batch_schedule decides on it")


NOTHING = dict.fromkeys(gns(0, 0, 0))
MIXTURE = ("num_experts=4", "base_moe_mlp_dim=64", "routed_bias=true")


@pytest.mark.parametrize(
  ("keys", "values", "change"),
  [
    ((), {}, "gns=norm"),
    # It is measured, and there were too few calibration steps.
    (("gns=norm",), {}, "gns_calibrate_every=5"),
    (("gns=norm", "gns_calibrate_every=0"), {}, "gns_calibrate_every=10"),
    (("gns=norm", "gns_calibrate_every=1"), {}, ""),
    (("gns=all",), {}, ""),
    # Rows of experts cannot be squared; several microbatches can be compared.
    (MIXTURE, {"gradient_accumulation_steps": 4}, "gns_from_microbatches=true"),
    (MIXTURE, {}, ""),
  ],
)
def test_without_a_noise_scale_it_is_to_be_measured_as_this_run_can(made, keys, values, change):
  assert of(made(*keys, **NOTHING, **values))["Batch"].change == change


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_what_a_batch_saves_is_doubted_where_curves_of_batches_cross(made, schedule):
  saves = of(made(f"lr_schedule_type={schedule}", **gns(1100, 1040, 1160)))["Batch"].saves
  doubted = "which does not hold with lr_schedule_type=wsd: Zhou 2026" in saves
  assert doubted == (schedule == "wsd")


@pytest.mark.parametrize(
  ("keys", "batch", "micro_batch"),
  [
    (("per_device_batch_size=2", "gradient_accumulation_steps=2"), 32, 16),
    (("batch_size=32", "micro_batch_size=2"), 32, 16),
    (("tokens_per_step=4096", "micro_batch_size=4"), 32, 32),
    (("batch_size=32", "per_device_batch_size=4"), 32, 32),
  ],
)
@pytest.mark.parametrize("scale", [(1100, 1040, 1160), (8, 6, 10), (40, 30, 50)])
def test_what_is_proposed_is_accepted(made, capsys, keys, batch, micro_batch, scale):
  """Also where the run says its sizes by other keys, or half of the batch is no whole microbatch."""
  sizes = {"global_batch_to_train": batch, "micro_batch_to_train": micro_batch}
  count = {"gradient_accumulation_steps": batch // micro_batch}
  folder = made(*keys, **gns(*scale), **sizes, **count)
  found = of(folder)
  assert bool(found["Batch"].change) == (scale[0] != 40)
  for finding in found.values():
    arguments = [f"config={folder / 'config.yml'}", *finding.change.split()]
    assert plan(arguments) == 0, (arguments, capsys.readouterr().err)


def test_waiting_for_rows(made):
  found = of(made("grain_worker_count=3", step_seconds=2.0, data_wait_seconds=0.5))
  assert found["Data"].change == "grain_worker_count=6"
  assert found["Data"].time_share == pytest.approx(0.25)


def with_budget(folder: Path, steps: int) -> Path:
  config = (folder / "config.yml").read_text()
  for key, each in (("steps", 1), ("total_samples", 32)):
    config = config.replace(f"  {key}: {40 * each}", f"  {key}: {steps * each}")
  (folder / "config.yml").write_text(config)
  return folder


def test_pauses(made):
  # 40 steps of 0.5 s, 2 s and 1 s of evaluating, 0.5 of saving: 3 of 23.5 s are 12.8%.
  folder = made("eval_interval=10")
  found = of(with_budget(folder, 400))["Pauses"]
  assert found.says.startswith("evaluating takes 13% and saving 2.1%")
  assert found.change == "eval_interval=70"
  assert found.time_share == pytest.approx(3 / 23.5 * 6 / 7)


def test_four_evaluations_are_left_of_a_short_run(made):
  # By the time they take, 35.
  assert of(made("eval_interval=5"))["Pauses"].change == "eval_interval=10"


def test_what_is_left_and_what_is_saved(made):
  says = of(with_budget(made(step_seconds=2.0, data_wait_seconds=0.5), 1840))["Left"].says
  assert says.startswith("57,600 of 58,880 samples, 1 hour at the speed of the last steps")
  assert "the changes save up to 1" in says


def test_the_command_and_the_page(made, capsys):
  folder = made(**gns(1100, 1040, 1160))
  assert advise.main([str(folder)]) == 0
  printed = " ".join(capsys.readouterr().out.split())
  assert "Set batch_size=256" in printed
  assert "Set batch_size=256" in page([read_history(folder)])
  assert advise.main([str(folder), "--json"]) == 0
  assert len(json.loads(capsys.readouterr().out)) == 6


def test_too_few_steps_are_refused_and_the_page_is_silent(made):
  folder = made(steps=8)
  with pytest.raises(UserError, match="times 7 steps, and advice about a run needs at least 20"):
    run_advice(read_history(folder))
  assert "What to change now" not in page([read_history(folder)])


@pytest.mark.parametrize("words", [["runs/none"], ["runs/none", "data_overhead=0.3"], ["config"]])
def test_what_is_refused(words, capsys):
  assert advise.main(words) == 2
  assert "maxbatch advise runs/first_run" in " ".join(capsys.readouterr().err.split())
