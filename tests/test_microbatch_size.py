"""The choice tied together: one line, remembered, agreed on by all processes, and truly the largest."""

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import lowered_once
import optax
import pytest
from lowered_once import lower_once
from several_processes import train
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.training.optimizer import OPTIMIZERS
from maxbatch.tuning import microbatch_size
from maxbatch.tuning.candidates import Candidate, candidates, sizes_of
from maxbatch.tuning.exploration import with_shared_rows
from maxbatch.tuning.microbatch_size import choose, explore_sizes, what_it_depends_on
from maxbatch.tuning.search import ProbeResult

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _lowers_once(monkeypatch):
  lower_once(monkeypatch)


def place(settings: Config | None = None) -> Target:
  settings = settings or config()
  return Target(jax.devices(), topology(settings.mesh, 8))


class Machine:
  """1.2 + 1.25 GiB per sample, of 15.75; counts what is asked of it."""

  def __init__(self, seconds: Callable[[int], float] = float):
    self.asked: list[int] = []
    self.seconds = seconds

  def __call__(self, candidate: Candidate) -> ProbeResult:
    size = int(candidate.per_device)
    self.asked.append(size)
    peak, capacity = round((1.2 + 1.25 * size) * GIB), round(15.75 * GIB)
    return ProbeResult(peak, capacity, peak <= capacity, self.seconds(size))


def auto(**keys: object) -> Config:
  return config(micro_batch_size="auto", **{"batch_size": 256} | keys)


def chosen(settings: Config, folder: pathlib.Path, **options: Any) -> tuple[Config, str, Machine]:
  """What is chosen, what is said, and the machine that was asked."""
  machine, lines = options.pop("machine", None) or Machine(), []
  result = choose(settings, place(), machine, folder, say=lines.append, **options)
  return result, "\n".join(lines), machine


def test_auto_becomes_a_number_and_the_line_says_why(tmp_path):
  result, said, _ = chosen(auto(), tmp_path)
  assert result == dataclasses.replace(
    auto(), batch=dataclasses.replace(auto().batch, micro_batch_size=Fraction(8))
  )
  assert result == config(batch_size=256, micro_batch_size=8)
  (file,) = tmp_path.iterdir()
  assert said == (
    "micro_batch_size auto: 8 samples per device (largest that fits of 1…32: 11.2 of 15.75 GiB; "
    f"next size 16 needs 21.2 GiB); remembered in {file}"
  )


def test_a_second_start_asks_nothing(tmp_path):
  first, _, _ = chosen(auto(), tmp_path)
  second, said, machine = chosen(auto(), tmp_path)
  assert machine.asked == []
  assert second == first
  (file,) = tmp_path.iterdir()
  assert said == (
    "micro_batch_size auto: 8 samples per device (largest that fits of 1…32: 11.2 of 15.75 GiB; "
    f"next size 16 needs 21.2 GiB) (remembered from {file}; --retune measures again)"
  )


def test_forgetting_measures_anew(tmp_path):
  chosen(auto(), tmp_path)
  result, said, machine = chosen(
    auto(), tmp_path, retune=True, machine=Machine(lambda n: 1.0 if n == 4 else float(n))
  )
  assert machine.asked
  assert result.batch.micro_batch_size == 4
  assert "300% more samples per second, measured, than 8, the largest that fits" in said
  assert chosen(auto(), tmp_path)[0] == result


def test_without_a_batch_it_follows_from_the_size(tmp_path):
  result, said, _ = chosen(auto(batch_size=-1, gradient_accumulation_steps=3), tmp_path)
  assert result.batch.micro_batch_size == 8
  assert "; batch_size follows: 192; remembered in" in said
  _, said, _ = chosen(auto(batch_size=-1, gradient_accumulation_steps=3), tmp_path)
  assert "; batch_size follows: 192 (remembered from" in said


def test_without_any_size_the_batch_is_that_of_a_run_without_auto(tmp_path):
  result, said, machine = chosen(auto(batch_size=-1), tmp_path)
  assert result == config(batch_size=32, micro_batch_size=4)
  without = config(), place()
  assert (
    plan_batches(without[0].batch, without[0].run, without[1].layout).global_batch_to_train == 32
  )
  assert max(machine.asked) == 4
  default = "batch_size is the default: 32, 4 samples for each of 8 devices"
  assert said.startswith("micro_batch_size auto: 4 samples per device (largest that fits of 1…4: ")
  assert f"; {default}; remembered in" in said
  again, said, _ = chosen(auto(batch_size=-1), tmp_path)
  assert again == result
  assert f"; {default} (remembered from" in said


def test_a_number_is_left_alone(tmp_path):
  for value in (4, "none", -1):
    settings = config(micro_batch_size=value, batch_size=256)
    result, said, machine = chosen(settings, tmp_path)
    assert (result, said, machine.asked) == (settings, "", [])


@pytest.mark.parametrize("content", ["{", '{"choice": 1}', None])
def test_a_damaged_memory_is_said_and_replaced(tmp_path, content):
  chosen(auto(), tmp_path)
  (file,) = tmp_path.iterdir()
  if content is None:
    content = json.dumps(json.loads(file.read_text()) | {"choice": {"micro_batch_size": "7"}})
  file.write_text(content)
  result, said, machine = chosen(auto(), tmp_path)
  assert said.startswith(f"micro_batch_size auto: {file} ")
  assert said.splitlines()[0].endswith("; measured again")
  assert machine.asked
  assert result.batch.micro_batch_size == 8
  assert chosen(auto(), tmp_path)[2].asked == []


def test_a_folder_that_cannot_be_written_costs_the_memory_not_the_run(tmp_path):
  folder = tmp_path / "file"
  folder.write_text("")
  result, said, _ = chosen(auto(), folder)
  assert result.batch.micro_batch_size == 8
  assert said.endswith(f"; not remembered, {folder} cannot be written: Not a directory") or (
    said.endswith(f"; not remembered, {folder} cannot be written: File exists")
  )


CHANGES = [
  {"base_mlp_dim": 128},
  {"remat_policy": "full"},
  {"dtype": "bfloat16"},
  {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"},
  {"scan_layers": False},
  {"opt_type": "sgd"},
  {"gradient_clipping_threshold": 0},
  {"max_target_length": 32},
  {"batch_size": 512},
  {"accumulation": "streamed"},
  {"packing": False},
  {"device_memory_gb": 15},
  {"steps": -1, "total_samples": 25600 + 8},
  {"batch_schedule_type": "linear", "batch_schedule_length": 100, "batch_size_start": 32},
  {"compile_topology": "v5e-16"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_any_change_of_what_it_depends_on_measures_anew(tmp_path, change):
  chosen(auto(), tmp_path)
  assert chosen(auto(**change), tmp_path)[2].asked


def test_what_does_not_matter_keeps_the_choice(tmp_path):
  chosen(auto(), tmp_path)
  same = auto(learning_rate=0.1, run_name="other", init_weights_seed=5, steps=17)
  assert chosen(same, tmp_path)[2].asked == []
  # What attention=auto takes on a CPU: the same program.
  assert chosen(auto(attention="dot_product"), tmp_path)[2].asked == []


def test_a_registered_optimizer_with_a_larger_state_measures_anew(tmp_path, monkeypatch):
  name, adamw = "test_autotune_optimizer", OPTIMIZERS["adamw"]
  monkeypatch.setitem(OPTIMIZERS, name, adamw)
  settings = auto(opt_type=name)
  chosen(settings, tmp_path)
  assert chosen(settings, tmp_path)[2].asked == []

  def with_average(keys: Any, axes: Any) -> optax.GradientTransformation:
    return optax.chain(optax.trace(0.9), adamw(keys, axes))

  monkeypatch.setitem(OPTIMIZERS, name, with_average)
  lowered_once.forget()
  assert chosen(settings, tmp_path)[2].asked


def depends_on(layout: Topology | None = None, lowered: Any = None) -> dict[str, Any]:
  settings, where = auto(), place()
  where = dataclasses.replace(where, layout=layout or where.layout)
  sizes = candidates(settings.batch, settings.run, where.layout)
  return what_it_depends_on(settings, where, sizes, lowered)


def test_devices_versions_code_and_variables_matter(monkeypatch):
  base = depends_on()
  assert json.loads(json.dumps(base)) == base
  others = [depends_on(Topology.of(data=4, fsdp=2))]
  # A CPU has no slices to make a mesh of.
  others.append(depends_on(Topology({"data": 4}, {"data": 2}), lambda *_: base["lowered"]))
  monkeypatch.setenv("XLA_FLAGS", "--xla_another=1")
  others.append(depends_on())
  monkeypatch.undo()
  monkeypatch.setattr(importlib.metadata, "version", lambda package: "9.9")
  others.append(depends_on())
  monkeypatch.undo()
  monkeypatch.setattr(microbatch_size, "lowered_hash", lambda *_: "edited")
  others.append(depends_on())
  assert all(other != base for other in others)
  assert set(base["versions"]) == {"maxbatch", "flax", "optax"}
  assert {"jax", "jaxlib", "libtpu", "XLA_FLAGS", "LIBTPU_INIT_ARGS"} <= set(base["compiler"])
  assert base["devices"]["kind"] == "cpu"
  assert base["devices"]["count"] == 8


def test_nothing_fits_names_the_ways_out(tmp_path):
  def small(candidate: Candidate) -> ProbeResult:
    return ProbeResult(21 * GIB + 1, 16 * GIB, False)

  with pytest.raises(UserError) as caught:
    choose(auto(), place(), small, tmp_path)
  assert str(caught.value) == (
    "not even micro_batch_size=1, the smallest size allowed, fits: 1 sample per device in a microbatch "
    "needs 21 of 16 GiB; what helps: remat_policy=full (now none), a larger ici_fsdp_parallelism "
    "(now 1), a smaller max_target_length (now 16), or device_memory_gb=22 if the devices have "
    "that much"
  )
  assert "remat_policy" not in microbatch_size.memory_suggestions(auto(remat_policy="full"))
  long = microbatch_size.memory_suggestions(auto(max_target_length=32768))
  assert long.endswith("ici_context_parallelism=2: devices share the tokens of rows")
  assert list(tmp_path.iterdir()) == []


# --- explore --------------------------------------------------------------------------------------


def exploring(value: str = "explore", **keys: object) -> Config:
  return config(micro_batch_size=value, **{"batch_size": 256, "compile_only": True} | keys)


def test_explore_tries_all_in_range_and_recommends_the_best():
  machine, lines = Machine(lambda n: 1.0 if n == 4 else float(n)), []
  settings = exploring("{explore: {min: 2, max: 16}}")
  result, found = explore_sizes(settings, place(), machine, say=lines.append)
  assert sorted(machine.asked) == [2, 4, 8, 16]
  assert result.batch.micro_batch_size == 4
  assert found.as_dict()["recommended"] == "4"
  infos = [line for line in lines if line.startswith("INFO: Current recommended micro_batch_size")]
  assert len(infos) == 3  # The first of all, 16, does not fit.
  assert infos[-1].startswith(
    "INFO: Current recommended micro_batch_size: 4, measured performance: 4.00x base, "
    "exploration progress: 100%, confidence: "
  )
  assert str(found) in lines[-1]


def test_explore_tries_sizes_that_do_not_divide_the_batch_and_names_the_nearest_that_they_do():
  # 8 samples on 8 devices: 1 is all that divides them.
  machine, lines = Machine(lambda n: 1 + float(n)), []
  settings = exploring(batch_size=8)
  result, found = explore_sizes(settings, place(), machine, say=lines.append)
  assert sorted(machine.asked) == [1 << n for n in range(8)]  # To 2,048 tokens.
  assert (result.batch.micro_batch_size, result.batch.batch_size) == (8, 64)
  assert [one.candidate.suggested_batches() for one in found.ranked[:2]] == [(64, 128), (32, 64)]
  assert lines[-1].endswith(
    "micro_batch_size=8 does not divide the batch that is given; the nearest that it does is "
    "batch_size=64. For the one given, 8, the fastest is 1."
  )


def test_long_rows_are_explored_on_meshes_whose_devices_share_them():
  lines, known = [], {}

  def machine(one: Candidate) -> ProbeResult:
    tokens = float(one.per_device) * 65536
    known.setdefault(one.context, []).append(one.per_device)
    return ProbeResult(int(tokens * GIB), 40000 * GIB, tokens < 40000, 1 + tokens / 1e5)

  result, found = explore_sizes(
    exploring("explore", max_target_length=65536, batch_size=8), place(), machine, say=lines.append
  )
  assert {key: min(sizes) for key, sizes in known.items()} == {
    1: 1,
    2: Fraction(1, 2),
    4: Fraction(1, 4),
    8: Fraction(1, 8),
  }
  assert found.best is not None
  assert (result.mesh.ici_context_parallelism, result.batch.micro_batch_size) == (2, Fraction(1, 2))
  assert found.best.as_dict()["ici_context_parallelism"] == 2
  assert "0.5 context=2" in lines[-1]
  with_axis = exploring("explore", max_target_length=65536, batch_size=8, ici_context_parallelism=4)
  assert {one.context for one in with_shared_rows(sizes_of, with_axis, place().layout)} == {None}


@pytest.mark.parametrize(
  ("fits", "seconds", "chosen", "tried"),
  [
    # 1 sample does not fit a device, a half does; a quarter is no faster.
    (lambda tokens, context: tokens < 40000, lambda tokens: 1 + tokens / 1e5, (2, "0.5"), 6),
    # All fits, and to share rows is slower.
    (lambda tokens, context: True, lambda tokens: tokens, (1, "1"), 3),
    # Sharing is faster each time.
    (lambda tokens, context: True, lambda tokens: tokens**2, (8, "0.125"), None),
  ],
)
def test_auto_lets_devices_share_long_rows_as_far_as_that_is_faster(
  fits, seconds, chosen, tried, tmp_path
):
  asked, lines = [], []

  def machine(one: Candidate) -> ProbeResult:
    assert one not in asked
    asked.append(one)
    tokens = float(one.per_device) * 65536
    return ProbeResult(int(tokens * GIB), 40000 * GIB, fits(tokens, one.context), seconds(tokens))

  settings = auto(max_target_length=65536, batch_size=8)
  find = functools.partial(with_shared_rows, sizes_of)
  for times in range(2):
    result = choose(settings, place(), machine, tmp_path, find=find, say=lines.append)
    size = result.batch.micro_batch_size
    assert (result.mesh.ici_context_parallelism, size) == (chosen[0], Fraction(chosen[1]))
    assert (f"ici_context_parallelism={chosen[0]}; " in lines[times]) == (chosen[0] > 1)
    assert ("remembered from" in lines[times]) == times
  assert tried in (None, len(asked))


@pytest.mark.parametrize(
  ("keys", "batches"),
  [
    ({"batch_size": 96}, {1: 96, 2: 96, 3: 96, 4: 96, 6: 96, 8: 128, 12: 96, 16: 128, 32: 256}),
    ({"batch_size": -1, "tokens_per_step": 96 * 16}, {1: 96, 2: 96, 8: 128, 16: 128, 32: 256}),
    # A schedule has no batch near it.
    ({"batch_size": -1, "batch_schedule": "[[0, 48]]"}, {1: 48, 2: 48, 3: 48, 6: 48}),
  ],
)
def test_the_batch_of_each_size_that_is_explored_has_a_plan(keys, batches):
  settings = exploring(**keys)
  sizes = {int(one.per_device): one for one in sizes_of(settings, place().layout)}
  for size, batch in batches.items():
    assert sizes[size].batch == batch
    made = sizes[size].applied_to(settings)
    assert plan_batches(made.batch, made.run, place().layout).global_batch_to_train == batch


@pytest.mark.parametrize("compile_only", [True, False])
def test_choose_does_not_explore(tmp_path, compile_only):
  with pytest.raises(UserError, match="micro_batch_size=explore tries every size"):
    choose(exploring(compile_only=compile_only), place(), Machine(), tmp_path)


def test_explore_is_for_compile_only():
  with pytest.raises(UserError) as caught:
    explore_sizes(exploring(compile_only=False), place(), Machine())
  assert str(caught.value) == (
    "micro_batch_size=explore tries every size before it ranks them, and needs compile_only=true "
    "(now false); micro_batch_size=auto chooses one for a run"
  )


def test_policies_are_explored_beside_the_sizes():
  settings = exploring("{explore: {min: 2, max: 16}}", remat_policy="explore")

  def probe(candidate: Candidate) -> ProbeResult:
    factor = {"none": 4, "minimal": 3, "full": 1}.get(str(candidate.remat_policy), 2)
    peak = factor * int(candidate.per_device) * GIB
    slower = {"none": 0.0, "minimal": 0.1, "full": 1.0}.get(str(candidate.remat_policy), 0.9)
    seconds = float(candidate.per_device) + slower
    return ProbeResult(peak, 16 * GIB, peak <= 16 * GIB, seconds)

  result, found = explore_sizes(settings, place(), probe, say=lambda line: None)
  assert found.total == 4 * 9  # all but those that offload, for which CPUs have nowhere
  assert (result.batch.micro_batch_size, result.model.remat_policy) == (4, "none")
  assert {one.candidate.remat_policy for one in found.ranked} >= {"none", "full"}
  assert len(found.tried) < found.total / 2


@pytest.mark.parametrize("keys", [{"micro_batch_size": 4}, {"micro_batch_size": "auto"}])
def test_a_policy_is_explored_only_with_the_sizes(tmp_path, keys):
  settings = config(remat_policy="explore", batch_size=256, **keys)
  with pytest.raises(UserError) as caught:
    choose(settings, place(), Machine(), tmp_path)
  assert str(caught.value) == (
    "remat_policy=explore tries every size, and needs micro_batch_size=explore "
    f"compile_only=true (now micro_batch_size={keys['micro_batch_size']} compile_only=false); for "
    "a run, remat_policy=full"
  )


# --- several processes ----------------------------------------------------------------------------

_PROCESS = """
import pathlib, sys
import jax
from maxbatch.config.load import load_config
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import leave_with_others
from maxbatch.tuning.microbatch_size import choose
from maxbatch.tuning.search import ProbeResult

folder, *keys = sys.argv[1:]
config = load_config(["config=base", "micro_batch_size=auto", "batch_size=256", *keys])
place = find_devices(config)
number = str(jax.process_index())
asked = []

def probe(candidate):
  # Process 1 believes that little fits, and that the clock runs another way.
  size, fits = int(candidate.per_device), candidate.per_device <= (16 if number == "0" else 2)
  asked.append(size)
  seconds = size if number == "0" else size * size
  return ProbeResult(size, 16, fits, float(seconds))

assert broadcast_one_to_all({"number": number, "text": "a" * (10 + int(number))})["number"] == "0"
# To a file of its own: what Gloo writes to stdout, from its own threads, can split any line of it.
with open(pathlib.Path(folder) / f"{number}.txt", "w") as said:
  for _ in range(2):
    write = lambda line: print(line, file=said)
    chosen = choose(config, place, probe, pathlib.Path(folder) / number, say=write)
    print("chosen", chosen.batch.micro_batch_size, asked, file=said)
leave_with_others(0)
"""


def test_all_processes_take_process_0s_decision(tmp_path):
  command = [sys.executable, "-c", _PROCESS, str(tmp_path)]
  ended = train(2, ["num_simulated_devices=8"], command=command)
  assert [one.exit_code for one in ended] == [0, 0], ended
  spoken = [(tmp_path / f"{number}.txt").read_text().splitlines() for number in ("0", "1")]
  # The same path through the search in both; the second choice asks nothing.
  assert spoken[1] == ["chosen 16 [4, 16, 32, 8]"] * 2
  assert [line for line in spoken[0] if line.startswith("chosen")] == spoken[1]
  said = [line for line in spoken[0] if line.startswith("micro_batch_size auto: 16 samples")]
  assert [("remembered in" in line, "remembered from" in line) for line in said] == [
    (True, False),
    (False, True),
  ]
  # Only process 0 writes.
  assert {path.name for path in tmp_path.iterdir()} == {"0", "0.txt", "1.txt"}
