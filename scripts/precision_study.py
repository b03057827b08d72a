"""Trains the default model in every format, with and without a loss scale, at equal seeds.

    .venv/bin/python scripts/precision_study.py out=precision steps=60 seeds=3

Each run sees the same samples in the same order. Prints a table of validation losses with their
spread over the seeds and their difference from float32 at the same seed, and one of the gradients that
each format sets to zero, by layer; writes both, with precision.html and precision.json, into `out`.
Finished runs are kept, so an interrupted command continues where it was. More keys, such as
model_name=gpt2-small, go to every run.

A loss that is a mean over tokens, as many trainers have it, has gradients as many times smaller as
there are tokens in a step: loss_scale = 1 / tokens. Here that is 1/1024; a million tokens, as many as
large models have in a step, are imitated by 1/2^20.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.modes.run import run
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.precision.formats import CBFLOAT16, FLOAT16, Format
from maxbatch.precision.report import ACTIVATIONS_GRADIENTS, GRADIENTS, KINDS, Exponents
from maxbatch.run_folder.metrics import Record, read_metrics

BATCH, LENGTH = 8, 128
JOB = f"""num_simulated_devices=1 batch_size={BATCH} max_target_length={LENGTH} generate_length=0
enable_checkpointing=false log_period=1000000 eval_interval=-1 eval_samples=128"""
LOWEST, HIGHEST = -60, 48
"""The exponents that are shown."""
MEAN, LARGE_MEAN = (f"loss_scale={2.0**-bits:.10g}" for bits in (10, 20))


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to train."""

  name: str
  keys: str


ARMS = (
  Arm("float32", "precision_report=true"),
  Arm("bfloat16", "precision=bfloat16"),
  Arm("bfloat16, products in float8", "precision=bfloat16 quantization=fp8"),
  Arm("bfloat16, products in int8", "precision=bfloat16 quantization=int8"),
  Arm("float16, loss scale dynamic", "precision=float16"),
  Arm("float16, loss scale none", "precision=float16 loss_scale=none"),
  Arm("float16, loss a mean", f"precision=float16 {MEAN}"),
  Arm("cbfloat16, loss scale none", "precision=cbfloat16"),
  Arm("cbfloat16, loss a mean", f"precision=cbfloat16 {MEAN}"),
  Arm("float16, a mean of 1M tokens", f"precision=float16 {LARGE_MEAN}"),
  Arm("cbfloat16, a mean of 1M tokens", f"precision=cbfloat16 {LARGE_MEAN}"),
  Arm("bfloat16 weights, nearest", "weight_dtype=bfloat16 weight_rounding=nearest"),
  Arm("bfloat16 weights, stochastic", "weight_dtype=bfloat16 weight_rounding=stochastic"),
  Arm("bfloat16 first moment", "mu_dtype=bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Study:
  """Where the runs are, how long they are, and how many."""

  out: pathlib.Path
  steps: int
  seeds: int
  keys: tuple[str, ...]

  def folder(self, arm: Arm, seed: int) -> pathlib.Path:
    """Of one run."""
    return self.out / f"{arm.name.replace(',', '').replace(' ', '_')}-seed{seed}"

  def records(self, arm: Arm, seed: int) -> list[Record]:
    """Those of a run, made if it is not there yet.

    Raises:
      UserError: it was stopped.
    """
    folder = self.folder(arm, seed)
    result = read_metrics(folder)
    if result and result[-1]["step"] == self.steps and "eval/loss" in result[-1]:
      return result
    place = (f"base_output_directory={self.out}", f"run_name={folder.name}", f"steps={self.steps}")
    seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}")
    run(load_config(["config=base", *JOB.split(), *arm.keys.split(), *place, *seeds, *self.keys]))
    result = read_metrics(folder)
    if result[-1]["step"] < self.steps:
      raise UserError(f"{folder} was stopped: remove it, and the same command goes on")
    return result


def final(records: Sequence[Record]) -> float:
  """The validation loss at the end."""
  return float(records[-1]["eval/loss"])


def losses(runs: dict[str, list[list[Record]]]) -> list[str]:
  """The table of final losses."""
  exact = np.array([final(records) for records in runs["float32"]])
  lines = [
    "| | validation loss | spread over seeds | less float32's, mean (largest) | skipped steps | last loss scale |",
    "|---|---|---|---|---|---|",
  ]
  for name, of_seeds in runs.items():
    result = np.array([final(records) for records in of_seeds])
    off, last = result - exact, of_seeds[0][-1]
    skipped = ", ".join(str(records[-1].get("skipped_steps", "–")) for records in of_seeds)
    scale = f"{last['loss_scale']:g}" if "loss_scale" in last else "–"
    lines.append(
      f"| {name} | {result.mean():.4f} | {np.ptp(result):.4f} | {off.mean():+.4f} "
      f"({np.abs(off).max():.4f}) | {skipped} | {scale} |"
    )
  return lines


def tensors(study: Study) -> list[Exponents]:
  """The exponents that float32 had at the end, with the first seed."""
  path = study.folder(ARMS[0], 0) / "precision_report.json"
  results: list[dict[str, Any]] = json.loads(path.read_text())[-1]["tensors"]
  return [_counted(each) for each in results]


def _counted(each: dict[str, Any]) -> Exponents:
  counts = np.zeros(256)
  counts[0], counts[-1] = each["zeros"], each["not_finite"]
  for exponent, count in each["exponents"].items():
    counts[127 + int(exponent)] = count
  return Exponents(each["kind"], each["name"], each["layer"], counts)


def lost(results: Sequence[Exponents], dynamic: float) -> list[str]:
  """The table of gradients that are set to zero, by layer."""
  shifts = {"a mean of 1M": -20, "a mean": -10, "none": 0, "dynamic": round(np.log2(dynamic))}
  columns = [(to, words) for to in (FLOAT16, CBFLOAT16) for words in shifts]
  header = " | ".join(f"{to.name}, {words}" for to, words in columns)
  lines = [f"| set to zero | {header} |", "|---" * (len(columns) + 1) + "|"]
  for kind in (ACTIVATIONS_GRADIENTS, GRADIENTS):
    places = dict.fromkeys(
      (each.layer, each.name if each.layer is None else "") for each in results
    )
    for layer, name in places:
      of_place = [
        each.counts
        for each in results
        if each.kind == kind and each.layer == layer and (not name or each.name == name)
      ]
      if of_place:
        one = Exponents(kind, name, layer, np.sum(of_place, 0))
        shares = " | ".join(f"{one.underflow(to, shifts[words]):.2%}" for to, words in columns)
        lines.append(f"| {kind}, {name or f'layer {layer}'} | {shares} |")
  return lines


def drawing(runs: dict[str, list[list[Record]]], results: Sequence[Exponents]) -> list[Chart]:
  """Training loss over steps, what it is off float32's, and the exponents beside the formats' ranges."""
  exact = _curves(runs["float32"])
  curves = {name: _curves(of_seeds) for name, of_seeds in runs.items()}
  losses = {name: each.mean(0) for name, each in curves.items()}
  off = {name: (each - exact).mean(0) for name, each in curves.items()}
  panels = [
    Panel("training loss (nats per token)", _lines(losses)),
    Panel("less float32's", _lines(off)),
  ]
  exponents = [_shares(kind, color, results) for color, kind in enumerate(KINDS)]
  ranges = [line for place, to in enumerate((FLOAT16, CBFLOAT16)) for line in _range(to, place)]
  shares = Panel("share of numbers", [*exponents, *ranges], log=True, low=1e-8, high=1)
  axis = "exponent of two, at the end of training in float32"
  return [Chart("losses", ["steps"], panels), Chart("exponents", [axis], [shares])]


def _lines(curves: dict[str, np.ndarray]) -> list[Line]:
  return [
    Line(name, [range(1, len(each) + 1)], each.tolist(), color=number, dash=number, group=name)
    for number, (name, each) in enumerate(curves.items())
  ]


def _shares(kind: str, number: int, results: Sequence[Exponents]) -> Line:
  """How many numbers of a kind have each exponent of those that are shown."""
  counts = np.sum([each.counts for each in results if each.kind == kind], 0)[1:-1]
  shares = np.where(counts, counts, np.nan) / counts.sum()
  shown = range(LOWEST, HIGHEST + 1)
  return Line(kind, [shown], [shares[126 + at] for at in shown], color=number, dash=number)


def _curves(of_seeds: list[list[Record]]) -> np.ndarray:
  """Training losses, smoothed: a row for each seed; a step without one has its neighbours'."""
  losses = np.array([[r.get("loss", np.nan) for r in records[1:]] for records in of_seeds])
  return np.apply_along_axis(_smoothed, 1, losses)


def _range(to: Format, place: int) -> list[Line]:
  """A line from a format's smallest number to its largest, pale where numbers are subnormal."""
  low, normal, largest = (
    min(max(exponent, LOWEST), HIGHEST)
    for exponent in (
      to.smallest_exponent - to.mantissa_bits,
      to.smallest_exponent,
      to.largest_exponent,
    )
  )
  height, look = 3e-8 * 3**place, {"color": len(KINDS) + place, "group": to.name}
  return [
    Line(f"{to.name}'s range", [[normal, largest]], [height] * 2, style="both", **look),
    Line("", [[low, normal]], [height] * 2, faint=True, **look),
  ]


def _smoothed(values: np.ndarray, window: int = 9) -> np.ndarray:
  """Means of the values around each."""
  padded = np.pad(values, window // 2, mode="edge")
  return np.array([np.nanmean(padded[at : at + window]) for at in range(len(values))])


def main() -> int:
  """Reads the arguments, runs, prints and writes."""
  pairs = [argument.partition("=") for argument in sys.argv[1:]]
  given = {key: value for key, _, value in pairs}
  own = {"out": "precision", "steps": "60", "seeds": "3"}
  keys = tuple(f"{key}={value}" for key, value in given.items() if key not in own)
  values = own | {key: value for key, value in given.items() if key in own}
  study = Study(pathlib.Path(values["out"]), int(values["steps"]), int(values["seeds"]), keys)
  try:
    runs = {arm.name: [study.records(arm, seed) for seed in range(study.seeds)] for arm in ARMS}
  except UserError as error:
    print(error, file=sys.stderr)
    return 2
  result = tensors(study)
  dynamic = float(runs["float16, loss scale dynamic"][0][-1]["loss_scale"])
  text = "\n".join([*losses(runs), "", *lost(result, dynamic)])
  (study.out / "precision.md").write_text(text + "\n")
  (study.out / "precision.html").write_bytes(
    picture("One job in several formats", drawing(runs, result))
  )
  summary = {name: [final(records) for records in of_seeds] for name, of_seeds in runs.items()}
  (study.out / "precision.json").write_text(json.dumps(summary, indent=2) + "\n")
  print(f"\n{text}\n\nWritten: {study.out}/precision.md, precision.html, precision.json")
  return 0


if __name__ == "__main__":
  sys.exit(main())
