"""Whole runs in short formats: skipped steps in the files of a run, and the report of exponents."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from first_devices import use_first_devices
from support import SMALLEST

from maxbatch import train
from maxbatch.config.find import model_names
from maxbatch.config.load import load_config
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.models.probes import histogram
from maxbatch.modes.run import run
from maxbatch.precision.formats import CBFLOAT16, FLOAT16, compute_format
from maxbatch.precision.policy import rounded
from maxbatch.precision.report import KINDS, Exponents, report_text
from maxbatch.run_folder.history import read_history, status_of
from maxbatch.run_folder.metrics import read_metrics


@pytest.fixture(scope="module", autouse=True)
def _one_device():
  with pytest.MonkeyPatch.context() as patch:
    use_first_devices(patch, 1)
    yield


OVERFLOWING = {"precision": "float16", "initial_loss_scale": 2**14, "loss_scale_window": 2}


def arguments(folder: pathlib.Path, **keys: object) -> list[str]:
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "dataset_type": "synthetic",
    "per_device_batch_size": 8,
    "learning_rate_schedule_steps": 6,
    "eval_interval": -1,
    "eval_samples": 4,
    "generate_length": 0,
    "checkpoint_period": 1,
    **SMALLEST,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]


def records(folder: pathlib.Path) -> list[dict[str, float]]:
  kept = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps", "eval/loss")
  return [{k: r[k] for k in kept if k in r} for r in read_metrics(folder / "first_run")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
  """A run of 6 steps, the first of which overflow."""
  folder = tmp_path_factory.mktemp("whole")
  run(
    load_config(
      arguments(folder, steps=6, precision_report="true", generate_length=2, **OVERFLOWING)
    )
  )
  return folder


def test_skipped_steps_are_counted_and_what_is_not_finite_is_left_out(whole):
  first, *steps = records(whole)
  assert "loss_scale" not in first
  scales, skipped = ([record[key] for record in steps] for key in ("loss_scale", "skipped_steps"))
  assert scales[0] == 2**14
  assert 2 <= skipped[-1] < 6
  for before, record, after in zip([0, *skipped], steps, [*scales[1:], None], strict=False):
    is_skipped = record["skipped_steps"] > before
    assert ("grad_norm" in record) != is_skipped
    assert record["loss"] > 0
    if is_skipped and after:
      assert after == record["loss_scale"] / 2


def test_a_run_resumed_between_skipped_steps_is_the_same_run(whole, tmp_path):
  run(load_config(arguments(tmp_path, steps=1, **OVERFLOWING)))
  run(load_config(arguments(tmp_path, steps=6, **OVERFLOWING)))
  expected = [{k: v for k, v in r.items() if k != "eval/loss"} for r in records(whole)]
  results = [{k: v for k, v in r.items() if k != "eval/loss"} for r in records(tmp_path)]
  assert results == expected
  assert records(tmp_path)[-1] == records(whole)[-1]


def test_a_run_that_only_skips_stops_and_says_why(tmp_path):
  given = arguments(tmp_path, steps=4, precision="float16", loss_scale=2**30)
  with pytest.raises(TrainingDivergedError, match=r"last 2 steps were skipped.*smaller loss_scale"):
    run(load_config([*given, "max_consecutive_skipped_steps=2"]))
  assert [record["step"] for record in records(tmp_path)] == [0, 1]


def test_a_run_of_which_every_step_was_skipped_has_not_finished(tmp_path, capsys):
  given = arguments(tmp_path, steps=2, precision="float16", loss_scale=2**30)
  assert train.main(given) == 3
  printed = capsys.readouterr()
  assert "nothing was learned: all 2 steps were skipped" in printed.err
  assert "Finished" not in printed.out
  assert status_of(read_history(tmp_path / "first_run")).state == "diverged"


def test_the_report_counts_every_number_of_every_layer(whole):
  begun, ended = json.loads((whole / "first_run" / "precision_report.json").read_text())
  assert (begun["step"], ended["step"], begun["tokens"]) == (0, 6, 8 * 16)
  tensors = {(each["kind"], each["name"]): each for each in begun["tensors"]}
  assert {kind for kind, _ in tensors} == set(KINDS)
  sizes = {
    ("weights", "layers/mlp/down/kernel"): 32 * 16,
    ("weight gradients", "head"): 16 * 264,
    ("activations", "layers/mlp/up"): 8 * 16 * 32,
    ("activation gradients", "final_norm"): 8 * 16 * 16,
    ("activations", "embedding"): 8 * 16 * 16,
  }
  for key, size in sizes.items():
    each = tensors[key]
    assert sum(each["exponents"].values()) + each["zeros"] == size
    assert each["layer"] == (0 if key[1].startswith("layers/") else None)
  text = (whole / "first_run" / "precision_report.txt").read_text()
  assert "Precision report after step 6" in text
  assert "cbfloat16, without a loss scale: holds all" in text


@pytest.mark.parametrize("to", [FLOAT16, CBFLOAT16], ids=["float16", "cbfloat16"])
@pytest.mark.parametrize("shift", [0, 7, -9])
def test_what_the_report_says_is_lost_is_what_rounding_loses(to, shift):
  random = np.random.default_rng(0)
  x = np.ldexp(random.normal(size=20_000), random.integers(-50, 40, 20_000)).astype(np.float32)
  each = Exponents("weights", "w", None, np.asarray(histogram(jnp.asarray(x))))
  result = np.asarray(rounded(jnp.asarray(np.ldexp(x, shift)), to))
  # By whole exponents: numbers within a factor of 2 of the limits may count either way.
  assert each.underflow(to, shift) == pytest.approx(np.mean(result == 0), abs=0.01)
  assert each.overflow(to, shift) == pytest.approx(np.mean(np.isinf(result)), abs=0.01)


def test_the_report_names_the_layers_that_overflow_and_underflow():
  counts = np.zeros((3, 256))
  counts[0, 127] = counts[1, 127 + 20] = 100
  counts[2, 127 - 28], counts[2, 127] = 30, 70
  results = [
    Exponents("activations", "layers/mlp/up", 0, counts[0]),
    Exponents("activations", "layers/mlp/up", 1, counts[1]),
    Exponents("activation gradients", "layers/mlp/up", 1, counts[2]),
  ]
  text = report_text(results, 3, 1024)
  assert (
    "float16, without a loss scale: overflows in activations layers/mlp/up of layer 1 (100.0%); more "
    "than 1% underflow in activation gradients layers/mlp/up of layer 1 (30.0%)\n"
  ) in text
  assert "\nfloat16, loss_scale=16384: overflows in activations layers/mlp/up of layer 1" in text
  assert "\ncbfloat16, without a loss scale: holds all\n" in text


def test_weights_in_bfloat16_need_a_word_and_gemma_needs_more_range_than_float16(tmp_path):
  for keys, said in (
    ({"weight_dtype": "bfloat16"}, "weight_rounding=stochastic keeps small ones"),
    ({"precision": "float16", "scale_embedding": "true"}, "precision=bfloat16"),
  ):
    with pytest.raises(UserError, match=said):
      run(load_config(arguments(tmp_path, **keys)))


def test_the_format_asked_for_is_that_of_every_shipped_model():
  for name in model_names():
    config = load_config(["config=base", f"model_name={name}", "precision=float16"])
    assert compute_format(config.precision) == FLOAT16, name
