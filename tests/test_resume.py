"""A resumed run is the run that was begun, or it says in what it is another."""

import hashlib
import json
import pathlib
import re
import shutil
import sys

import pytest
import yaml
from damage import flip_bits
from preloaded import started
from processes import PATIENCE_SECONDS
from support import SMALLEST, configured

from maxbatch.batch.from_config import keep_batch, plan_batches, topology
from maxbatch.checkpoints.record import identity_differences
from maxbatch.config.declare import CHANGEABLE, FIXED, PER_START
from maxbatch.config.load import load_config
from maxbatch.config.schema import BatchConfig, fields
from maxbatch.critical_batch import main as critical_batch
from maxbatch.errors import UserError
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main

OTHER_TEXT = "".join(f"{n} comes before {n + 1}\n" for n in range(300))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  """A folder with a text to train on, and one to validate on."""
  folder = tmp_path_factory.mktemp("text")
  (folder / "train.txt").write_text("".join(f"{n} follows {n - 1}\n" for n in range(300)))
  (folder / "valid.txt").write_text("".join(f"{n} follows {n - 1}\n" for n in range(300, 340)))
  return folder


def arguments(text: pathlib.Path, folder: pathlib.Path, **keys: object) -> list[str]:
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
    "steps": 4,
    "eval_samples": 12,
    "checkpoint_period": 2,
    "generate_length": 0,
    "write_report": "false",
    # As branches have them, whose programs are then those of runs.
    "warmup_steps": 0,
    "learning_rate_batch_coupling": "none",
    "per_device_batch_size": 1,
    **SMALLEST,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]


@pytest.fixture(scope="module")
def begun(text, tmp_path_factory) -> pathlib.Path:
  """A run of 2 steps."""
  folder = tmp_path_factory.mktemp("begun")
  assert main(arguments(text, folder, steps=2)) == 0
  return folder


@pytest.fixture
def folder(begun, tmp_path) -> pathlib.Path:
  """A copy of `begun` to go on with."""
  return shutil.copytree(begun, tmp_path / "runs")


def refused(capsys: pytest.CaptureFixture[str], given: list[str]) -> str:
  capsys.readouterr()
  assert main(given) == 2
  return capsys.readouterr().err


def test_every_key_is_in_one_class():
  assert {one.resume for _, one in fields().values()} == {FIXED, CHANGEABLE, PER_START}


def test_what_changed_is_said_key_by_key(text, folder, capsys):
  changed = {"learning_rate": 3e-4, "dtype": "bfloat16", "lr_schedule_type": "constant"}
  given = arguments(text, folder, **changed)
  for more in (["validate_only=true"], []):
    capsys.readouterr()
    assert main([*given, *more]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {line for line in lines if " → " in line and "loss" not in line} == {
      "steps: 2 → 4",
      "learning_rate: 0.003 → 0.0003",
      "lr_schedule_type: cosine → constant",
      "dtype: auto → bfloat16",
    }


def test_nothing_is_said_where_nothing_changed(text, folder, capsys):
  assert main(arguments(text, folder, steps=3)) == 0
  capsys.readouterr()
  given = arguments(text, folder, steps=3, run_name="moved")
  (folder / "first_run").rename(folder / "moved")
  assert main(given) == 0
  assert "→" not in capsys.readouterr().out


@pytest.mark.parametrize(
  ("keys", "line"),
  [
    ({"adam_b2": 0.99}, "adam_b2 is 0.95 in the checkpoint and 0.99 now"),
    ({"sgd_momentum": 0.5}, "sgd_momentum is 0.9 in the checkpoint and 0.5 now"),
    ({"opt_type": "sgd"}, "opt_type is adamw in the checkpoint and sgd now"),
    (
      {"weight_dtype": "bfloat16", "weight_rounding": "nearest"},
      "weight_dtype is float32 in the checkpoint and bfloat16 now",
    ),
    ({"mu_dtype": "bfloat16"}, "mu_dtype is float32 in the checkpoint and bfloat16 now"),
    ({"z_loss_multiplier": 0.1}, "z_loss_multiplier is 0.0 in the checkpoint and 0.1 now"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_state_is_made_of_cannot_change(text, begun, capsys, keys, line):
  assert f"  {line}\n" in refused(capsys, arguments(text, begun, **keys))


def test_nor_is_it_valid(text, begun, capsys):
  said = refused(
    capsys, arguments(text, begun, opt_type="sgd", sgd_momentum=0.5, validate_only="true")
  )
  assert "  opt_type is adamw in the checkpoint and sgd now\n" in said
  assert "  sgd_momentum is 0.9 in the checkpoint and 0.5 now\n" in said


def test_another_optimizer_constant_is_taken_when_allowed(text, folder, capsys):
  assert main(arguments(text, folder, adam_b2=0.99, allow_changed_resume="true")) == 0
  assert "adam_b2 is 0.95 in the checkpoint and 0.99 now" in capsys.readouterr().out


def test_other_validation_data_are_noticed_by_name_and_size(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  (other / "valid.txt").write_text(OTHER_TEXT)
  given = arguments(other, folder)
  message = refused(capsys, given)
  assert (
    f"  validation is not that of the checkpoint: dataset_path was {text} and is {other}; "
    f"changed: valid.txt ({len(OTHER_TEXT):,} bytes, was 640)\n"
  ) in message
  assert "dataset is" not in message
  assert main([*given, "allow_changed_resume=true"]) == 0


def test_other_data_are_named_by_keys_and_files(text, begun, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  (other / "train.txt").rename(other / "train-1.txt")
  (other / "train-2.txt").write_text(OTHER_TEXT)
  size = (other / "train-1.txt").stat().st_size
  assert (
    f"  dataset is not that of the checkpoint: dataset_path was {text} and is {other}; gone: "
    f"train.txt ({size:,} bytes); new: train-1.txt ({size:,} bytes), train-2.txt "
    f"({len(OTHER_TEXT):,} bytes)\n"
  ) in refused(capsys, arguments(other, begun))


def test_an_edit_that_keeps_names_and_sizes_is_noticed(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "text")
  assert main(arguments(other, folder, steps=3)) == 0
  content = (other / "train.txt").read_text()
  (other / "train.txt").write_text(content.replace("follows", "FOLLOWS"))
  assert (
    "  dataset is not that of the checkpoint: the same paths, names and sizes, with other "
    "contents\n"
  ) in refused(capsys, arguments(other, folder))


def test_moved_data_are_the_same_data(text, folder, tmp_path, capsys):
  other = shutil.copytree(text, tmp_path / "elsewhere")
  assert main(arguments(other, folder)) == 0
  assert f"dataset_path: {text} → {other}" in capsys.readouterr().out


def test_the_configurations_of_all_starts_stay(text, folder):
  given = arguments(text, folder, learning_rate=3e-4, lr_schedule_type="constant")
  assert main(given) == 0
  assert main(given) == 0  # Complete: not a start.
  run = folder / "first_run"
  assert sorted(path.name for path in (run / "starts").iterdir()) == ["1.yml", "2.yml"]
  rates = [load_config([f"config={run}/starts/{n}.yml"]).optimizer.learning_rate for n in (1, 2)]
  assert rates == [3e-3, 3e-4]
  assert (run / "starts" / "2.yml").read_bytes() == (run / "config.yml").read_bytes()
  begins = [yaml.safe_load((run / "starts" / f"{n}.yml").read_text())["derived"] for n in (1, 2)]
  assert [each["begins_after_step"] for each in begins] == [0, 2]


def test_a_checkpoint_of_an_earlier_version_compares_what_it_says(text, folder, capsys):
  """Then, data had a fingerprint alone, and most keys were not in the record."""
  path = folder / "first_run" / "checkpoints" / "2" / "record" / "metadata"
  record = json.loads(path.read_text())
  identity = record["identity"]
  earlier = {key: identity[key] for key in ("opt_type", "base_emb_dim", "data_shuffle_seed")}
  earlier["dataset"] = identity["dataset"]["fingerprint"]
  fields = {key: value for key, value in record.items() if key not in ("checksum", "settings")}
  fields |= {"identity": earlier}
  checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
  path.write_text(json.dumps(fields | {"checksum": checksum}))
  message = refused(capsys, arguments(text, folder, opt_type="sgd", data_shuffle_seed=1))
  assert "  data_shuffle_seed is 0 in the checkpoint and 1 now\n" in message
  assert "  opt_type is adamw in the checkpoint and sgd now\n" in message
  assert main(arguments(text, folder)) == 0
  assert "Changed since" not in capsys.readouterr().out


def test_an_option_of_the_model_that_a_checkpoint_does_not_name_was_off():
  record = {"identity": {"base_emb_dim": 128}, "settings": {}}
  off = {"base_emb_dim": 128, "use_pre_norm": True, "layer_types": [], "rope_factor": 1.0}
  assert identity_differences(record, off) == []
  (line,) = identity_differences(record, off | {"use_pre_norm": False})
  assert line.startswith("use_pre_norm")


# --- the batch -----------------------------------------------------------------------------------


def kept(saved: BatchConfig, now: BatchConfig, devices: tuple[int, int], *changed: str):
  """The plan of `now` on the second number of devices, after a run of `saved` on the first."""
  layouts = [topology(configured().mesh, count) for count in devices]
  run = configured().run
  before = plan_batches(saved, run, layouts[0]).as_dict()
  return plan_batches(keep_batch(now, layouts[1], before, changed), run, layouts[1])


@pytest.mark.parametrize(
  ("keys", "devices", "microbatches"),
  [
    ([], (4, 2), 2),
    ([], (2, 4), 1),
    ([], (4, 1), 4),
    ([], (2, 8), 1),
    (["per_device_batch_size=2"], (8, 4), 2),
    (["micro_batch_size=2", "gradient_accumulation_steps=-1"], (4, 2), 2),
    (["gradient_accumulation_steps=2"], (4, 2), 2),
    (["micro_batch_size=none"], (4, 2), 1),
    (["enable_rampup_batch_size=true"], (4, 2), 2),
    (["micro_batch_size=auto"], (4, 2), 1),
    (["micro_batch_size=auto", "gradient_accumulation_steps=2"], (4, 2), 2),
  ],
  ids=str,
)
def test_the_batch_stays_on_other_devices(keys, devices, microbatches):
  config = configured(*keys).batch
  before = plan_batches(config, configured().run, topology(configured().mesh, devices[0]))
  plan = kept(config, config, devices)
  assert plan.global_batch_to_train == before.global_batch_to_train
  assert plan.gradient_accumulation_steps == microbatches
  if keys == ["enable_rampup_batch_size=true"]:
    assert [p.batch for p in plan.schedule.points] == [p.batch for p in before.schedule.points]


@pytest.mark.parametrize(
  ("now", "changed", "batch"),
  [
    (["batch_size=8"], ["batch_size"], 8),
    (["tokens_per_step=1024"], ["tokens_per_step"], 8),
    (["per_device_batch_size=1"], ["per_device_batch_size"], 2),
    (["gradient_accumulation_steps=3"], ["gradient_accumulation_steps"], 24),
    (["batch_schedule=[[0,8],[80,24]]"], ["batch_schedule"], 24),
    ([], ["per_device_batch_size"], 16),  # A key that is given no more says nothing.
  ],
  ids=str,
)
def test_the_batch_changes_when_a_key_says_so(now, changed, batch):
  plan = kept(configured().batch, configured(*now).batch, (4, 2), *changed)
  assert plan.global_batch_to_train == batch


@pytest.mark.parametrize(
  ("keys", "devices", "named"),
  [
    ([], 3, "batch_size=16 in 1 microbatch"),
    (["per_device_batch_size=4"], 3, "batch_size=16 over 3 devices"),
    (["per_device_batch_size=4", "gradient_accumulation_steps=1"], 2, "change one of them: "),
  ],
  ids=str,
)
def test_a_batch_that_cannot_stay_is_refused_with_offers_that_work(keys, devices, named):
  config = configured(*keys).batch
  with pytest.raises(UserError) as caught:
    kept(config, config, (4, devices))
  message = str(caught.value)
  assert message.startswith("this run trains with 16 samples per step, which it keeps unless a key")
  assert named in message
  offers = re.findall(r"\bbatch_size=(\d+)", message.partition("nearest: ")[2])
  offers += re.findall(r"change one of them: batch_size=(\d+)", message)
  assert offers
  for offer in offers:
    again = configured(*keys, f"batch_size={offer}").batch
    assert kept(config, again, (4, devices)).global_batch_to_train == int(offer)


def test_a_run_on_fewer_devices_keeps_its_batch(text, folder, capsys):
  """The second start of three is on half the devices, in a process of its own."""
  given = arguments(text, folder, steps=4, num_simulated_devices=4)
  process = started([sys.executable, "-m", "maxbatch.train", *given])
  output, errors = process.communicate(timeout=PATIENCE_SECONDS)
  assert (process.returncode, errors) == (0, "")
  assert "The run keeps its 8 samples per step" in output
  lines = [line.strip() for line in output.splitlines()]
  changes = lines.index("Changed since checkpoint step 2, and in force from here on:")
  assert lines[changes + 1 : changes + 3] == ["steps: 2 → 4", "num_simulated_devices: -1 → 4"]
  last = read_metrics(folder / "first_run")[-1]
  sizes = ("global_batch_to_train", "gradient_accumulation_steps", "samples")
  assert [last[size] for size in sizes] == [8, 2, 4 * 8]
  capsys.readouterr()
  assert main(arguments(text, folder, steps=6)) == 0
  assert "keeps" not in capsys.readouterr().out
  assert read_metrics(folder / "first_run")[-1]["global_batch_to_train"] == 8


# --- the plan ------------------------------------------------------------------------------------


def total_samples(printed: str) -> list[int]:
  """Of every plan in an output."""
  result = re.findall(r"^ *total_samples +([\d,]+) samples = ", printed, re.M)
  return [int(total.replace(",", "")) for total in result]


def test_the_plan_of_a_resumed_run_counts_from_where_it_is(text, folder, capsys):
  given = arguments(text, folder, batch_size=32)
  for more in (["validate_only=true"], []):
    capsys.readouterr()
    assert main([*given, *more]) == 0
    printed = capsys.readouterr().out
    assert total_samples(printed) == [2 * 8 + 2 * 32]
    assert "= 16 in 2 steps + 32 × 2\n" in printed
  assert read_metrics(folder / "first_run")[-1]["samples"] == 2 * 8 + 2 * 32


def test_the_plan_is_printed_again_if_an_older_checkpoint_is_taken(text, folder, capsys):
  assert main(arguments(text, folder, batch_size=32)) == 0
  flip_bits(folder / "first_run" / "checkpoints" / "4")
  capsys.readouterr()
  assert main(arguments(text, folder, steps=6, batch_size=8)) == 0
  printed = capsys.readouterr().out
  assert total_samples(printed) == [2 * 8 + 2 * 32 + 2 * 8, 6 * 8]
  assert read_metrics(folder / "first_run")[-1]["samples"] == 6 * 8


def test_the_plans_of_branches_count_from_the_checkpoint(text, folder, capsys):
  keys = ["factors=1,2", "branch_tokens=1024", "smoothing=1", "checkpoint_period=100"]
  keys += ["learning_rate=3e-4", "lr_schedule_type=constant", "coupling=none"]
  assert critical_batch([f"checkpoint={folder / 'first_run'}", *keys]) == 0
  printed = capsys.readouterr().out
  trained = [
    read_metrics(folder / "first_run-critical_batch" / "step-2" / name)[-1]["samples"]
    for name in ("x1", "x2")
  ]
  assert total_samples(printed) == trained


def test_a_load_of_parts_of_samples_is_refused_where_the_run_resumes(text, folder, capsys):
  """From the beginning the budget is whole steps; from 16 samples on, the last one is cut."""
  keys = {"steps": -1, "total_samples": 96, "batch_size": 32, "per_device_batch_size": 1}
  given = arguments(text, folder, **keys, expansion_factor_real_data="1/32")
  message = refused(capsys, given)
  assert "makes a load of 0.5 samples for a step of 16 samples" in message
  offer = message.rpartition("for example ")[2].strip()
  assert main([*given, offer]) == 0


# --- the order of samples ------------------------------------------------------------------------


def test_another_order_of_samples_is_refused(text, begun, monkeypatch, capsys):
  monkeypatch.setattr("maxbatch.checkpoints.record.STREAM_VERSION", "another-1")
  assert (
    "  stream_version is grain-shuffle-1 in the checkpoint and another-1 now: samples would come in "
    "another order, some again and some not at all\n"
  ) in refused(capsys, arguments(text, begun))
