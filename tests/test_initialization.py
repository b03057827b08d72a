"""Runs that begin with the parameters, or the whole state, of another; and what they then save."""

import json
import pathlib
import shutil
from typing import Any, cast

import jax
import numpy as np
import pytest
from support import SMALLEST, config, stop_at

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.checkpoints import reading
from maxbatch.checkpoints.find import newest_record
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.checkpoints.record import _checksum
from maxbatch.conversion.source import frozen_folder
from maxbatch.errors import UserError
from maxbatch.modes.initialization import saving_frozen
from maxbatch.modes.run import run
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import load_config, main
from maxbatch.training.build import build_trainer
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer

ADAPTED: dict[str, object] = {"lora_rank": 2, "lora_alpha": 4, "lora_targets": "[query,value,down]"}


@pytest.fixture(scope="module", autouse=True)
def _trainers_of_adapters_are_shared():
  """Runs that do not save what is frozen trace their step once, as other runs of the suite do."""
  kept: dict[Trainer, Trainer] = {}

  def shared(trainer: Trainer, *others: Any) -> Trainer:
    result = saving_frozen(trainer, *others)
    return trainer if result is trainer else kept.setdefault(trainer, result)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("maxbatch.modes.prepare.saving_frozen", shared)
    yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("text") / "words.txt"
  path.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  return path


def arguments(text: pathlib.Path, folder: pathlib.Path, name: str, **keys: object) -> list[str]:
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "run_name": name,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
    "eval_samples": 8,
    "eval_interval": -1,
    "generate_length": 0,
    "per_device_batch_size": 1,
    "lr_schedule_type": "constant",
    "warmup_steps": 0,
    **SMALLEST,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]


def train(text: pathlib.Path, folder: pathlib.Path, name: str, **keys: object) -> TrainState:
  return run(load_config(arguments(text, folder, name, **keys)))[0]


def losses(folder: pathlib.Path, key: str = "eval/loss") -> list[float]:
  return [record[key] for record in read_metrics(folder) if key in record]


@pytest.fixture(scope="module")
def bases(text, tmp_path_factory) -> pathlib.Path:
  """Runs: `base` of 4 steps, with checkpoints 2 and 4, and `tuned`, its adapters after 3 steps."""
  folder = tmp_path_factory.mktemp("runs")
  train(text, folder, "base", steps=4, checkpoint_period=2)
  train(text, folder, "tuned", steps=3, load_parameters_path=folder / "base", **ADAPTED)
  return folder


@pytest.fixture
def folder(bases, tmp_path) -> pathlib.Path:
  """A copy, for tests that change what is there."""
  return shutil.copytree(bases, tmp_path / "runs")


def refused(capsys, given: list[str]) -> str:
  capsys.readouterr()
  assert main(given) == 2
  return capsys.readouterr().err


# --- load_parameters_path ------------------------------------------------------------------------


def test_parameters_alone_are_read_and_counting_begins_anew(
  text, bases, tmp_path, monkeypatch, capsys
):
  names, placed = set(), reading.placed

  def noting(arrays: Any, name: str, leaf: Any) -> jax.Array:
    names.add(name)
    return placed(arrays, name, leaf)

  monkeypatch.setattr(reading, "placed", noting)
  given = {"load_parameters_path": bases / "base", "steps": 1}
  assert main([*arguments(text, tmp_path, "next", **given), "validate_only=true"]) == 0
  begins = f"parameters of {bases}/base/checkpoints/4, with a new optimizer, at step 0"
  assert f"ok   initial state  {begins}\n" in capsys.readouterr().out
  # On another mesh, in another type.
  narrow = {"weight_dtype": "bfloat16", "weight_rounding": "nearest"}
  more = {"ici_fsdp_parallelism": 4, **narrow}
  state = train(text, tmp_path, "next", **given, **more)
  assert f"Begins  {begins}\n" in capsys.readouterr().out
  base, (first, *_) = losses(bases / "base")[-1], losses(tmp_path / "next")
  assert first == pytest.approx(base, rel=1e-3)
  assert np.asarray(state.opt_state.gradient_step) == 1
  assert state.params["embedding"].dtype == "bfloat16"
  assert read_metrics(tmp_path / "next")[-1]["samples"] == 8
  record = newest_record(bases / "base" / "checkpoints")
  assert record is not None
  assert names == {name for name in record["leaves"] if name.startswith("params/")}
  assert names < record["leaves"].keys()


def test_the_same_parameters_give_the_same_loss_to_the_bit(bases):
  assert losses(bases / "tuned")[0] == losses(bases / "base")[-1]


def test_an_earlier_step_can_be_named(text, bases, tmp_path, capsys):
  step = bases / "base" / "checkpoints" / "2"
  given = arguments(text, tmp_path, "next", load_parameters_path=step, steps=1)
  assert main([*given, "validate_only=true"]) == 0
  assert f"ok   initial state  parameters of {step}, " in capsys.readouterr().out


def test_frozen_parameters_are_not_saved_again_and_stay_as_they_are(bases):
  record = newest_record(bases / "tuned" / "checkpoints")
  assert record is not None
  saved = {name for name in record["leaves"] if name.startswith("params/")}
  assert {name.rpartition("/")[2] for name in saved} == {"lora_a", "lora_b"}
  # What it keeps of them are their fingerprints, which are those of the run that they came from.
  base = newest_record(bases / "base" / "checkpoints")
  assert base is not None
  note = record["notes"]["frozen"]
  assert note["folder"] == f"{bases}/base/checkpoints/4"
  assert {f"params/{name}": leaf for name, leaf in note["leaves"].items()} == {
    name: leaf for name, leaf in base["leaves"].items() if name.startswith("params/")
  }
  assert losses(bases / "tuned")[-1] < losses(bases / "tuned")[0]


def test_interrupted_and_resumed_is_bit_identical(text, bases, tmp_path, monkeypatch, capsys):
  given = {"steps": 3, "load_parameters_path": bases / "base", **ADAPTED}
  with monkeypatch.context() as patch:
    stop_at(patch, 2)
    train(text, tmp_path, "tuned", **given)
  capsys.readouterr()
  state = train(text, tmp_path, "tuned", **given)
  said = capsys.readouterr().out
  assert f"load_parameters_path={bases}/base was used when the run began" in said
  assert "Begins" not in said
  record = newest_record(bases / "tuned" / "checkpoints")
  assert record is not None
  expected = {name: leaf["fingerprint"] for name, leaf in record["leaves"].items()}
  results = {f"params/{name}": each for name, each in fingerprints(state.params).items()}
  assert results == {name: each for name, each in expected.items() if name.startswith("params/")}
  assert fingerprints(state.frozen) == {
    name: leaf["fingerprint"] for name, leaf in record["notes"]["frozen"]["leaves"].items()
  }
  assert losses(tmp_path / "tuned", "loss") == losses(bases / "tuned", "loss")


def test_a_run_can_begin_with_adapters_and_what_they_stand_beside(text, bases, tmp_path):
  given = {"load_parameters_path": bases / "tuned", "steps": 1, **ADAPTED}
  state = train(text, tmp_path, "next", **given, trainable="[layers/mlp/*]")
  assert losses(tmp_path / "next")[0] == losses(bases / "tuned")[-1]
  trained = jax.tree_util.tree_leaves_with_path(state.params)
  names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in trained}
  assert {"layers/mlp/up/kernel", "layers/attention/query/lora_a"} < names
  assert "layers/attention/query/kernel" not in names


def test_a_run_in_float8_begins_with_one_that_is_not_and_the_other_way(text, bases, tmp_path):
  for name, begun, given in (
    ("eight", bases / "base", {"quantization": "fp8"}),
    ("back", tmp_path / "eight", {}),
  ):
    train(text, tmp_path, name, steps=1, load_parameters_path=begun, **given)
    # Evaluated before the first step by the weights of the other: in float8, somewhat off.
    loss = losses(tmp_path / name)[0]
    assert loss == pytest.approx(losses(begun)[-1], rel=2e-3)


def test_a_run_whose_frozen_parameters_moved_or_changed(text, folder, capsys):
  train(text, folder, "mine", steps=1, load_parameters_path=folder / "base", **ADAPTED)
  (folder / "base").rename(folder / "moved")
  given = arguments(text, folder, "mine", steps=2, **ADAPTED)
  # As its config.yml has the key, and without.
  named = [*given, f"load_parameters_path={folder}/base"]
  assert "there is no such folder" in refused(capsys, named)
  assert "which does not exist" in refused(capsys, given)
  steps = folder / "moved" / "checkpoints"
  said = refused(capsys, [*given, f"load_parameters_path={steps}/2"])
  assert f"the frozen parameters in {steps}/2 are not those that this run began with: " in said
  assert main([*given, f"load_parameters_path={steps}/4"]) == 0


def test_runs_that_moved_together_find_each_other(tmp_path):
  there = tmp_path / "runs" / "base" / "checkpoints" / "4"
  there.mkdir(parents=True)
  note = {"folder": "/nowhere/runs/base/checkpoints/4"}
  assert frozen_folder(note, tmp_path / "runs" / "tuned") == there
  with pytest.raises(UserError, match="which does not exist; put it back, or say where it is, "):
    frozen_folder(note, tmp_path / "others" / "tuned")


# --- load_full_state_path ------------------------------------------------------------------------


def test_a_whole_state_goes_on_as_its_own_run_does(text, folder, tmp_path, capsys):
  given = {"load_full_state_path": folder / "base", "steps": 6}
  assert main([*arguments(text, tmp_path, "fork", **given), "validate_only=true"]) == 0
  where = f"{folder}/base/checkpoints/4: continues after step 4 (32 samples)"
  assert f"parameters, optimizer state and position of {where}" in capsys.readouterr().out
  fork = train(text, tmp_path, "fork", **given)
  own = train(text, folder, "base", steps=6)
  assert fingerprints(fork.params) == fingerprints(own.params)
  assert fingerprints(fork.opt_state) == fingerprints(own.opt_state)
  assert [record["step"] for record in read_metrics(tmp_path / "fork")] == [5, 6]
  assert losses(tmp_path / "fork", "loss") == losses(folder / "base", "loss")[-2:]


def test_a_state_that_is_another_runs_is_refused(text, bases, tmp_path, capsys):
  base = f"load_full_state_path={bases}/base"
  for keys, said in (
    ({"opt_type": "sgd"}, "has another optimizer state than this run:"),
    ({"quantization": "fp8"}, "key/amax is (absent) there and [1, 3] in this run"),
    ({"trainable": "[head]"}, "opt_type, trainable and the model's keys must be those of that run"),
    ({"steps": 4}, "is at step 4 (32 samples), where the budget of this run ends"),
    ({"load_parameters_path": bases / "base"}, "a run begins with one of them; for example"),
  ):
    given = arguments(text, tmp_path, "fork", **{"steps": 6} | keys)
    assert said in refused(capsys, [*given, base])
  assert not (tmp_path / "fork" / "checkpoints").exists()


# --- what cannot be taken ------------------------------------------------------------------------


def test_what_is_not_there_or_not_of_this_model_is_refused_by_name(text, bases, tmp_path, capsys):
  (tmp_path / "empty").mkdir()
  for path, keys, said in (
    (tmp_path / "empty", {}, "that is not a run's folder; name a run's folder, for its newest"),
    (tmp_path / "none", {}, "there is no such folder; name a run's folder"),
    (
      bases / "base" / "checkpoints" / "3",
      {},
      "there is no checkpoint of that step; there are 2, 4",
    ),
    (
      bases / "base",
      {"base_mlp_dim": 48, "logits_via_embedding": "true"},
      "  head is [16, 264] there and (absent) in this run\n"
      "  layers/mlp/down/kernel is [1, 32, 16] there and [1, 48, 16] in this run\n",
    ),
    (
      bases / "tuned",
      {},
      "Its adapters are no part of this run's model: give lora_rank=2 "
      "lora_targets=['query', 'value', 'down'], as they were trained",
    ),
    (
      bases / "tuned",
      {"lora_rank": 3},
      "query/lora_a is [1, 16, 2] there and [1, 16, 3] in this run",
    ),
  ):
    given = arguments(text, tmp_path, "next", steps=1, load_parameters_path=path, **keys)
    for more in ([], ["validate_only=true"]):
      assert said in refused(capsys, [*given, *more])


def test_the_same_shapes_with_another_meaning_are_said(text, bases, tmp_path, capsys):
  given = arguments(text, tmp_path, "next", steps=1, load_parameters_path=bases / "base")
  assert main([*given, "rope_max_timescale=500000", "validate_only=true"]) == 0
  said = "rope_max_timescale=500000.0, and they were trained with rope_max_timescale=10000.0"
  assert said in capsys.readouterr().out


@pytest.mark.parametrize("item", ["record", "state"])
def test_a_damaged_checkpoint_is_named_with_another_that_may_work(
  text, folder, tmp_path, capsys, item
):
  step = folder / "base" / "checkpoints" / "4"
  # What holds the state of the optimizer alone is not read, and which file that is, is Orbax's affair.
  files = [path for path in (step / item).rglob("*") if path.is_file() and path.name[0] != "_"]
  for path in files:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 10, len(data), 1000) if len(data) > 10_000 else ():
      data[at] ^= 1
    path.write_bytes(data)
  given = arguments(text, tmp_path, "next", steps=1, load_parameters_path=folder / "base")
  said = refused(capsys, given)
  assert f"load_parameters_path={step} is damaged (" in said
  assert f"take another, for example load_parameters_path={step.parent / '2'}" in said


def test_a_checkpoint_from_before_these_keys_resumes(text, folder, capsys):
  """Its record knows nothing of what trains: everything did."""
  file = folder / "base" / "checkpoints" / "4" / "record" / "metadata"
  record = json.loads(file.read_text())
  for key in ("trainable", "lora_rank", "lora_alpha", "lora_targets", "checksum"):
    (record if key == "checksum" else record["identity"]).pop(key)
  file.write_text(json.dumps(record | {"checksum": _checksum(record)}))
  given = arguments(text, folder, "base", steps=5)
  assert "trainable is (absent) in the checkpoint" in refused(capsys, [*given, "trainable=[head]"])
  assert main(given) == 0


@pytest.mark.usefixtures("optimized")
def test_what_compiles_a_beginning_in_half_the_time_gives_the_same_bits():
  settings = config(batch_size=8)
  key = jax.random.key(3)

  def lowered(num_devices: int) -> Any:
    plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, num_devices))
    trainer = build_trainer(settings, plan, jax.devices()[:num_devices])
    return cast(Any, trainer._create).lower(key)

  # Two simulated devices form a part each of what both of them hold.
  quick, usual = (
    jax.tree.leaves(lowered(count).compile(compiler_options=options)(key).parameters)
    for count, options in ((2, {}), (1, {"xla_backend_optimization_level": 3}))
  )
  for one, other in zip(quick, usual, strict=True):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert one.sharding.is_fully_replicated
