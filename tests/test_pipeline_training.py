"""Whole runs under a pipeline: the same training, evaluated, ramped up, saved and resumed."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from first_devices import use_first_devices
from support import SMALLEST, relative_errors, stop_at

from maxbatch.config.load import load_config
from maxbatch.modes.run import run
from maxbatch.run_folder.metrics import read_metrics

KEYS = {
  "eval_interval": 2,
  "eval_samples": 10,
  "eval_per_device_batch_size": 3,
  "generate_length": 0,
  **SMALLEST,
  "base_num_decoder_layers": 4,
  "dropout_rate": 0.1,
  "opt_type": "sgd",  # AdamW's first steps blow rounding up to the size of the learning rate
  "learning_rate": 0.1,
  "ici_pipeline_parallelism": 2,
  "per_device_batch_size": 1,
  "batch_size": 8,
  "batch_schedule_type": "linear",
  "batch_schedule_length": 8,
  "batch_size_start": 4,
  "batch_size_increment": 4,
  "steps": -1,
  "total_samples": 40,
  "schedule_unit": "samples",
  "metrics_writers": "[jsonl]",
}
"""2 steps of 1 pass, then 4 of 2, on 2 × 2 devices."""
ROUNDS = {"pipeline_schedule": "interleaved_1f1b", "num_pipeline_repeats": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("text") / "words.txt"
  path.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  return path


def train(text: pathlib.Path, folder: pathlib.Path, **keys: object):
  places = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
  }
  values = KEYS | places | keys
  with pytest.MonkeyPatch.context() as patch:
    use_first_devices(patch, 4)
    return run(load_config(["config=base", *(f"{key}={value}" for key, value in values.items())]))


def curves(folder: pathlib.Path) -> dict[str, list[float]]:
  records = read_metrics(folder / "first_run")
  names = ("loss", "grad_norm", "eval/loss", "global_batch_to_train")
  return {name: [one[name] for one in records if name in one] for name in names}


def assert_same(folder: pathlib.Path, expected: dict[str, list[float]]) -> None:
  for name, values in curves(folder).items():
    np.testing.assert_allclose(values, expected[name], rtol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory) -> tuple[Any, dict[str, list[float]]]:
  folder = tmp_path_factory.mktemp("plain")
  state, _ = train(text, folder, ici_pipeline_parallelism=1)
  return jax.device_get(state.params), curves(folder)


def test_the_batch_grows_as_this_file_says(plain):
  assert plain[1]["global_batch_to_train"] == [4, 4, 8, 8, 8, 8]


def test_a_run_may_change_its_schedule_whenever_it_resumes(plain, text, tmp_path, monkeypatch):
  expected, records = plain
  with monkeypatch.context() as patch:
    stop_at(patch, 2)
    train(text, tmp_path, **ROUNDS)
  with monkeypatch.context() as patch:
    stop_at(patch, 2)
    train(text, tmp_path, pipeline_schedule="gpipe")
  state, position = train(text, tmp_path, ici_pipeline_parallelism=1)
  assert position.step == 6
  assert_same(tmp_path, records)
  assert max(relative_errors(jax.device_get(state.params), expected).values()) < 1e-5
