"""Short runs of a tiny model that measure the noise scale, on two devices."""

import contextlib
import dataclasses
import functools
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from first_devices import use_first_devices
from initial_states import initial_state
from several_processes import records

from maxbatch.config.load import load_config
from maxbatch.config.schema import ModelConfig
from maxbatch.models.registry import Parameters, build_model
from maxbatch.modes.run import run
from maxbatch.run_folder.metrics import Record
from maxbatch.training import build
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer

T, WINDOW = 6, 16
CALIBRATE_EVERY = 2
CALIBRATED = {"gns": "norm", "gns_calibrate_every": CALIBRATE_EVERY}
_MODEL = {
  "base_emb_dim": 16,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "base_num_decoder_layers": 2,
  "head_dim": 8,
  "base_mlp_dim": 32,
  "vocab_size": 264,
  "max_target_length": T,
}
_RUN = {
  "per_device_batch_size": 1,
  "batch_size": 2,
  "steps": -1,
  "total_samples": 240,
  "schedule_unit": "samples",
  "checkpoint_period": 10_000,
  "eval_interval": -1,
  "eval_samples": 4,
  "generate_length": 0,
  "learning_rate": 1e-3,
  "warmup_steps": 20,
  "data_shuffle_seed": 1,
  "gns": "all",
  "gns_window_steps": WINDOW,
  "gns_report_every": 0,
  "metrics_writers": "[jsonl]",
}


@dataclasses.dataclass(frozen=True)
class Done:
  """A run that ended, or was stopped."""

  folder: pathlib.Path
  params: Parameters
  records: list[Record]
  """Without what depends on the clock; the first is that of step 0."""
  said: str
  compiled: tuple[int, ...]
  """The microbatch of every program that was compiled."""

  def values(self, key: str) -> list[float]:
    return [record[key] for record in self.records[1:]]


Run = Callable[..., Done]


@contextlib.contextmanager
def training(root: pathlib.Path) -> Iterator[Run]:
  """Trains on two devices in folders of `root`, each named by its run; another call resumes it."""
  with pytest.MonkeyPatch.context() as patch:
    use_first_devices(patch, 2)
    # A program that begins a state is compiled for every set of measures and optimizer's state.
    patch.setattr(Trainer, "init", _begun)
    yield _run_in(root)


def _begun(trainer: Trainer, seed: int) -> TrainState:
  return initial_state(trainer, _parameters(trainer.model.config, seed))


@functools.cache
def _parameters(config: ModelConfig, seed: int) -> Parameters:
  """On the host."""
  return jax.device_get(jax.jit(build_model(config, T).init)(jax.random.key(seed)))


def _run_in(root: pathlib.Path) -> Run:
  text = root / "words.txt"
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(2500)))
  data = {"dataset_path": text, "dataset_cache_directory": root / "cache"}
  defaults = _MODEL | _RUN | data | {"base_output_directory": root}

  def train(name: str, **keys: object) -> Done:
    values = defaults | keys | {"run_name": name}
    said, compiled, compile_step = io.StringIO(), [], build.compiled_step

    def compile_noted(*arguments: Any) -> Any:
      compiled.append(arguments[-1])
      return compile_step(*arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
      patch.setattr("maxbatch.compile.step_cache.compiled_step", compile_noted)
      state, _ = run(load_config(["config=base", *(f"{k}={v}" for k, v in values.items())]))
    noted = records(root / name)
    return Done(root / name, state.params, noted, said.getvalue(), tuple(compiled))

  return train
