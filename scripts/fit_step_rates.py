"""The rates of the estimate without a compiler (maxbatch/estimate/step_rates.json), and how good they are.

    .venv/bin/python scripts/fit_step_rates.py compile            # the cases below: 1 to 3 minutes each
    .venv/bin/python scripts/fit_step_rates.py read REPORT …      # compile_report.txt of other runs, too
    .venv/bin/python scripts/fit_step_rates.py read dropout_rate=0 REPORT …    # that trained another way
    .venv/bin/python scripts/fit_step_rates.py fit                # writes the rates
    .venv/bin/python scripts/fit_step_rates.py table              # estimate, compiled, ratio

`compile` leaves out what runs/step_rates already has; delete that folder after the step has changed. Then
`read` without a name, which makes the table anew from these reports, and `fit`. The fit is one linear least squares with rates
of at least zero, of every part of every case, each weighted by the case's step; the rates are of chips and
operations, never of a model. `table` also says what each step is predicted as with the rates of all
other models.
"""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from scipy.optimize import nnls

from maxbatch.config.load import load_config
from maxbatch.estimate.chips import CHIPS, GPUS, Chip
from maxbatch.estimate.compiled_steps import (
  FILE,
  CompiledStep,
  compiled_steps,
  named,
  read_report,
)
from maxbatch.estimate.links import is_wide, link_seconds
from maxbatch.estimate.step_roofline import (
  RATES,
  StepRates,
  memory_work,
  state_bytes,
  step_rates,
  step_roofline,
  update_bytes,
)
from maxbatch.estimate.step_work import (
  Part,
  PartWork,
  StepWork,
  microbatch_work,
  step_work,
  weight_shards,
)
from maxbatch.modes.compile_only import prepare_only

OUT = pathlib.Path("runs/step_rates")
# Model, slice, tokens of a row, samples per device, remat policy, devices that share a layer.
CASES: list[tuple[str, str, int, int, str, int]] = [
  ("llama2-7b", "v5e-256", 2048, 4, "full", 1),
  ("llama2-7b", "v5e-256", 2048, 1, "full", 1),
  ("llama2-7b", "v5e-256", 2048, 16, "full", 1),
  ("llama3-8b", "v5e-256", 2048, 4, "full", 1),
  ("llama2-7b", "v6e-64", 2048, 4, "full", 1),
  ("llama3-8b", "v6e-64", 2048, 4, "full", 1),
  ("gpt2-small", "v5e-16", 1024, 8, "none", 1),
  ("qwen3-0.6b", "v5e-16", 1024, 8, "full", 1),
  ("llama3.2-3b", "v5p-16", 4096, 2, "full", 1),
  ("olmo2-7b", "v5p-128", 4096, 4, "full", 1),
  ("llama3.2-1b", "v6e-8", 2048, 4, "full", 1),
  ("gemma2-2b", "v6e-16", 8192, 2, "full", 1),
  ("mistral-7b", "v5e-64", 8192, 1, "full", 1),
  ("smollm-360m", "v6e-16", 2048, 8, "minimal", 1),
  ("llama3-8b", "v5p-128", 2048, 4, "minimal", 1),
  ("qwen3-0.6b", "v5e-16", 2048, 4, "minimal", 1),
  ("gpt2-small", "v5p-16", 1024, 16, "none", 1),
  ("qwen2.5-7b", "v5e-64", 4096, 2, "full", 1),
  ("llama2-7b", "v5e-64", 2048, 4, "full", 4),
  ("qwen3-0.6b", "v5e-16", 4096, 4, "minimal", 1),
  ("llama2-7b", "v5e-256", 4096, 1, "minimal", 1),
  # With the extra gpu-compile, and XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for the larger ones.
  ("gpt2-small", "h100-8", 1024, 16, "none", 1),
  ("llama3-8b", "h100-8", 8192, 1, "full", 1),
  ("llama3.2-1b", "h100-8", 4096, 4, "minimal", 1),
  ("llama2-7b", "h100-64", 4096, 4, "minimal", 1),
  ("llama3-8b", "h100-64", 8192, 2, "full", 1),
  ("llama2-7b", "a100-8", 4096, 2, "full", 1),
  ("llama3.2-1b", "a100-8", 4096, 4, "full", 1),
  ("llama3-8b", "b200-8", 8192, 2, "minimal", 1),
  ("llama3.2-3b", "h200-8", 4096, 4, "minimal", 1),
  ("gemma2-2b", "h100-8", 4096, 2, "full", 1),
  ("qwen3-0.6b", "h100-8", 4096, 4, "none", 1),
  ("gpt2-small", "a100-8", 1024, 16, "full", 1),
  ("gpt2-small", "b200-8", 1024, 16, "full", 1),
  ("llama3.2-1b", "gb200-8", 4096, 4, "none", 1),
  ("olmo2-7b", "h100-16", 4096, 4, "full", 1),
  ("qwen3-0.6b", "a100-16", 4096, 4, "minimal", 1),
  ("llama3-8b", "h100-128", 8192, 4, "full", 1),
]
# Copies that the compiler makes for attention have no name, and count as other.
GROUPS: tuple[tuple[Part, ...], ...] = (
  ("attention", "other"),
  ("mlp",),
  ("norm",),
  ("head",),
  ("embedding",),
)
DIGITS = 4
ALIKE = {"v4": "v5p", "tpu7x": "v6e", "v5e": "", "v5p": "", "v6e": ""}
ALIKE_GPUS = {"a100": "", "h100": "", "h200": "h100", "b200": "h100", "gb200": "b200"}
KNOWN = {"residuals": 1.0, "tiles": 1.0, "rounded": 1.0}
"""How often these move; what is rounded to eight bits is read and written once, by a kernel or fused."""
ONCE = ("residuals", "kept")
KINDS = {"tpu": CHIPS["v5e"], "gpu": GPUS["h100"]}
"""By kind of chips with rates of their own, one of them."""
ENOUGH = 2
"""Steps on a generation without which its rates are a guess."""
GIB = 2**30


def compile_cases() -> None:
  """Compiles the cases of which there is no report yet."""
  for model, place, length, size, remat, tensor in CASES:
    name = f"{model}_{place}_{length}_{size}_{remat}_{tensor}"
    if (OUT / name / "compile_report.txt").exists():
      continue
    keys = [
      *("config=base", "compile_only=true", "precision=bfloat16", f"model_name={model}"),
      *(f"compile_topology={place}", f"max_target_length={length}", f"remat_policy={remat}"),
      *(f"per_device_batch_size={size}", f"ici_tensor_parallelism={tensor}"),
      *("ici_data_parallelism=1", "ici_fsdp_parallelism=-1"),
      *(f"base_output_directory={OUT}", f"run_name={name}"),
    ]
    prepare_only(load_config(keys))


def read(paths: Sequence[str], chosen: bool = False) -> None:
  """Puts the steps of reports into the table, where a step replaces its like; without any, makes the
  table anew from what `compile` has made. Those that were chosen by their estimates stay apart."""
  keys = tuple(path for path in paths if re.fullmatch(r"\w+=\w+", path))
  files = [pathlib.Path(path) for path in paths if path not in keys]
  result = {step.name: step for step in compiled_steps() if paths or step.chosen}
  for file in files or sorted(OUT.glob("*/compile_report.txt")):
    text = file.read_text()
    steps = read_report(text, work_of(*named(text), keys))
    result |= {
      one.name: one
      for one in (dataclasses.replace(step, keys=keys, chosen=chosen) for step in steps)
    }
  rows = [json.dumps(dataclasses.asdict(result[name])) for name in sorted(result)]
  FILE.write_text("[\n" + ",\n".join(f"  {row}" for row in rows) + "\n]\n")
  compiled_steps.cache_clear()
  write({kind: step_rates(chip) for kind, chip in KINDS.items()})


def fit_steps(on_gpus: bool = False) -> list[CompiledStep]:
  """Returns the steps from which the rates are."""
  return [step for step in compiled_steps() if step.chip.is_gpu == on_gpus and not step.chosen]


def chosen_steps(on_gpus: bool = False) -> list[CompiledStep]:
  """Returns the steps that were compiled since their estimates were the fastest."""
  return [step for step in compiled_steps() if step.chip.is_gpu == on_gpus and step.chosen]


@functools.cache
def work_of(model: str, length: int, keys: tuple[str, ...] = ()) -> StepWork:
  """The work of a shipped model in bfloat16."""
  named = ["config=base", f"model_name={model}", f"max_target_length={length}"]
  return step_work(load_config([*named, "precision=bfloat16", *keys]))


def work_of_step(step: CompiledStep) -> StepWork:
  """The work of a step in the table."""
  return work_of(step.model_name, step.length, tuple(step.keys))


class Equations:
  """Rows of a linear least squares, with unknowns that are named as they appear."""

  def __init__(self) -> None:
    """Without rows."""
    self.names: list[str] = []
    self.rows: list[tuple[dict[str, float], float]] = []

  def add(self, terms: dict[str, float], result: float, weight: float) -> None:
    """Σ unknown · factor = result, which counts `weight`."""
    self.names += [name for name in terms if name not in self.names]
    self.rows.append(({name: weight * factor for name, factor in terms.items()}, weight * result))

  def solved(self, least: Mapping[str, float] | None = None) -> dict[str, float]:
    """The unknowns, none below its least value or negative, to a few digits."""
    matrix = np.array([[terms.get(name, 0.0) for name in self.names] for terms, _ in self.rows])
    known = np.array([(least or {}).get(name, 0.0) for name in self.names])
    result = known + nnls(matrix, np.array([r for _, r in self.rows]) - matrix @ known)[0]
    return {name: float(f"{x:.{DIGITS}g}") for name, x in zip(self.names, result, strict=True)}


def of_gathers(step: CompiledStep, work: StepWork) -> dict[str, float]:
  """The share of a step's waiting that is each part's: that of its weights."""
  layers = work.model.base_num_decoder_layers * work.layer_parameters
  share: dict[str, float] = {
    part: work.model.base_num_decoder_layers * sum(a * b for a, b in work.layer_matrix[part])
    for part in ("attention", "mlp")
  }
  tables = 1 if work.model.logits_via_embedding else 2
  share |= dict.fromkeys(("head", "embedding"), tables * work.table_parameters / 2)
  total = layers + tables * work.table_parameters
  return {part: step.waits * size / total for part, size in share.items()}


def seconds(steps: Sequence[CompiledStep]) -> dict[str, float]:
  """The rates of products, elementwise work and traffic."""
  equations = Equations()
  for step in steps:
    if not step.parts:
      continue
    work, chip = work_of_step(step), step.chip
    asked = microbatch_work(work, chip, step.mesh, Fraction(step.per_device), step.remat)
    waits = of_gathers(step, work)
    for group in GROUPS:
      equations.add(
        terms_of(step, [asked[part] for part in group]),
        sum(step.parts.get(part, 0.0) - waits.get(part, 0.0) for part in group)
        - sum(known_seconds(asked[part], chip) for part in group),
        1 / step.microbatch_seconds,
      )
  # Products run at no more than the chip's peak, and what is kept is at least written and read once.
  least = {name: 1.0 for name in equations.names if name.startswith("product ")}
  return equations.solved(least | {"traffic kept hidden": 1.0})


def terms_of(step: CompiledStep, group: Sequence[PartWork]) -> dict[str, float]:
  """What some parts' seconds are sums of: those of one unit of each rate."""
  chip, terms = step.chip, collections.defaultdict[str, float](float)
  for one in group:
    terms[f"product {step.generation}"] += one.products / chip.peak_flops
    for kind, count in one.registers.items():
      terms[f"cycles {kind}"] += count / chip.clock / chip.tensor_cores
    for kind, size in one.traffic.items():
      if kind not in KNOWN:
        terms[f"traffic {kind}"] += size / chip.hbm_bandwidth
  return {name: seconds for name, seconds in terms.items() if seconds}


def known_seconds(one: PartWork, chip: Chip) -> float:
  """Of a part, what has no rate: kernels at the chip's peak, and what is kept written and read once."""
  kept = sum(times * one.traffic.get(kind, 0.0) for kind, times in KNOWN.items())
  return one.kernels / chip.peak_flops + kept / chip.hbm_bandwidth


def waiting(steps: Sequence[CompiledStep]) -> dict[str, float]:
  """How long computing waits for collectives, in what gathers and reductions take on the links."""
  equations = Equations()
  for step in steps:
    work, chip = work_of_step(step), step.chip
    links = link_seconds(work, chip, step.mesh, Fraction(step.per_device), step.remat)
    if not step.parts or step.tensor > 1 or weight_shards(work, step.mesh)[0] == 1:
      continue
    width = "wide" if is_wide(step.mesh, chip) else "narrow"
    terms = {f"waits {step.generation} {width}": links.gathers + links.reductions}
    equations.add(terms, step.waits, 1 / step.microbatch_seconds)
  return equations.solved()


def update(steps: Sequence[CompiledStep]) -> dict[str, float]:
  """How often the optimizer moves what it reads and writes."""
  equations = Equations()
  for step in steps:
    place = work_of_step(step), step.mesh
    once = update_bytes(*place) / step.chip.hbm_bandwidth
    equations.add({"traffic update": once}, step.rest_seconds, 1 / step.rest_seconds)
  return equations.solved()


def memory(steps: Sequence[CompiledStep]) -> dict[str, float]:
  """How many copies of what is counted lie in memory."""
  equations = Equations()
  for step in steps:
    work = work_of_step(step)
    held = memory_work(work, step.chip, step.mesh, Fraction(step.per_device), step.remat)
    activations = step.peak_bytes - state_bytes(work, step.mesh)
    # One copy of what is kept for the backward pass there must be, or until the last tile.
    known = sum(held.pop(kind) for kind in ONCE)
    equations.add(held, max(0.0, activations - known), 1 / step.peak_bytes)
  return dict.fromkeys(ONCE, 1.0) | equations.solved()


def fitted(steps: Sequence[CompiledStep]) -> StepRates:
  """The rates of these steps."""
  result = seconds(steps) | waiting(steps) | update(steps)

  def named(prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in result.items() if k.startswith(prefix)}

  inverse = {name: float(f"{1 / x:.{DIGITS}g}") for name, x in named("product ").items() if x}
  # Generations of which no step was compiled are taken for the one with the most alike cores.
  usual = sum(inverse.values()) / len(inverse)
  alike = ALIKE_GPUS if steps[0].chip.is_gpu else ALIKE
  inverse |= {new: inverse.get(like, usual) for new, like in alike.items() if new not in inverse}
  return StepRates(
    product=inverse,
    cycles=named("cycles "),
    traffic=named("traffic ") | KNOWN,
    waits=named("waits "),
    memory=memory(steps),
    spread={},
    cases=len(steps),
  )


def predicted(steps: Sequence[CompiledStep]) -> list[tuple[float, float] | None]:
  """The ratios of every step with the rates of all other models; None where these have no step on its
  generation, or too few to tell."""
  results: list[tuple[float, float] | None] = []
  for step in steps:
    others = [one for one in steps if one.model_name != step.model_name]
    alike = sum(one.generation == step.generation for one in others)
    results.append(ratios(step, fitted(others)) if alike >= ENOUGH else None)
  return results


def ratios(step: CompiledStep, rates: StepRates) -> tuple[float, float]:
  """Estimated over compiled: seconds of a microbatch, bytes at the peak."""
  place = step.chip, step.mesh, Fraction(step.per_device)
  result = step_roofline(work_of_step(step), *place, 1, step.remat, rates)
  return result.microbatch_seconds / step.microbatch_seconds, result.peak_bytes / step.peak_bytes


def chosen_share(rates: StepRates, on_gpus: bool = False) -> float:
  """Speed as compiled over speed as estimated: the mean of the steps that were compiled since their estimates
  were the fastest, 1 without any."""
  every = [ratios(step, rates)[0] for step in chosen_steps(on_gpus)]
  return float(f"{np.mean(every or [1.0]):.{DIGITS}g}")


def table(on_gpus: bool = False) -> Iterator[str]:
  """Estimate, compiled and ratio of every step in the table, in Markdown; and the ratio that the rates of
  all other models give."""
  yield "| step | estimate | compiled | ratio | without the model | peak, estimate | compiled | ratio | without |"
  yield "|---|---|---|---|---|---|---|---|---|"
  every = fit_steps(on_gpus)
  for step, fresh in zip(every, predicted(every), strict=True):
    time, peak = ratios(step, step_rates(step.chip))
    without = [f"{x:.2f}" for x in fresh] if fresh else ["", ""]
    yield (
      f"| {step.name} | {time * step.microbatch_seconds:.4g} s | {step.microbatch_seconds:.4g} s | "
      f"{time:.2f} | {without[0]} | {peak * step.peak_bytes / GIB:.3g} GiB | "
      f"{step.peak_bytes / GIB:.3g} GiB | {peak:.2f} | {without[1]} |"
    )


def fit() -> None:
  """Writes the rates."""
  write({kind: fit_of(chip.is_gpu) for kind, chip in KINDS.items()})
  print(RATES.read_text())


def fit_of(on_gpus: bool) -> StepRates:
  """Returns the rates of one kind, with how far they are off for other models."""
  steps = fit_steps(on_gpus)
  known = [each for each in predicted(steps) if each]
  errors = [[math.log(x) for x in each] for each in zip(*known, strict=True)]
  spread = [float(f"{math.sqrt(np.mean(np.square(each))):.2g}") for each in errors]
  return dataclasses.replace(
    fitted(steps), spread=dict(zip(("seconds", "bytes"), spread, strict=True))
  )


def write(rates: Mapping[str, StepRates]) -> None:
  """Writes the rates by kind, with what chosen steps have taken."""
  tables = {
    kind: dataclasses.replace(one, chosen=chosen_share(one, KINDS[kind].is_gpu))
    for kind, one in rates.items()
  }
  content = {kind: dataclasses.asdict(one) for kind, one in tables.items()}
  RATES.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: Sequence[str]) -> int:
  """One of the four commands."""
  command, *rest = arguments or ["table"]
  if command == "compile":
    compile_cases()
  elif command == "read":
    read(rest)
  elif command == "fit":
    fit()
  else:
    print(*table(), *table(on_gpus=True), sep="\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
