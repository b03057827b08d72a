"""One run from its configuration to its end: plan, prepare, train, sum up."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import yaml

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan import BatchPlan, Position, plan_batches
from maxbatch.batch.topology import topology
from maxbatch.checkpoints.checkpointer import Checkpointer, Restored
from maxbatch.checkpoints.identity import identity
from maxbatch.compile import cache
from maxbatch.compile.steps import save_steps, step_compiler
from maxbatch.config.load import DERIVED, to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.data.dataset import Dataset
from maxbatch.data.registry import build_dataset
from maxbatch.hardware.devices import find_devices, num_slices
from maxbatch.models.generate import generate
from maxbatch.models.registry import Parameters
from maxbatch.modes.noise import calibration_programs, make_noise
from maxbatch.modes.resolve import resolve
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.metrics import MetricsLog, read_metrics
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.progress import Progress
from maxbatch.training.build import (
  build_trainer,
  compiled_eval,
  eval_rows,
  num_parameters,
  streams,
  train_rows,
  undivided_parameters,
)
from maxbatch.training.loop import Job, first_record, train
from maxbatch.training.programs import StepPrograms
from maxbatch.training.state import TrainState, to_save
from maxbatch.training.step import EvalStep, Trainer


def run(config: Config, *, forget: bool = False) -> tuple[TrainState, Position]:
  """Plans, prepares, trains and sums up one run; its state and position at the end.

  Args:
    config: the run.
    forgetting: choose anew what the keys leave open, whatever is remembered.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
  """
  devices = find_devices(config.mesh.num_simulated_devices)
  cache.enable(config.compile.jax_cache_dir)
  layout = topology(config.mesh, len(devices), num_slices(devices))
  config = resolve(config, devices, layout, forget=forget)
  plan = plan_batches(config.batch, config.run, layout)
  print(f"{plan}\n", flush=True)
  learning_rate(config.optimizer, plan, config.run.schedule_unit)  # Refuses before anything slow.
  trainer = build_trainer(config, plan, devices)
  dataset = build_dataset(config.data, config.batch.max_target_length)
  folder = RunFolder.of(config.run)
  _describe(config, plan, trainer, dataset.description, folder)
  with _checkpointer(config, folder, dataset.fingerprint) as checkpointer:
    restored = _restore(config, trainer, checkpointer)
    position = restored.position if restored else Position(0, 0)
    noise = make_noise(config, plan, trainer, folder.path)
    if noise:
      noise.restore(restored.notes if restored else {}, position)
      plan = noise.planned(plan)
    plan = plan.starting_at(position)
    if restored:
      _tell_changes(plan, restored)
      trainer = build_trainer(config, plan, devices)
    if restored and position.step >= plan.steps:
      print(f"This run is complete at step {position.step}. For more, raise its budget.")
      return trainer.from_saved(restored.state), position
    with (
      MetricsLog(folder.path, position.step) as log,
      Progress(position.step, plan.steps, config.run.log_period) as progress,
      StepPrograms(
        step_compiler(config, plan, trainer, dataset.train), plan.micro_batches
      ) as programs,
      calibration_programs(config, plan, devices, dataset.train) as calibration,
    ):
      _write_config(config, plan, folder)
      state, eval_step = _make_ready(config, plan, trainer, dataset, restored, programs)
      if config.compile.save_compiled_step:
        save_steps(config, plan, trainer, programs.all())
      job = Job(
        plan=plan,
        run=config.run,
        checkpoint=config.checkpoint,
        learning_rate=learning_rate(config.optimizer, plan, config.run.schedule_unit),
        programs=programs,
        streamed=streams(config),
        trainer=trainer,
        eval_step=eval_step,
        train_rows=train_rows(config, trainer, dataset),
        eval_rows=eval_rows(config, plan, trainer, dataset),
        checkpointer=checkpointer if config.checkpoint.enable_checkpointing else None,
        log=log,
        progress=progress,
        noise=noise and dataclasses.replace(noise, calibration=calibration),
      )
      if position.step == 0:
        first_record(job, state.params)
        _keep_sample(config, trainer, state.params, folder)
      state, reached = train(job, state, position)
  if noise:
    plan = noise.planned(plan).starting_at(position)
  _sum_up(config, plan, trainer, state, reached, folder)
  if noise:
    print(f"  batch:   {noise.meter.line(plan.batch_at(reached.samples))}")
  return state, reached


def _checkpointer(config: Config, folder: RunFolder, dataset_fingerprint: str) -> Checkpointer:
  return Checkpointer(folder.checkpoints, config.checkpoint, identity(config, dataset_fingerprint))


def _restore(config: Config, trainer: Trainer, checkpointer: Checkpointer) -> Restored | None:
  """The newest good checkpoint of this run's folder; None for a fresh start."""
  if not config.checkpoint.enable_checkpointing:
    return None
  restored = checkpointer.restore(to_save(trainer.abstract))
  if restored:
    at = restored.position
    print(f"Resuming after step {at.step} ({at.samples:,} samples)", flush=True)
  return restored


def _tell_changes(plan: BatchPlan, restored: Restored) -> None:
  """Says if the batch goes on otherwise than the run that wrote the checkpoint would have."""
  before, now = restored.plan.get("batch_schedule"), plan.as_dict()["batch_schedule"]
  if before != now:
    print(
      f"The batch schedule is another one from sample {restored.position.samples:,} on: "
      f"{now} instead of {before} ([from {plan.schedule.unit}, samples per step])"
    )


def _make_ready(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  dataset: Dataset,
  restored: Restored | None,
  programs: StepPrograms,
) -> tuple[TrainState, EvalStep]:
  """State and compiled functions, side by side: compiling leaves the interpreter free."""
  began = time.perf_counter()
  pool = ThreadPoolExecutor(2)
  try:
    first_step = pool.submit(programs, plan.phases[0].micro_batch)
    evaluation = pool.submit(compiled_eval, plan, trainer, dataset.validation or dataset.train)
    if restored:
      state = trainer.from_saved(restored.state)
    else:
      state = trainer.init(config.model.init_weights_seed)
    first_step.result()
    eval_step = evaluation.result()
  finally:
    pool.shutdown(wait=False, cancel_futures=True)  # An error or a signal waits for no compiler.
  print(f"Compiled in {time.perf_counter() - began:.1f} s\n", flush=True)
  return state, eval_step


def _describe(
  config: Config, plan: BatchPlan, trainer: Trainer, data: str, folder: RunFolder
) -> None:
  """What the run is made of, in a few lines."""
  print(f"Model  {config.model.model_name}: {num_parameters(trainer.model):,} parameters")
  print(f"Data   {data}")
  if trainer.pipeline:
    print(f"Pipeline\n       {trainer.pipeline}")
  print(f"Mesh   {plan.topology} on {trainer.mesh.devices.flat[0].device_kind}")
  for line in undivided_parameters(trainer):
    print(f"       {line}")
  print(f"Folder {folder.path}", flush=True)


def _write_config(config: Config, plan: BatchPlan, folder: RunFolder) -> None:
  """config.yml: every key, and what was derived from them."""
  values = to_flat_dict(config) | {DERIVED: plan.as_dict()}
  write_run_file(folder.config, yaml.safe_dump(values, sort_keys=False))


def _sample(config: Config, trainer: Trainer, params: Parameters) -> str:
  run = config.run
  params = trainer.by_layer(params)
  return generate(
    trainer.model, params, run.prompt, run.generate_length, run.decode_sampling_temperature
  )


def _keep_sample(config: Config, trainer: Trainer, params: Parameters, folder: RunFolder) -> None:
  if config.run.generate_length:
    write_run_file(folder.text_before_training, _sample(config, trainer, params))


def _sum_up(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  state: TrainState,
  position: Position,
  folder: RunFolder,
) -> None:
  """The last lines: how far, how well, where, and what next."""
  complete = position.step == plan.steps
  if complete and config.run.generate_length:
    if folder.text_before_training.exists():
      before = folder.text_before_training.read_text(encoding="utf-8")
      print(f"\n--- text before training\n{before}")
    print(f"--- text after training\n{_sample(config, trainer, state.params)}\n---")
  tokens = plan.tokens(position.samples)
  print(f"\n{'Finished' if complete else 'Stopped'} after step {position.step}:", end=" ")
  print(f"{position.samples:,} samples, {tokens:,} tokens")
  losses = [record["eval/loss"] for record in read_metrics(folder.path) if "eval/loss" in record]
  if losses:
    print(f"Validation loss {losses[0]:.3f} → {losses[-1]:.3f} nats per token")
  print(f"Everything is in {folder.path}; next:")
  print(f"  curves:  tensorboard --logdir {folder.tensorboard}")
  if not complete:
    print("  go on:   the same command again")
  elif config.checkpoint.enable_checkpointing:
    budget = plan.budget
    amount = int(2 * budget.amount * budget.scale)
    print(f"  longer:  the same command with a larger budget, for example {budget.key}={amount}")
