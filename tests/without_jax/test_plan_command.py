"""The plan command as people call it, and who loads what against placing every sample."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.host_loads import host_loads
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan_plot import plan_chart
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import slice_named
from maxbatch.plan import main
from maxbatch.plots.chart import Line

ROOT = Path(__file__).resolve().parents[2]
RAMP = ["batch_size=512", "micro_batch_size=8", "batch_schedule_type=doubling"]
RAMP += ["batch_schedule_length=30000", "batch_size_start=64"]


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert main(["config=base", *arguments]) == 0
  return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
  return json.loads(show(capsys, *arguments, "--json"))


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  assert main(["config=base", *arguments]) == 2
  return capsys.readouterr().err.removeprefix("error: ").strip()


PRINTED = """\
Given  batch_size=512, micro_batch_size=8
On     8 simulated devices, as a run where there is no accelerator; for others: num_devices

Batch plan
  num_devices                    8 devices = data 8 × fsdp 1 × tensor 1 × stage 1
  micro_batch_to_train          64 samples = 8 × per_device_batch_size 8
  global_batch_to_train        512 samples = 64 × gradient_accumulation_steps 8
  global_batch_to_load       1,024 samples = 512 × expansion_factor_real_data 2
  eval_batch                    64 samples = 8 × eval_per_device_batch_size 8
  tokens_per_step           65,536 tokens  = 512 × max_target_length 128
  total_samples            100,032 samples = sum of the phases, steps 411
  total_tokens          12,804,096 tokens  = 100,032 × 128

Loading
  hosts 0 to 1: 256 samples per step each
  hosts 2 to 3: read nothing, and get their samples from the others

Phases
     first   first       first                   per   micro-  learning
      step  sample       token  steps  batch  device  batches      rate
  1      0       0           0    157     64       8        1     0.003
  2    157  10,048   1,286,144     78    128       8        2     0.003
  3    235  20,032   2,564,096     39    256       8        4     0.003
  4    274  30,016   3,842,048    136    512       8        8     0.003
  4    410  99,648  12,754,944      1    384       8        6     0.003  the rest of the budget

Limits
  with this microbatch the global batch is a multiple of 64; nearest to 512: 448 and 576
  this batch divides over at most 512 devices; with per-device batch 8 also on 4 devices (16 microbatches) and 16 devices (4 microbatches)
  1 microbatch shape to compile, for up to 16 microbatches per step
  total_samples=100032 ends the run, with a partial last step of 384 samples
"""


def test_what_is_printed(capsys):
  text = show(
    capsys,
    *RAMP,
    "steps=-1",
    "total_samples=100_032",
    "num_hosts=4",
    "expansion_factor_real_data=2",
    "lr_schedule_type=constant",
    "warmup_steps=0",
  )
  assert text == PRINTED


def test_a_plan_of_a_million_steps_needs_no_jax():
  code = (
    "import sys; from maxbatch.plan import main; "
    "code = main(sys.argv[1:]); "
    "assert not {'jax', 'numpy', 'bokeh', 'jinja2'} & sys.modules.keys(); sys.exit(code)"
  )
  keys = ["config=base", "num_devices=100000", "num_hosts=12500", "steps=1_000_000", "--json"]
  keys += ["model_name=llama3-8b"]
  keys += ["batch_size=6_400_000", "micro_batch_size=1", "batch_schedule_type=linear"]
  keys += ["batch_schedule_length=1_000_000_000", "batch_size_start=100_000"]
  done = subprocess.run(
    [sys.executable, "-c", code, *keys], capture_output=True, text=True, cwd=ROOT, check=False
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert len(json.loads(done.stdout)["phases"]) == 64


def test_json_says_the_same(capsys):
  printed = facts(capsys, *RAMP)
  assert printed["given"] == ["batch_size=512", "micro_batch_size=8"]
  assert printed["sizes"]["gradient_accumulation_steps"] == 8
  phases = printed["phases"]
  assert [phase["global_batch_to_train"] for phase in phases] == [64, 128, 256, 512]
  assert phases[0]["learning_rate_first"] == pytest.approx(3e-3 / 40)
  for before, after in itertools.pairwise(phases):
    taken = before["steps"] * before["global_batch_to_train"]
    assert before["first_sample"] + taken == after["first_sample"]
    assert after["first_token"] == after["first_sample"] * 128


def test_too_few_tokens_of_an_expert_limit_a_plan(capsys):
  keys = [
    "num_simulated_devices=8",
    "max_target_length=64",
    "base_moe_mlp_dim=32",
    "num_experts_per_tok=2",
  ]
  few, enough = (
    facts(capsys, *keys, f"num_experts={experts}", "batch_size=64")["limits"]
    for experts in (32, 16)
  )
  assert few[-1].startswith(
    "an expert sees 256 tokens of a step (4,096 tokens · num_experts_per_tok=2 / "
  )
  assert few[-1].endswith("which 128 samples a step give")
  assert few[:-1] == enough


def test_the_coupling_is_shown(capsys):
  keys = ["lr_schedule_type=constant", "warmup_steps=0", "learning_rate=1"]
  printed = facts(capsys, *RAMP, *keys, "learning_rate_batch_coupling=linear")
  rates = [phase["learning_rate_first"] for phase in printed["phases"]]
  assert rates == [0.125, 0.25, 0.5, 1.0]


def test_phases_that_are_not_reached_are_named(capsys):
  assert facts(capsys, *RAMP, "steps=200")["phases_not_reached"] == [3, 4]
  assert "  without a step: 3, 4\n" in show(capsys, *RAMP, "steps=200")


def test_a_phase_of_another_shape_says_so(capsys):
  text = show(capsys, "batch_schedule=[[0, 8], [80, 64]]")
  assert re.search(r"^ +1 .* another shape$", text, re.MULTILINE)
  assert "2 microbatch shapes to compile" in text


def test_the_number_of_devices_can_be_derived(capsys):
  printed = facts(capsys, "batch_size=512", "micro_batch_size=64", "num_devices=-1")
  assert printed["mesh"]["data"] == 8


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("v5e-256", (256, 64)),
    ("v5litepod-16", (16, 4)),
    ("v5e-8", (8, 1)),
    ("v5e-1", (1, 1)),
    ("v6e-256", (256, 64)),
    ("v5p-8", (4, 1)),
    ("v5p-128", (64, 16)),
    ("v4-32", (16, 4)),
  ],
)
def test_slices_by_name(capsys, name, expected):
  result = slice_named(name)
  assert (result.num_devices, result.num_hosts) == expected
  printed = facts(capsys, f"compile_topology={name}")
  assert (printed["sizes"]["num_devices"], printed["num_hosts"]) == expected


def test_several_slices(capsys):
  printed = facts(
    capsys, "compile_topology=v5e-16", "compile_topology_num_slices=2", "dcn_data_parallelism=2"
  )
  assert (printed["num_slices"], printed["num_hosts"], printed["mesh"]["data"]) == (2, 8, 32)


ERRORS = {
  "compile_topology=v5e-100": (
    "compile_topology=v5e-100: v5e has no slice of this size; nearest: compile_topology=v5e-128. "
    "Known: 1, 4, 8, 16, 32, 64, 128, 256"
  ),
  "compile_topology=v5x-8": (
    "compile_topology=v5x-8: unknown slice. Did you mean v5p? "
    "Known: v4-4096, v5p-17920, v5e-256, v6e-256, tpu7x-18432, a100-16384, h100-16384, "
    "h200-16384, b200-16384, gb200-16344 and smaller"
  ),
  "num_hosts=3": "num_hosts=3 must divide the 8 devices evenly; for example num_hosts=2",
  "num_devices=many": (
    "command line: num_devices=many: num_devices must be a whole number, at least 1, or -1. "
    "A value that works: num_devices=1"
  ),
  "num_simulated_devices=0": (
    "num_simulated_devices=0 means this machine's devices, which a plan does not look at; "
    "for example num_devices=8 or compile_topology=v5e-8"
  ),
  "num_hosts=0": (
    "command line: num_hosts=0: num_hosts must be at least 1. The nearest value that works: "
    "num_hosts=1"
  ),
  "--plot": "--plot : name a file; for example --plot batch.html",
  "--plot=a.gif": (
    "--plot a.gif: a picture is a page to be opened in a browser, which zooms into it and saves it "
    "as PNG; name a file that ends in .html; for example --plot batch.html"
  ),
  "--json=true": "--json=true: --json takes no value; write --json",
  "--plots": (
    "command line: there is no option '--plots'. Did you mean --plot? --help lists every option."
  ),
  "num_device=8": (
    "command line: there is no key 'num_device'. Did you mean num_devices? --help all lists every "
    "key."
  ),
  "num_devices": "'num_devices' is not of the form key=value. Did you mean num_devices=VALUE?",
}


def test_a_plan_says_that_it_assumes_simulated_devices(capsys):
  assumption = (
    "8 simulated devices, as a run where there is no accelerator; for others: num_devices"
  )
  assert f"On     {assumption}\n" in show(capsys)
  assert assumption not in show(capsys, "num_devices=8")


@pytest.mark.parametrize("argument", ERRORS)
def test_errors(capsys, argument):
  assert error(capsys, argument) == ERRORS[argument]


def test_a_topology_and_a_number_of_devices(capsys):
  assert error(capsys, "compile_topology=v5e-8", "num_devices=4") == (
    "compile_topology=v5e-8 already says how many devices there are; leave out num_devices=4"
  )


@pytest.mark.parametrize(
  ("keys", "line"),
  [
    (
      ["micro_batch_size=auto", "batch_size=96"],
      "Open   micro_batch_size=auto chooses from 1, 2, 3, 4, 6, 12 samples per device and "
      "microbatch; "
      "below as if it were 12 samples",
    ),
    (
      ["micro_batch_size=auto"],
      "Open   micro_batch_size=auto chooses from 1, 2, 4 samples per device and microbatch; "
      "batch_size is the default: 32, 4 samples for each of 8 devices; below as if it were 4 "
      "samples",
    ),
    (
      ["micro_batch_size={explore: {min: 2, max: 8}}"],
      "Open   micro_batch_size={explore: {min: 2, max: 8}} chooses from 2, 4, 8 samples per device "
      "and microbatch, and batch_size follows; below as if it were 4 samples",
    ),
  ],
)
def test_what_is_to_be_chosen_is_said(capsys, keys, line):
  lines = show(capsys, *keys).splitlines()
  assert lines[0].startswith("Given  ")
  assert lines[1] == line
  assert f"Open   {facts(capsys, *keys)['choice']}; below" in line
  assert keys[0] in lines[0]


def test_what_explore_ranks_is_a_table(capsys):
  assert "\n".join(
    [
      "Sizes to explore",
      "  micro_batch_size  microbatch  accumulation  batch",
      "                 1           8            12     96",
      "                 2          16             6     96",
      "                 3          24             4     96",
      "",
    ]
  ) in show(capsys, "micro_batch_size={explore: {min: 1, max: 3}}", "batch_size=96")
  assert "Sizes to explore" not in show(capsys, "micro_batch_size=auto", "batch_size=96")


def test_nothing_is_open_where_the_size_is_known(capsys):
  assert "Open" not in show(capsys, "batch_size=96")
  assert facts(capsys, "batch_size=96")["choice"] == ""


def test_a_choice_that_other_keys_have_made_is_refused(capsys):
  printed = error(capsys, "micro_batch_size=auto", "per_device_batch_size=2")
  assert "already gives the size that micro_batch_size=auto is to choose" in printed


def test_help(capsys):
  text = show(capsys, "--help")
  assert text.startswith("Usage: maxbatch plan config=FILE")
  assert "compile_topology=v5e-256" in text
  assert "  batch_size=-1  (whole number, at least 1, or -1)" in text


def test_the_plot_shows_every_phase(capsys, tmp_path):
  config = load_config(["config=base", *RAMP])
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  rate = learning_rate(config.optimizer, plan, config.run.schedule_unit)
  above, below = plan_chart(plan, rate).panels
  [batch], [curve] = above.marks, below.marks
  assert isinstance(batch, Line)
  assert isinstance(curve, Line)
  assert len(set(batch.y)) == 4
  assert (batch.x[0][0], batch.x[0][-1]) == (0, plan.total_samples)
  assert len(curve.y) > 20
  file = tmp_path / "out.html"
  show(capsys, *RAMP, "run_name=a < $b$", "--plot", str(file))
  assert "<h1>a &lt; $b$</h1>" in file.read_text()
  assert error(capsys, *RAMP, "--plot", str(tmp_path / "no" / "out.html")).endswith(
    "cannot be written: No such file or directory; for example --plot new-out.html"
  )


# --- who loads what ------------------------------------------------------------------------------


def plan_of(num_devices: int, *keys: str) -> BatchPlan:
  config = load_config(["config=base", *keys])
  return plan_batches(config.batch, config.run, topology(config.mesh, num_devices))


def expanded(batch: int, factor: Fraction, num_devices: int) -> BatchPlan:
  plan = plan_of(num_devices)
  return dataclasses.replace(
    plan,
    global_batch_to_train=batch,
    global_batch_to_load=int(batch * factor),
    expansion_factor_real_data=factor,
  )


@settings(max_examples=examples(60))
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_without_expansion_a_host_reads_what_its_devices_take(hosts, local, tensor, rows):
  devices = hosts * local * tensor
  keys = [f"ici_tensor_parallelism={tensor}", f"batch_size={rows * hosts * local}"]
  plan = plan_of(devices, *keys)
  num_hosts = hosts * tensor  # So that a group of devices may lie on several hosts.
  groups_of_host = [
    {device // tensor for device in range(host * local, (host + 1) * local)}
    for host in range(num_hosts)
  ]
  expected = [len(groups) * rows for groups in groups_of_host]
  results = [one.samples for one in host_loads(plan, num_hosts) for _ in range(one.num_hosts)]
  assert results == expected


@settings(max_examples=examples(60))
@given(st.integers(1, 12), st.integers(1, 6), st.fractions(1, 14, max_denominator=3))
def test_with_expansion_the_first_hosts_read_everything_once(hosts, rows, factor):
  plan = expanded(6 * rows * hosts, factor, hosts)
  loads = host_loads(plan, hosts)
  samples = [one.samples for one in loads for _ in range(one.num_hosts)]
  # The first ones read what they use, and what the others use is dealt out.
  loading = -(-hosts // factor)
  shares = [0] * hosts
  for host in range(hosts):
    shares[host % loading] += 6 * rows
  assert samples == (shares if factor > 1 else [6 * rows] * hosts)
  assert sum(samples) == plan.global_batch_to_train


def test_hosts_of_a_padded_batch():
  keys = ["pad_batch=true", "batch_size=9"]
  assert [one.samples for one in host_loads(plan_of(8, *keys), 4)] == [4, 1, 0]
  keys = ["pad_batch=true", "batch_size=100", "micro_batch_size=3"]
  assert [one.samples for one in host_loads(plan_of(8, *keys), 2)] == [52, 48]


def test_hosts_whose_devices_share_samples():
  keys = ["batch_size=6", "ici_data_parallelism=2", "ici_tensor_parallelism=2"]
  assert [one.samples for one in host_loads(plan_of(4, *keys), 4)] == [3]
  expanded = plan_of(4, *keys, "expansion_factor_real_data=4/3")
  assert [one.samples for one in host_loads(expanded, 4)] == [3, 0, 3, 0]


def loads_of(num_hosts: int, *keys: str) -> list[int]:
  loads = host_loads(plan_of(8, "batch_size=24", *keys), num_hosts)
  return [one.samples for one in loads for _ in range(one.num_hosts)]


def test_the_hosts_that_load_are_those_that_a_key_names():
  assert loads_of(4, "expansion_factor_real_data=4/3") == [9, 9, 6, 0]
  assert loads_of(4, "expansion_factor_real_data=4/3", "loading_hosts=[1,2,3]") == [0, 9, 9, 6]
  assert loads_of(4, "expansion_factor_real_data=2", "loading_hosts=[3,1]") == [0, 12, 0, 12]
  assert loads_of(4, "expansion_factor_real_data=1/2", "loading_hosts=[2]") == [0, 0, 24, 0]
  assert loads_of(4, "loading_hosts=[2,3]") == [0, 0, 12, 12]
  assert loads_of(1, "loading_hosts=[0]") == [24]


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    (
      ["loading_hosts=[4]"],
      "loading_hosts=[4]: there are 4 hosts, 0 to 3; for example loading_hosts=[3]",
    ),
    (
      ["loading_hosts=[1,1]"],
      "loading_hosts=[1,1] names a host twice; for example loading_hosts=[1]",
    ),
    (
      ["loading_hosts=[0]", "expansion_factor_real_data=2"],
      "loading_hosts=[0] names 1 hosts, but expansion_factor_real_data=2 lets 2 of 4 load; for "
      "example loading_hosts=[2,3], or expansion_factor_real_data=-1",
    ),
  ],
)
def test_hosts_that_cannot_load_are_refused(keys, expected):
  with pytest.raises(UserError) as caught:
    loads_of(4, *keys)
  assert str(caught.value) == expected
  loads_of(4, *keys[1:], expected.split("for example ")[1].split(",  or")[0].split(", or")[0])


@pytest.mark.parametrize(
  ("keys", "load"),
  [
    # A partial last step of 16 samples.
    (
      "batch_size=64 micro_batch_size=2 steps=-1 total_samples=144 expansion_factor_real_data=1/32",
      "a load of 0.5 samples for a step of 16 samples",
    ),
    # The first phase has another microbatch than the run.
    (
      "batch_schedule=[[0,48],[96,32]] micro_batch_size=4 accumulation=streamed "
      "expansion_factor_real_data=1/16",
      "a load of 1.5 samples for a microbatch of 24 samples",
    ),
    # Batches that the noise scale may decide on.
    (
      "batch_schedule=gns gns=all batch_size=32 micro_batch_size=1 steps=-1 total_samples=3200 "
      "schedule_unit=samples expansion_factor_real_data=1/32",
      "a load of 0.25 samples for a step of 8 samples",
    ),
  ],
  ids=["partial step", "phase", "steered"],
)
def test_loads_of_parts_of_samples_are_refused_with_an_offer_that_works(capsys, keys, load):
  message = error(capsys, *keys.split())
  assert f" makes {load}, as this run has or may come to; loads must be whole " in message
  offer = re.search(r"for example (expansion_factor_real_data=\S+)$", message)
  assert offer
  show(capsys, *keys.split(), offer[1])


@pytest.mark.parametrize("page", ["docs/configuration.md"])
def test_the_example_of_an_exact_size_is_one_that_the_plan_accepts(page, capsys):
  text = " ".join((ROOT / page).read_text().split())
  shown = re.search(
    r"`(per_device_batch_size=[\d.]+)` on (\d+) devices.*?`(\w+=\d+)`.*? is 29", text
  )
  assert shown
  size, devices, axis = shown.groups()
  sizes = facts(capsys, size, f"num_devices={devices}", axis)["sizes"]
  assert sizes["global_batch_to_train"] == 29


def test_who_names_a_budget_or_a_slice_and_no_size_is_offered_auto(capsys):
  command = "maxbatch train config=base device_memory_gb=12 'run_name=a b' micro_batch_size=auto"
  asked = "device_memory_gb=12", "run_name=a b"
  text = show(capsys, *asked, "validate_only=true")
  assert (
    f"Auto   no key gives the microbatch; the largest that fits and is fast takes: {command}\n"
    in text
  )
  assert facts(capsys, *asked)["offer"].endswith(command)
  on_slice = facts(capsys, "compile_topology=v5e-16", "batch_size=512")["offer"]
  assert on_slice.endswith(
    "maxbatch train config=base compile_topology=v5e-16 batch_size=512 compile_only=true micro_batch_size=auto"
  )
  for size in ("per_device_batch_size=2", "gradient_accumulation_steps=2", "micro_batch_size=auto"):
    assert facts(capsys, *asked, size)["offer"] == ""
  assert facts(capsys, "batch_size=512")["offer"] == ""
