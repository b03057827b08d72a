"""Prints the tables of docs/effective_microbatches.md: what each shipped model runs best with on a slice.

    .venv/bin/python scripts/effective_microbatches.py                      # seconds; compiles nothing
    .venv/bin/python scripts/effective_microbatches.py compile llama2-7b v5e-256   # one row exactly: minutes
    .venv/bin/python scripts/refresh_docs.py docs/effective_microbatches.md # puts them into the page

A row that was compiled exactly is marked; of the large slices only such rows are listed. `compile` compiles the
microbatch of a row and puts it into the table of compiled steps (maxbatch/estimate/compiled_steps.json), as one
that was chosen by its estimate; the next page is made from it. `scripts/fit_step_rates.py read REPORT` puts in
what other runs have compiled or explored.
"""

import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction

from effective_batch import EffectiveBatch, effective_batch
from fit_step_rates import KINDS, chosen_share, chosen_steps, ratios, read, table, work_of_step

from maxbatch.config.load import load_config
from maxbatch.core.keys import text
from maxbatch.estimate.best_split import BatchSplit
from maxbatch.estimate.chips import ALL_CHIPS
from maxbatch.estimate.step_roofline import step_rates, step_roofline
from maxbatch.estimate.step_work import StepWork, step_work
from maxbatch.hardware.topologies import slice_named
from maxbatch.modes.compile_only import prepare_only

SLICES = {
  "v5e": ("v5e-16", "v5e-256"),
  "v5p": ("v5p-16", "v5p-512"),
  "v6e": ("v6e-8", "v6e-256"),
  "a100": ("a100-8", "a100-64"),
  "h100": ("h100-8", "h100-64"),
  "b200": ("b200-8", "b200-64"),
}
"""By generation, the slice of which each model has a row, and one that has those that were compiled."""
COLUMNS = (
  "model",
  "tokens of a row",
  "slice",
  "micro_batch_size",
  "remat_policy",
  "mesh",
  "utilisation",
  "memory left",
  "smallest efficient batch",
)
OUT = pathlib.Path("runs/effective_microbatches")
GIB = 2**30


def models() -> list[str]:
  """Lists the shipped ones, without mixtures of experts: no step of one has been compiled for a TPU, which the
  rates could be held to."""
  return sorted(
    path.stem
    for path in pathlib.Path("configs/models").glob("*.yml")
    if path.stem != "default" and "num_experts:" not in path.read_text(encoding="utf-8")
  )


@functools.cache
def work_of(model: str) -> StepWork:
  """A model as it is shipped, at its length, in bfloat16."""
  return step_work(load_config(["config=base", f"model_name={model}", "precision=bfloat16"]))


def effective(model: str, place: str) -> EffectiveBatch | None:
  """What the model runs best with on the slice."""
  chip = ALL_CHIPS[place.partition("-")[0]]
  return effective_batch(work_of(model), chip, slice_named(place).num_devices)


def row(model: str, place: str) -> str:
  """A line of the tables."""
  work, result = work_of(model), effective(model, place)
  start = f"| {model} | {work.length:,} | {place} |"
  if result is None:
    return f"{start} no microbatch fits | | | | | |"
  best, small = result.fastest, result.smallest
  is_compiled = best.step.how == "compiled"
  mark, about = (" ✓", "") if is_compiled else ("", "≈ ")
  tokens = small.batch * work.length
  return (
    f"{start} {text(best.per_device)}{mark} | {best.remat} | {mesh_of(best)} | {about}{best.step.utilisation:.0%} | "
    f"{about}{best.step.free_bytes / GIB:.1f} GiB | {small.batch:,} ({tokens / 1e6:.3g}M tokens) |"
  )


def mesh_of(split: BatchSplit) -> str:
  """The axes of more than one device."""
  sizes = split.mesh.shape
  return " × ".join(f"{axis} {sizes[axis]}" for axis in sizes if sizes[axis] > 1) or "1 device"


def tables() -> Iterator[str]:
  """One for each generation."""
  for generation, places in SLICES.items():
    yield f"## {generation}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    small, large = places
    for model in models():
      yield row(model, small)
      if (result := effective(model, large)) and result.fastest.step.how == "compiled":
        yield row(model, large)
    yield ""


def chosen_table() -> Iterator[str]:
  """Utilisation and peak of the steps that were compiled since their estimates were the fastest."""
  yield "| step | utilisation, estimated | compiled | ratio | peak, estimated | compiled | ratio |"
  yield "|---|---|---|---|---|---|---|"
  for step in (*chosen_steps(), *chosen_steps(on_gpus=True)):
    place, rates = (step.chip, step.mesh, Fraction(step.per_device)), step_rates(step.chip)
    estimate = step_roofline(work_of_step(step), *place, 1, step.remat, rates)
    time, peak = ratios(step, rates)
    yield (
      f"| {step.name} | {estimate.utilisation:.1%} | {estimate.utilisation * time:.1%} | {time:.2f} | "
      f"{estimate.peak_bytes / GIB:.3g} GiB | {step.peak_bytes / GIB:.3g} GiB | {peak:.2f} |"
    )
  for kind, chip in KINDS.items():
    if chosen_steps(chip.is_gpu):
      share = chosen_share(step_rates(chip), chip.is_gpu)
      yield f"| mean of {kind.upper()}s | | | {share:.2f} | | | |"


def compile_row(model: str, place: str) -> None:
  """Compiles the microbatch of a row, with one microbatch a step, and notes what it took."""
  result = effective(model, place)
  if result is None:
    raise SystemExit(f"{model} on {place}: no microbatch fits")
  keys = {
    **result.fastest.keys,
    "batch_size": "-1",
    "model_name": model,
    "precision": "bfloat16",
    "compile_only": "true",
    "compile_topology": place,
    "base_output_directory": str(OUT),
    "run_name": f"{model}_{place}",
  }
  prepare_only(load_config(["config=base", *(f"{key}={value}" for key, value in keys.items())]))
  read([str(OUT / keys["run_name"] / "compile_report.txt")], chosen=True)


def main(arguments: Sequence[str]) -> int:
  """Prints the tables, or compiles one row of them."""
  if arguments[:1] == ["compile"]:
    compile_row(*arguments[1:])
    return 0
  # What the user has compiled is no figure of a page.
  with tempfile.TemporaryDirectory() as empty:
    os.environ["XDG_CACHE_HOME"] = empty
    if arguments == ["chosen"]:
      print(*chosen_table(), sep="\n")
    else:
      print(*tables(), "## Held against the compiler", "", *table(), sep="\n")
      print("", "And of GPUs:", "", *table(on_gpus=True), sep="\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
