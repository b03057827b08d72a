"""What is done before a run or instead of one: checks, the choice of microbatch, compilation."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import jax

from maxbatch.batch.autotune import Place, choose, explore_sizes
from maxbatch.batch.plan import BatchPlan, plan_batches
from maxbatch.compile import cache, step_file
from maxbatch.compile.compile_only import Prober, check_fits, compile_reports, write_reports
from maxbatch.compile.coupling import settle_accumulation
from maxbatch.compile.made_from import header
from maxbatch.compile.microbatches import CutsProber, settle_microbatches
from maxbatch.compile.report import CompileReport
from maxbatch.compile.validate import validate
from maxbatch.config.schema import Config, Explore
from maxbatch.data.dataset import RowSource
from maxbatch.data.token_cache import cache_folder
from maxbatch.devices import Device, num_slices
from maxbatch.errors import UserError
from maxbatch.learning_rate import learning_rate
from maxbatch.noise.requirements import check_noise
from maxbatch.pipeline.refusal import check_unused
from maxbatch.prepare import build_trainer, compiled_step
from maxbatch.step import Step, Trainer
from maxbatch.topology import Topology, topology
from maxbatch.topology_devices import devices_of


def is_run(config: Config) -> bool:
  """Whether there is something to train, not only to check or compile.

  Raises:
    UserError: keys that exclude each other, a run on devices that are not here, or keys
      without effect.
  """
  check_unused(config.pipeline)
  keys = config.compile
  if keys.validate_only and keys.compile_only:
    raise UserError(
      "validate_only=true and compile_only=true: one of them; validate_only=true first, it takes "
      "seconds"
    )
  instead = keys.validate_only or keys.compile_only
  if keys.compile_topology and not instead:
    raise UserError(
      f"compile_topology={keys.compile_topology} names devices that are not here, on which nothing "
      "can run; with compile_only=true or validate_only=true it works"
    )
  if keys.compiled_step and (instead or keys.save_compiled_step):
    other = "save_compiled_step" if keys.save_compiled_step else "compile_only or validate_only"
    raise UserError(
      f"compiled_step={keys.compiled_step} runs what was compiled before, and {other} asks for "
      'compiling; keep one of them, for example with compiled_step=""'
    )
  return not instead


def prepare_only(config: Config, *, forgetting: bool = False) -> None:
  """validate_only or compile_only: says what it finds, and ends before any training.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  devices = devices_of(config)
  if config.compile.validate_only:
    validate(config, devices)
    return
  cache.enable(config.compile.jax_cache_dir)
  layout = topology(config.mesh, len(devices), num_slices(devices))
  folder = Path(config.run.base_output_directory) / config.run.run_name
  if isinstance(config.batch.micro_batch_size, Explore):
    _explore(config, devices, layout, folder)
    return
  config = settled(config, devices, layout, forgetting=forgetting)
  plan = plan_batches(config.batch, config.run, layout)
  learning_rate(config.optimizer, plan, config.run.schedule_unit)
  print(f"{plan}\n", flush=True)
  reports = compile_reports(config, plan, devices)
  _show(reports, folder)
  if config.compile.save_compiled_step:
    steps = {each.micro_batch: each.program.step for each in reports}
    save_steps(config, plan, build_trainer(config, plan, devices), steps)
  check_fits(config, plan, reports)


def settled(
  config: Config, devices: Sequence[Device], layout: Topology, *, forgetting: bool = False
) -> Config:
  """The configuration with all chosen that was to be chosen on these devices.

  That is the microbatch size, and then into how many pieces a pipeline cuts a pass of it.

  Raises:
    UserError: nothing fits, the model cannot be split as the keys ask, or the noise scale cannot be
      measured so.
  """
  config = settled_size(config, devices, layout, forgetting=forgetting)
  check_noise(config, plan_batches(config.batch, config.run, layout))
  prober = CutsProber(config, devices, layout)
  place = Place(devices, layout)
  return settle_microbatches(config, place, prober, _choices(), forgetting=forgetting)


def settled_size(
  config: Config, devices: Sequence[Device], layout: Topology, *, forgetting: bool = False
) -> Config:
  """The configuration with its microbatch size chosen, if it was to be, on these devices.

  Raises:
    UserError: nothing fits, or the model cannot be split as the keys ask.
  """
  config = settle_accumulation(config, layout)
  prober = Prober(config, devices, layout)
  return choose(config, Place(devices, layout), prober, _choices(), forgetting=forgetting)


def save_steps(
  config: Config, plan: BatchPlan, trainer: Trainer, steps: Mapping[int, Step]
) -> None:
  """Writes compiled steps, by microbatch, to the file that save_compiled_step names.

  Raises:
    UserError: it cannot be written.
  """
  if jax.process_index() != 0:
    return
  path = config.compile.save_compiled_step
  programs = {size: cast(jax.stages.Compiled, step) for size, step in steps.items()}
  step_file.save(path, header(config, plan, trainer), programs)
  print(f"The compiled step is in {path}; compiled_step={path} runs it", flush=True)


def step_compiler(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource
) -> Callable[[int], Step]:
  """From a microbatch to its compiled step: out of the file compiled_step, or by compiling.

  Raises:
    UserError: the file is damaged or was made for another run.
  """
  if config.compile.compiled_step:
    return step_file.load(config.compile.compiled_step, header(config, plan, trainer)).__getitem__

  def compiled(micro_batch: int) -> Step:
    # What is saved must come from the compiler, not from the compilation cache.
    with cache.bypassed() if config.compile.save_compiled_step else contextlib.nullcontext():
      return compiled_step(config, plan, trainer, source, micro_batch)

  return compiled


def _choices() -> Path:
  """Where choices are remembered."""
  return cache_folder("") / "microbatch"


def _explore(config: Config, devices: Sequence[Device], layout: Topology, folder: Path) -> None:
  """Every size, ranked, and the report of the one recommended."""
  if settle_accumulation(config, layout) != config:
    raise UserError(
      "micro_batch_size=explore: the model's samples depend on each other, so that a step has one "
      "pass of the whole batch; micro_batch_size=none is the only size"
    )
  if (
    config.pipeline.pipeline_schedule != "none" and config.pipeline.num_pipeline_microbatches == -1
  ):
    print(
      "num_pipeline_microbatches=-1: every size is tried with the fewest microbatches that work; "
      "compile_only=true with the size that you take ranks the others too",
      flush=True,
    )
  prober = Prober(config, devices, layout)
  _, found = explore_sizes(config, Place(devices, layout), prober)
  report = prober.reports[found.ranked[0].candidate]
  print()
  _show([report], folder)
  written = folder / "exploration.json"
  written.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")


def _show(reports: Sequence[CompileReport], folder: Path) -> None:
  print("\n\n\n".join(map(str, reports)))
  written = write_reports(reports, folder)
  print(f"\nWritten: {', '.join(map(str, written))}", flush=True)
