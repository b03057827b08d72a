"""maxbatch advise: from a question to a plan, and to a configuration that trains."""

import importlib
import json
import math
import pathlib
import re
import subprocess
from fractions import Fraction

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMALLEST

from maxbatch import advise, train
from maxbatch.advice import ramp as ramps
from maxbatch.advice.asked import place_named
from maxbatch.advice.batch_size import growth_to, measured_by
from maxbatch.advice.ramp import round_batch, whole_steps
from maxbatch.advice.words import short
from maxbatch.batch_rules import published
from maxbatch.config.load import load_config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.estimate.chips import CHIPS
from maxbatch.estimate.step_roofline import step_rates, step_roofline
from maxbatch.estimate.step_work import step_work
from maxbatch.pipeline import main as pipeline_command
from maxbatch.plan import main as plan_command
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.run_folder.paths import RunFolder

LLAMA = ["config=base", "model_name=llama2-7b", "total_tokens=140e9", "compile_topology=v5e-256"]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """advice.yml is written to the working directory."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert advise.main(arguments) == 0, capsys.readouterr().err
  return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
  return json.loads(ask(capsys, *arguments, "--json"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert advise.main(arguments) == 2
  return capsys.readouterr().err


def test_the_answer_is_read_in_80_columns(capsys):
  text = ask(capsys, *LLAMA, "price_per_chip_hour=1.2", "deadline_days=20", "--explain")
  too_long = [line for line in text.splitlines() if len(line) > 80]
  assert not too_long
  for words in (
    "768 samples of 4,096 tokens a step, 3.15M tokens, after a ramp from ",
    "Zhang 2024, by data     3.08M  20% more data      3.08M",
    "together 965k to 3.5M at a data overhead of 0.2; taken 3.01M, the middle",
    "The deadline of 20 days is met",
    "knee",
    "What would narrow the interval most",
    "power-lines-critical: Bcrit = 0.0471 · Dmin^0.462",
    "from memory",
    "Written to advice.yml.",
  ):
    assert words in text


def test_what_is_advised_is_planned_as_it_stands(capsys):
  result = answer(capsys, *LLAMA)
  assert result["batch"]["data_overhead"] == pytest.approx(768 * 4096 / 15.03e6, rel=1e-3)
  # Against the same keys through the plan command.
  assert plan_command(["config=advice.yml", "compile_topology=v5e-256", "--json"]) == 0
  planned = json.loads(capsys.readouterr().out)
  phases = [(one["first_sample"], one["global_batch_to_train"]) for one in planned["phases"]]
  told = [(one["first_sample"], one["samples_per_step"]) for one in result["phases"]]
  assert phases == told
  assert told[-1][1] == 768
  assert 2 <= len(told) <= 4
  assert planned["sizes"]["steps"] == result["run"]["steps"]
  assert abs(planned["sizes"]["total_tokens"] / 140e9 - 1) < 1e-4
  assert all(one["same_shape_as_the_run"] for one in planned["phases"])
  config = load_config(["config=advice.yml"])
  assert config.optimizer.learning_rate == result["settings"]["learning_rate"]
  assert config.compile.compile_topology == ""


def test_the_cost_is_the_chips_times_the_time(capsys):
  result = answer(capsys, *LLAMA, "price_per_chip_hour=2")
  run = result["run"]
  for one in result["frontier"]:
    assert one["chip_hours"] == pytest.approx(24 * one["chips"] * one["days"])
    assert one["cost"] == pytest.approx(2 * one["chip_hours"])
  assert run["chip_hours"] == pytest.approx(256 * 24 * run["days"])
  assert run["cost"] == pytest.approx(2 * run["chip_hours"])
  assert run["tokens_per_second"] == pytest.approx(run["tokens"] / run["days"] / 86_400)


def test_the_frontier_trades_time_for_data_on_three_slices(capsys):
  result = answer(capsys, *LLAMA)
  places = {one["slices"] for one in result["frontier"]}
  assert places == {"v5e-128", "v5e-256", "2 × v5e-256"}
  for place in places:
    points = [one for one in result["frontier"] if one["slices"] == place]
    assert sum(one["is_knee"] for one in points) == 1
    data, days = ([one[key] for one in points] for key in ("total_tokens", "days"))
    assert data == sorted(data)
    assert days == sorted(days, reverse=True)
    knee = next(one for one in points if one["is_knee"])
    least = min(one["days"] * one["total_tokens"] for one in points)
    assert knee["days"] * knee["total_tokens"] == least
  # Every point reaches one loss: (1 + x) times the same data of small batches.
  small = {round(one["total_tokens"] / (1 + one["data_overhead"])) for one in result["frontier"]}
  assert max(small) - min(small) <= 1


def test_a_larger_overhead_is_a_larger_batch_in_fewer_steps(capsys):
  batches, steps = zip(
    *(
      (result["batch"]["tokens"], result["run"]["steps"])
      for overhead in ("0.1", "0.4")
      for result in [answer(capsys, *LLAMA, f"data_overhead={overhead}", "ramp=false")]
    ),
    strict=True,
  )
  assert batches[1] / batches[0] == pytest.approx(4, rel=0.15)
  assert steps[0] / steps[1] == pytest.approx(batches[1] / batches[0], rel=1e-3)


def test_a_deadline_that_is_missed_is_offered_what_meets_it(capsys):
  text = " ".join(ask(capsys, *LLAMA, "deadline_days=1.5").split())
  assert "The deadline of 1.5 days is missed" in text
  assert re.search(r"2 × v5e-256 takes 1\.[0-4]\d* days", text)
  [fewer] = re.findall(r"total_tokens=([89]\.\d+e10) ends in time", text)
  assert answer(capsys, *LLAMA, f"total_tokens={fewer}", "ramp=false")["run"]["days"] < 1.6


@pytest.mark.parametrize(
  ("model", "billions", "active", "share"),
  [
    ("mixtral-8x7b", 46.7, 12.9, 1 / 4),
    ("olmoe-1b-7b", 6.92, 1.28, 1 / 8),
    ("qwen3-30b-a3b", 30.5, 3.35, 1 / 16),
    ("deepseek3-671b", 671, 37.6, 1 / 32),
  ],
)
def test_a_mixture_is_asked_about_with_its_active_parameters(
  capsys, model, billions, active, share
):
  keys = f"config=base model_name={model} total_tokens=6e11 num_devices=8".split()
  result = answer(capsys, *keys)
  mixture, phases = result["mixture"], result["phases"]
  assert mixture["parameters"] / 1e9 == pytest.approx(billions, rel=5e-3)
  assert mixture["active_parameters"] / 1e9 == pytest.approx(active, rel=5e-3)
  assert result["asked"]["parameters"] == mixture["active_parameters"]
  length = result["batch"]["tokens"] / result["batch"]["samples"]
  ends = [phases[at]["samples_per_step"] * length * share for at in (0, -1)]
  assert mixture["tokens_per_expert"] == ends


def test_too_few_tokens_of_an_expert_are_a_warning(capsys):
  keys = [
    "config=base",
    "model_name=qwen3-30b-a3b",
    "total_tokens=6e9",
    "num_devices=8",
    "ramp=false",
  ]
  few, enough = (ask(capsys, *keys, "max_target_length=64", f"batch_size={n}") for n in (120, 128))
  assert "Little is published: no rule counts experts." in few
  # 120 · 64 tokens · 8 / 128 = 480 of 512.
  words = "Warning: an expert sees 480 tokens of a step (7,680 tokens · num_experts_per_tok=8 / "
  assert words in " ".join(few.split())
  assert "which 128 samples a step give" in " ".join(few.split())
  assert "Little is published" in enough
  assert "Warning" not in enough
  assert answer(capsys, *LLAMA)["mixture"] is None
  assert "expert" not in ask(capsys, *LLAMA).partition("Newer, without a number")[0]


def test_without_a_slice_there_is_a_batch_and_no_time(capsys):
  result = answer(capsys, "config=base", "total_tokens=5e9", "num_devices=64")
  assert result["run"]["days"] is None
  assert result["frontier"] == []
  assert result["batch"]["samples"] % 64 == 0


def test_a_pipeline_s_batch_is_what_its_stages_divide(capsys):
  question = "config=base", "total_tokens=1e9", "num_devices=14", "base_num_decoder_layers=14"
  question += "ramp=false", "batch_size=500"
  stages = "pipeline_schedule=1f1b", "ici_pipeline_parallelism=7"
  # 2 groups of devices, each with a sample for each of 7 stages.
  assert answer(capsys, *question, *stages)["batch"]["samples"] == 504
  assert answer(capsys, *question)["batch"]["samples"] in (490, 504)
  assert answer(capsys, *question, *stages[1:])["batch"]["samples"] == 500


def test_a_pipeline_on_a_slice_has_the_stages_that_were_asked_for(capsys):
  """And its batch and mesh are found for them; without a schedule there are none."""
  question = [*LLAMA[:3], "compile_topology=v5e-16", "ici_pipeline_parallelism=4"]
  stages = "pipeline_schedule=1f1b", "pipeline_saved_activations=residuals"
  text = " ".join(ask(capsys, *question, *stages, "ici_fsdp_parallelism=2").split())
  assert "Without a pipeline: ici_data_parallelism=1 ici_fsdp_parallelism=16" in text
  assert "Replaced from your request: ici_fsdp_parallelism=2" in text
  staged = answer(capsys, *question, *stages)
  assert pipeline_command(["config=advice.yml", "compile_topology=v5e-16"]) == 0
  steps = staged["batch"]["samples"] // 16
  shown = (
    f"num_pipeline_microbatches 4 × gradient_accumulation_steps {steps} = {4 * steps} per step"
  )
  assert shown in capsys.readouterr().out
  # Of all that auto may take, that with the least bubble, and residuals fit.
  chosen = answer(capsys, *question, *(f"{key.partition('=')[0]}=auto" for key in stages))
  assert chosen["run"]["utilisation"] > staged["run"]["utilisation"]
  whole = answer(capsys, *question)
  assert whole["keys"]["ici_pipeline_parallelism"] == 1
  assert whole["keys"]["ici_fsdp_parallelism"] == 16
  # The bubble, at the least.
  assert whole["run"]["utilisation"] > staged["run"]["utilisation"]


def test_a_rate_found_elsewhere_is_carried_over_with_its_half_life(capsys):
  keys = [*LLAMA, "ramp=false", "learning_rate=3e-4", "adam_b2=0.98", "rate_found_at=786432"]
  result = answer(capsys, *keys)["settings"]
  assert result["learning_rate"] == pytest.approx(6e-4)
  assert result["advised"]["adam_b2"] == pytest.approx(0.98**4, abs=1e-6)
  rules = {one["name"]: one["carried"] for one in result["said"]}
  assert rules["malladi-rate"] == pytest.approx(6e-4)
  assert rules["marek-rate"] < rules["surge-rate"] < rules["malladi-rate"]
  # Beyond a quarter of the critical batch the root would be too much.
  large = answer(capsys, *keys, "data_overhead=1")["settings"]
  rules = {one["name"]: one["carried"] for one in large["said"]}
  assert large["learning_rate"] == pytest.approx(rules["surge-rate"], rel=0.01)
  assert large["learning_rate"] < 0.6 * rules["malladi-rate"]


def test_a_rate_that_no_rule_speaks_of_is_called_a_guess(capsys):
  tiny, large = (
    " ".join(ask(capsys, *asked).split()) for asked in (["config=base", "total_tokens=2e7"], LLAMA)
  )
  assert "a guess, to be tried in a short run" in tiny
  assert "a guess" not in large


def test_a_rate_of_ones_own_stays(capsys):
  result = answer(capsys, *LLAMA, "learning_rate=1e-4", "adam_weight_decay=0.3")["settings"]
  assert result["learning_rate"] == 1e-4
  assert "adam_weight_decay" not in result["advised"]


def test_the_weight_decay_keeps_the_timescale_at_every_phase(capsys):
  result = answer(capsys, *LLAMA)["settings"]
  assert result["advised"]["learning_rate_batch_coupling"] == "sqrt"
  for one in result["phases"]:
    share = one["batch_tokens"] / result["phases"][-1]["batch_tokens"]
    assert one["learning_rate"] == pytest.approx(result["learning_rate"] * share**0.5)
  spans = [
    one["batch_tokens"] / one["learning_rate"] / one["adam_weight_decay"]
    for one in result["phases"]
  ]
  assert max(spans) / min(spans) < 1.05


def write_run(
  folder: pathlib.Path, *, branches: bool = False, noise: float = 0.0, curve: object = None
) -> None:
  """A run's files, as far as they say what it measured."""
  run = folder / "runs" / "small"
  run.mkdir(parents=True)
  record = {"step": 100, "samples": 3200, "tokens": 1_000_000_000, "loss": 3.0}
  if noise:
    record |= {"gns/total": noise / 4096, "gns/total_tokens": noise}
    record |= {"gns/total_low": noise / 8192, "gns/total_high": noise / 2048}
  (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
  if branches:
    of_step = folder / "runs" / "small-critical_batch" / "step-100"
    of_step.mkdir(parents=True)
    sizes = [{"batch": size, "tokens_per_step": 4096 * size} for size in (64, 128, 256)]
    report = {
      "checkpoint": {"tokens": 900_000_000},
      "branch_tokens": 100_000_000,
      "critical_batch_at_least": 64,
      "critical_batch_below": 128,
      "branches": sizes,
      "tradeoff": curve and {"critical_batch": curve},
    }
    (of_step / "critical_batch.json").write_text(json.dumps(report))


def test_a_measured_noise_scale_is_one_value_among_the_rules(capsys, folder):
  write_run(folder, noise=200_000.0)
  before, after = (answer(capsys, *LLAMA, *more)["batch"] for more in ([], ["from_run=runs/small"]))
  carried = 1.7 * 200_000 * 0.53 * 140**0.47
  assert after["interval_tokens"][0] == pytest.approx(0.2 * carried)
  assert after["by_rules_tokens"] == before["wanted_tokens"]
  assert after["wanted_tokens"] < before["wanted_tokens"]
  text = " ".join(ask(capsys, *LLAMA, "from_run=runs/small").split())
  assert "it moves 3.01M to 2.86M" in text
  assert "factor of 1.7" in text
  assert "too low by orders of magnitude" in text


def test_branches_keep_the_batch_inside_of_what_they_found(capsys, folder):
  write_run(folder, branches=True, noise=50_000.0)
  result = answer(capsys, *LLAMA, "from_run=runs/small")
  low, high = (size * 4096 * 0.53 * 140**0.47 for size in (64, 128))
  assert result["batch"]["wanted_tokens"] == pytest.approx(high)
  assert result["batch"]["interval_tokens"] == pytest.approx([low, high])
  assert {one["kind"] for one in result["measured"]} == {"noise scale", "branches"}


def test_what_is_known_of_a_steps_time_is_said(capsys, folder):
  spread, share = 100 * step_rates().spread["seconds"], step_rates().chosen
  # Of this depth no step was compiled.
  estimated = " ".join(ask(capsys, *LLAMA, "base_num_decoder_layers=31").split())
  assert (
    f"(estimated without compiling, {share:.2g} of what is counted, ±{spread:.2g}%)" in estimated
  )
  # Every figure of a step that was not compiled has its mark, and one that was has none.
  used = re.findall(r"utilisation (\S+(?: \d+%)?)", estimated)
  assert used
  assert all(one.startswith("≈ ") for one in used)
  assert re.search(r"microbatch\w* of [\d,]+ samples, ≈ [\d.]+ s a step", estimated)
  assert f"≈ not compiled: {share:.2g} of the speed that is counted" in estimated
  compiled = " ".join(ask(capsys, *LLAMA).split())
  assert re.search(r"utilisation \d+% \(as it was compiled\)", compiled)


def test_estimates_are_held_to_what_compiled_choices_reached(capsys):
  deeper = [*LLAMA, "base_num_decoder_layers=31"]
  result = answer(capsys, *deeper)
  keys, run = result["keys"], result["run"]
  config = load_config(["config=base", *deeper[1:2], deeper[-1], "precision=bfloat16"])
  mesh = Topology.of(data=keys["ici_data_parallelism"], fsdp=keys["ici_fsdp_parallelism"])
  assert keys["ici_tensor_parallelism"] == 1
  size = Fraction(str(keys["micro_batch_size"]))
  count = keys["batch_size"] // int(256 * size)
  counted = step_roofline(
    step_work(config), CHIPS["v5e"], mesh, size, count, keys["remat_policy"], step_rates()
  )
  assert run["how"] == "estimated"
  assert run["utilisation"] == pytest.approx(step_rates().chosen * counted.utilisation)


def test_the_curve_of_branches_says_what_twice_the_data_is(capsys, folder):
  write_run(folder, branches=True, curve={"value": 300.0, "low": 250.0, "high": 400.0})
  result = answer(capsys, *LLAMA, "from_run=runs/small")
  low, high = (0.2 * size * 4096 * 0.53 * 140**0.47 for size in (250, 400))
  assert result["batch"]["wanted_tokens"] == pytest.approx(high)
  assert result["batch"]["interval_tokens"] == pytest.approx([low, high])
  assert "inside of 0.2 of it" in " ".join(ask(capsys, *LLAMA, "from_run=runs/small").split())


def test_a_run_that_measured_nothing_is_refused(capsys, folder):
  write_run(folder)
  assert "has measured neither noise scale nor" in refusal(capsys, *LLAMA, "from_run=runs/small")
  assert "there is no run" in refusal(capsys, *LLAMA, "from_run=runs/none")
  (folder / "runs" / "small-critical_batch" / "step-1").mkdir(parents=True)
  (folder / "runs" / "small-critical_batch" / "step-1" / "critical_batch.json").write_text("{}")
  assert "cannot be read as a measurement" in refusal(capsys, *LLAMA, "from_run=runs/small")


def test_mistakes_are_refused_with_what_works(capsys, folder):
  assert "set total_tokens" in refusal(capsys, "config=base")
  assert "nearest: compile_topology=v5e-256" in refusal(capsys, *LLAMA, "compile_topology=v5e-200")
  assert "data_overhead" in refusal(capsys, *LLAMA, "data_overhead=0")
  large = refusal(capsys, *LLAMA, "compile_topology=v5e-4")
  assert "no split fits" in large
  assert "take more devices" in large
  (folder / "mine.yml").write_text("steps: 3\n")
  assert "would be overwritten" in refusal(capsys, *LLAMA, "--write", "mine.yml")


def test_the_advice_builds_on_a_file_of_ones_own(capsys, folder):
  (folder / "mine.yml").write_text("base_config: base\nmodel_name: gpt2-small\nadam_b2: 0.97\n")
  (folder / "elsewhere").mkdir()
  arguments = ["config=mine.yml", "total_tokens=2.5e9", "compile_topology=v5e-16"]
  ask(
    capsys,
    *arguments,
    "run_name=it's: mine # 1",
    "prompt=a\n- b: 'c' ",
    "--write",
    "elsewhere/advice.yml",
  )
  config = load_config(["config=elsewhere/advice.yml"])
  assert (config.optimizer.adam_b2, config.model.model_name) == (0.97, "gpt2-small")
  assert (config.run.run_name, config.run.prompt) == ("it's: mine # 1", "a\n- b: 'c' ")
  # The same question again replaces its own answer.
  ask(capsys, *arguments, "--write", "elsewhere/advice.yml")


def test_a_batch_of_ones_own_stays_and_what_divides_better_is_priced(capsys):
  result = answer(capsys, *LLAMA, "batch_size=1000")
  assert result["batch"]["samples"] == 992
  priced = {one["keys"]["batch_size"]: one["days"] for one in result["neighbours"]}
  assert priced["1024"] < result["run"]["days"]
  assert "768" in priced
  text = ask(capsys, *LLAMA, "tokens_per_step=4194304", "ici_fsdp_parallelism=64")
  assert text.startswith("1,024 samples of 4,096 tokens a step")
  assert "Your own batch stays" in text
  assert "Replaced from your request: ici_fsdp_parallelism=64" in text
  assert load_config(["config=advice.yml"]).batch.tokens_per_step == -1


def test_what_the_advice_does_not_speak_of_is_refused(capsys):
  for asked, words in {
    "micro_batch_size=2": "is what the advice chooses",
    "batch_schedule=[[0,8]]": "the ramp is what the advice chooses",
    "steps=100": "leave it out, or steps=-1",
    "pipeline_schedule=1f1b": "for example ici_pipeline_parallelism=4",
    "pipeline_schedule=1f1b ici_pipeline_parallelism=3": "for example ici_pipeline_parallelism=2 ",
    "pipeline_schedule=gpipe dcn_pipeline_parallelism=2": "do not divide 1 × 256 devices",
    "lora_rank=8": "do not cover adapters",
    "num_devices=8": "leave out num_devices=8",
    "compile_topology=v5p-17920": "power of 2",
    "--json --explain": "--json includes every rule",
  }.items():
    assert words in refusal(capsys, *LLAMA, *asked.split())


def test_the_page_shows_what_the_rules_say(capsys):
  text = ask(capsys, *LLAMA, "ramp=false")
  rules = text[text.index("Batch: what") : text.index("Optimizer")].strip()
  page = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "advice.md").read_text()
  assert rules in page


def test_a_rule_of_ones_own_is_one_file_and_one_line(capsys, folder, monkeypatch):
  page = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "advice.md").read_text()
  [code] = re.findall(r"```python\n# my_rule.py\n(.*?)```", page, re.DOTALL)
  (folder / "my_rule.py").write_text(code)
  monkeypatch.syspath_prepend(folder)
  mine = importlib.import_module("my_rule").RULE
  monkeypatch.setattr(published, "RULES", {**published.RULES, mine.name: mine})
  result = answer(capsys, *LLAMA)
  rules = {one["rule"]: one["tokens_per_step_at_overhead"] for one in result["rules"]}
  assert rules["mine"] == pytest.approx(0.2 * 0.1 * 140e9**0.7)
  carried = sorted(value for value in rules.values() if value is not None)
  assert result["batch"]["wanted_tokens"] == pytest.approx((carried[2] * carried[3]) ** 0.5)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 8))
def test_the_overhead_of_a_ramp_is_the_integral(starts, unit):
  tokens, critical = 1000.0, 300.0
  places = sorted({0, *starts})
  phases = [ramps.RampPhase(25.0 * at, unit * (n + 1)) for n, at in enumerate(places) if at < 40]
  result = ramps.overhead(phases, 1, tokens, critical)
  # Midpoint sums of B / Bcrit(t), with Bcrit(t) = Bcrit / (1 − p) · (t/D)^p.
  p, at = 0.47, (np.arange(100_000) + 0.5) / 100_000
  places = np.searchsorted([one.at_tokens for one in phases], at * tokens, side="right") - 1
  batches = np.array([one.samples for one in phases])[places]
  assert result == pytest.approx(np.mean(batches * (1 - p) / critical / at**p), rel=0.01)


def test_a_constant_batch_has_the_overhead_of_the_rules():
  phases = [ramps.RampPhase(0.0, 8)]
  assert ramps.overhead(phases, 512, 1e9, 20_480.0) == pytest.approx(8 * 512 / 20_480)


def test_a_ramp_doubles_where_twice_the_batch_keeps_to_the_overhead():
  phases = ramps.ramp(1024, 128, 1e12, share=1.0)
  assert [one.samples for one in phases] == [128, 256, 512, 1024]
  for one in phases[1:]:
    worth = growth_to(one.at_tokens, 1e12)  # of that moment against the whole run, upside down
    assert one.samples / 1024 == pytest.approx((one.at_tokens / 1e12) ** 0.47 / 0.53)
    assert worth > 0
  assert [one.samples for one in ramps.ramp(128, 128, 1e12, share=1.0)] == [128]
  # Later where the batch is larger than what the rules ask for.
  later = ramps.ramp(1024, 128, 1e12, share=1.3)
  assert all(b.at_tokens > a.at_tokens for a, b in zip(phases[1:], later[1:], strict=True))


@given(st.floats(1, 1e6))
def test_a_round_batch_is_near(exact):
  result = round_batch(exact)
  assert abs(result - exact) <= max(0.1 * exact, 0.5)


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 50), st.floats(1, 1e3))
def test_the_budget_ends_after_a_whole_step(sizes, gap, samples):
  phases = [(gap * n, size) for n, size in enumerate(sizes)]
  end, position = whole_steps(phases, samples), 0
  while position < end:
    position += next(size for at, size in reversed(phases) if at <= position)
  assert position == end
  assert end <= max(samples, phases[-1][0] + sum(sizes)) + sizes[-1]


def test_half_and_twice_the_chips():
  one = place_named("v5p-128", 1)
  assert one
  assert (one.chips, str(one.half()), str(one.double())) == (64, "v5p-64", "v5p-256")
  full = place_named("v5e-256", 2)
  assert full
  double = full.double()
  assert double
  assert (str(full.half()), double.chips) == ("v5e-256", 1024)
  least = place_named("v5e-1", 1)
  assert least
  assert least.half() is None
  assert place_named("", 1) is None


def test_a_run_without_a_measurement_is_asked_for_none(folder):
  assert measured_by("", 1e9) == []
  with pytest.raises(UserError):
    measured_by(str(folder), 1e9)


def test_numbers_are_short():
  assert [short(value) for value in (999.9e3, 3.1e6, 140e9, 512, 0.25)] == [
    "1M",
    "3.1M",
    "140B",
    "512",
    "0.25",
  ]
  assert math.isclose(growth_to(1.0, 1.0), 0.53)


def test_what_is_advised_trains(capsys, folder):
  (folder / "text.txt").write_text("".join(f"line {n} of the text\n" for n in range(300)))
  small = {**SMALLEST, "dataset_path": "text.txt", "eval_interval": -1, "generate_length": 0}
  small |= {"write_report": "false", "dataset_cache_directory": "cache", "total_tokens": 20_000}
  keys = [f"{key}={value}" for key, value in small.items()]
  result = answer(capsys, "config=base", *keys, "compile_topology=v5e-8", "data_overhead=10")
  assert len(result["phases"]) > 1
  assert train.main(["config=advice.yml", "enable_checkpointing=false"]) == 0
  records = read_metrics(folder / "runs" / "first_run")
  assert records[-1]["tokens"] == result["run"]["tokens"]
  assert records[-1]["step"] == result["run"]["steps"]
  sizes = [record["global_batch_to_train"] for record in records if record["step"]]
  told = [one["samples_per_step"] for one in result["phases"] for _ in range(one["steps"])]
  assert sizes == told


RL = ["config=configs/post_train/rl.yml"]


@pytest.fixture
def configs(folder: pathlib.Path) -> pathlib.Path:
  root = pathlib.Path(__file__).resolve().parent.parent
  (folder / "configs").symlink_to(root / "configs")
  return folder


def test_completions_are_divided_into_prompts_and_completions(capsys, configs):
  text = ask(capsys, *RL, "completions=2048", "compile_topology=v5p-128")
  assert all(len(line) <= 80 for line in text.splitlines())
  assert text.startswith("256 prompts × 8 completions: 2,048 in all a step\n")
  for words in ("DAPO 2025", "IsoCompute 2026", "is sampling"):
    assert words in text
  assert plan_command(["config=advice.yml", "--json"]) == 0
  planned = json.loads(capsys.readouterr().out)["rl"]
  assert (planned["batch_size"], planned["num_generations"]) == (256, 8)
  told = ask(capsys, *RL, "--explain")
  assert "policy-critical: noise = between prompts / B + within prompts / (B · K)\n" in told
  assert "But: GRPO with verified rewards" in told
  # Every microbatch of completions has a timetable of its own, with a bubble.
  place = *RL, "completions=2048", "compile_topology=v5p-128", "base_num_decoder_layers=4"
  stages = "pipeline_schedule=1f1b", "ici_pipeline_parallelism=4"
  whole, staged = (answer(capsys, *place, *more)["training_seconds"] for more in ((), stages))
  assert staged > 1.2 * whole


def test_measured_noise_decides_between_prompts_and_completions(capsys, configs):
  run = configs / "runs" / "small"
  run.mkdir(parents=True)
  for sampling, fewest in ((0.05, (64, 2)), (0.999, (8, 16))):
    record = {"gns/total": 50.0, "gns/total_completions": 400.0, "gns/sampling": sampling}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    result = answer(capsys, *RL, "from_run=runs/small")
    steps = {(one["prompts"], one["generations"]): one["steps"] for one in result["shapes"]}
    # (S/Smin) = 1 + noise / P, with the sampling part as 1 / (G − 1).
    expected = {(p, g): 1 + 50 * (1 - sampling + sampling * 7 / (g - 1)) / p for p, g in steps}
    least = min(expected.values())
    assert steps == pytest.approx({shape: each / least for shape, each in expected.items()})
    best = min(steps, key=lambda shape: steps[shape])
    assert (best == fewest) == (sampling < 0.5)
    assert result["keys"] == {"batch_size": best[0], "num_generations": best[1]}


def test_mistakes_about_completions_are_refused(capsys, configs):
  assert "completions=3072" not in refusal(capsys, *LLAMA, "completions=2048")
  assert "for example completions=32" in refusal(capsys, *RL, "completions=31")
  assert "measured no noise of its policy gradient" in refusal(capsys, *RL, "from_run=runs/x")
  stages = "compile_topology=v5e-16", "pipeline_schedule=1f1b", "dcn_pipeline_parallelism=2"
  assert "do not divide 1 × 16" in refusal(capsys, *RL, *stages, "base_num_decoder_layers=4")


def test_compiling_takes_the_place_of_the_estimate(capsys, folder, monkeypatch):
  """With a stand-in for the process that compiles: it is called as it must be, and its report read."""
  called: list[list[str]] = []

  def compiles(command: list[str], check: bool) -> subprocess.CompletedProcess:
    del check
    called.append(command)
    # The keys are those of a configuration that works.
    config = load_config(command[3:])
    assert config.run.total_tokens % (768 * 4096) == 0
    report = RunFolder.of(config.run).exploration
    report.parent.mkdir(parents=True)
    # The fastest size of all is one of another batch.
    fitting = [
      {"micro_batch_size": size, "global_batch_to_train": batch, "utilisation": 0.5}
      | {"step_seconds": 5.0}
      for size, batch in (("4", 1024), ("3", 768))
    ]
    report.write_text(json.dumps({"fitting": fitting}))
    return subprocess.CompletedProcess(command, 0)

  monkeypatch.setattr(subprocess, "run", compiles)
  text = ask(capsys, *LLAMA, "--explore", "--plot", "advice.html")
  assert "micro_batch_size=3, 5 s a step at a utilisation of 50%" in text
  assert load_config(["config=advice.yml"]).batch.micro_batch_size == 3
  [command] = called
  assert command[1:4] == ["-m", "maxbatch.train", "config=advice.yml"]
  assert {"compile_only=true", "micro_batch_size=explore", "batch_schedule=[]"} <= set(command)
  page = (folder / "advice.html").read_text()
  assert "Zhang 2024, by data" in page
  assert "knees" in page
  assert "none is named" in refusal(capsys, "config=base", "total_tokens=5e9", "--explore")
