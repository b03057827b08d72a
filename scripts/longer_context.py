"""Extends a small Llama of Hugging Face's to rows 4 times as long: are needles in them found?

    python scripts/longer_context.py FOLDER [SHORT_STEPS LONG_STEPS]

Prints what it runs: training on rows of 128 tokens, an export as a Hugging Face folder, and training from there
on rows of 512 tokens, each shared by 4 simulated devices, with the rotary positions as they are, and with
rope_scaling in the folder's config.json. Then which share of needles each finds, and their loss, by the needles'
position in a row; reports of the runs in FOLDER draw both over the steps. Takes a few minutes.

R rows, S tokens of a row and the one after, N needles of a row, one of each kind.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from maxbatch.config.schema import DataConfig
from maxbatch.data.rows import Arrays, Dataset, SourceRows
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.run_folder.metrics import read_metrics

SHORT, LONG, PARTS = 128, 512, 4
KINDS, VALUES, HAY = 8, 16, 16
QUESTION = KINDS * VALUES
ANSWER = QUESTION + KINDS
"""Tokens: needles of each kind and value; questions for a kind; answers, which are values; hay."""
MODEL = (
  *(
    "config=base",
    "vocab_size=264",
    "base_emb_dim=64",
    "base_mlp_dim=128",
    "rope_max_timescale=500",
  ),
  *("base_num_decoder_layers=2", "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=16"),
)
RUN = (
  *("dataset_type=longer_context:build", "packing=false", "metrics=[accuracy]"),
  *("eval_interval=20", "opt_type=adamw"),
)
SCALING = {
  "rope_type": "llama3",
  "factor": LONG / SHORT,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": SHORT,
}


@dataclasses.dataclass(frozen=True)
class Needles:
  """Rows of hay with a needle of each kind in the first half, and a question for each in the second, after
  which the needle's value alone counts in the loss. Row i is a function of (part, i)."""

  part: int
  num_rows: int
  length: int
  quarter: int | None = None
  """Of the first half, whose needles alone count; None: all."""

  def __len__(self) -> int:
    return self.num_rows

  def rows(self, indices: np.ndarray) -> Arrays:
    """See `RowSource.rows`."""
    half = self.length // 2
    tokens_RS = np.zeros((len(indices), self.length + 1), np.int32)
    weights_RS = np.zeros(tokens_RS.shape, np.float32)
    for row, index in enumerate(indices):
      draw = np.random.default_rng((self.part, int(index)))
      tokens_RS[row] = ANSWER + VALUES + draw.integers(HAY, size=self.length + 1)
      values_N, kinds_N = draw.integers(VALUES, size=KINDS), np.arange(KINDS)
      needles_N = draw.permutation(half)[:KINDS]
      questions_N = half + 2 * draw.permutation(half // 2)[:KINDS]
      tokens_RS[row, needles_N] = kinds_N * VALUES + values_N
      tokens_RS[row, questions_N] = QUESTION + kinds_N
      tokens_RS[row, questions_N + 1] = ANSWER + values_N
      is_counted_N = (needles_N * PARTS // half == self.quarter) | (self.quarter is None)
      weights_RS[row, questions_N + 1] = is_counted_N
    return {
      "inputs": np.ascontiguousarray(tokens_RS[:, :-1]),
      "targets": np.ascontiguousarray(tokens_RS[:, 1:]),
      "weights": np.ascontiguousarray(weights_RS[:, 1:]),
    }


def build(data: DataConfig, tokenizer: Tokenizer, max_target_length: int) -> Dataset:
  """Builds the dataset that `dataset_type` names; validation is by the needles' position."""
  del data, tokenizer
  by_quarter = tuple(
    SourceRows(f"quarter_{part + 1}", 1 / PARTS, Needles(1, 64, max_target_length, part))
    for part in range(PARTS)
  )
  return Dataset(
    train=Needles(0, 2**31 - 1, max_target_length),
    validation=Needles(1, 64, max_target_length),
    fingerprint="needles",
    description="needles among hay",
    validation_by_source=by_quarter,
  )


def command(folder: pathlib.Path, *words: str) -> None:
  """Runs a command of maxbatch, which finds this file as a module."""
  print(f"maxbatch {' '.join(words)}", flush=True)
  beside = pathlib.Path(__file__).resolve().parent
  environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(beside), *sys.path[1:]])}
  with (folder / "printed.txt").open("a") as printed:
    result = subprocess.run(
      [sys.executable, "-m", "maxbatch", *words], stdout=printed, env=environment, check=False
    )
  if result.returncode:
    sys.exit(result.returncode)


def with_scaling(model: pathlib.Path) -> pathlib.Path:
  """Returns a copy of a Hugging Face folder whose config.json scales rotary positions."""
  scaled = model.with_name("model_scaled")
  shutil.copytree(model, scaled)
  config = json.loads((model / "config.json").read_text())
  config |= {"rope_scaling": SCALING, "max_position_embeddings": LONG}
  (scaled / "config.json").write_text(json.dumps(config, indent=2))
  print(f"{scaled.name}/config.json: rope_scaling {json.dumps(SCALING)}")
  return scaled


def rows_of(folder: pathlib.Path, name: str, run: str) -> Sequence[str]:
  """Returns rows of the table: a run's first and last evaluation."""
  evaluated = [one for one in read_metrics(folder / run) if "eval/loss" in one]
  chosen = evaluated[-1:] if run == "short" else [evaluated[0], evaluated[-1]]

  def figures(one: dict[str, float], key: str, form: str) -> str:
    names = [key, *(f"{key}/quarter_{part + 1}" for part in range(PARTS))]
    return " | ".join(format(one[each], form) for each in names)

  return [
    f"| {name}, step {one['step']:.0f} | {figures(one, 'eval/accuracy', '.0%')} "
    f"| {figures(one, 'eval/loss', '.2f')} |"
    for one in chosen
  ]


def main(out: str, short_steps: str = "200", long_steps: str = "60") -> None:
  """Trains, extends, trains, and prints the table."""
  folder = pathlib.Path(out)
  folder.mkdir(parents=True)
  where, shared = f"base_output_directory={folder}", "num_simulated_devices=4"
  command(
    folder,
    *("train", *MODEL, *RUN, where, "run_name=short", f"max_target_length={SHORT}"),
    *("num_simulated_devices=1", "batch_size=32", f"steps={short_steps}"),
  )
  model = folder / "model"
  command(folder, "convert", f"to_hf={model}", f"checkpoint={folder / 'short'}")
  runs = {"as_it_is": model, "scaled": with_scaling(model)}
  for run, begun in runs.items():
    command(
      folder,
      *("train", "config=base", f"model_name={begun}", f"load_parameters_path={begun}"),
      *(*RUN, where, f"run_name={run}", f"max_target_length={LONG}", f"steps={long_steps}"),
      *(shared, "ici_data_parallelism=1", "ici_context_parallelism=4", "batch_size=8"),
      "learning_rate=1e-3",
    )
  quarters = " | ".join(f"{part + 1}" for part in range(PARTS))
  print(f"| rows of | found | {quarters} | loss | {quarters} |\n{'|---' * (3 + 2 * PARTS)}|")
  names = {"short": f"{SHORT} tokens", "as_it_is": f"{LONG}, as it is"}
  names["scaled"] = f"{LONG}, rope_scaling"
  for run, name in names.items():
    print("\n".join(rows_of(folder, name, run)))


if __name__ == "__main__":
  main(*sys.argv[1:])
