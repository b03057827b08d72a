"""What a run says of itself: its parts before it trains, and how it went at its end."""

import pathlib

from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.data.registry import build_tokenizer
from maxbatch.models.generate import generate
from maxbatch.models.registry import Parameters
from maxbatch.modes.resolve import ResolvedRun
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.training.build import num_parameters, undivided_parameters
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer


def describe(resolved: ResolvedRun, trainer: Trainer, data: str) -> None:
  """What the run is made of, in a few lines."""
  print(f"Model  {resolved.config.model.model_name}: {num_parameters(trainer.model):,} parameters")
  print("Data   " + data.replace("\n", "\n       "))
  if trainer.pipeline:
    print(f"Pipeline\n       {trainer.pipeline}")
  print(f"Mesh   {resolved.plan.topology} on {trainer.mesh.devices.flat[0].device_kind}")
  for line in undivided_parameters(trainer):
    print(f"       {line}")
  print(f"Folder {resolved.folder.path}", flush=True)


def keep_sample(resolved: ResolvedRun, trainer: Trainer, params: Parameters) -> None:
  """Keeps text of the untrained model, to be shown beside that of the trained one."""
  if resolved.config.run.generate_length:
    write_run_file(resolved.folder.text_before_training, _sample(resolved, trainer, params))


def sum_up(
  resolved: ResolvedRun, plan: BatchPlan, trainer: Trainer, state: TrainState, position: Position
) -> None:
  """The last lines: how far, how well, where, and what next."""
  config, folder = resolved.config, resolved.folder
  complete = position.step == plan.steps
  if complete and config.run.generate_length:
    if resolved.folder.text_before_training.exists():
      print(f"\n--- text before training\n{resolved.folder.text_before_training.read_text()}")
    print(f"--- text after training\n{_sample(resolved, trainer, state.params)}\n---")
  tokens = plan.tokens(position.samples)
  print(f"\n{'Finished' if complete else 'Stopped'} after step {position.step}:", end=" ")
  print(f"{position.samples:,} samples, {tokens:,} tokens")
  losses = [record["eval/loss"] for record in read_metrics(folder.path) if "eval/loss" in record]
  if losses:
    print(f"Validation loss {losses[0]:.3f} → {losses[-1]:.3f} nats per token")
  print(f"Everything is in {folder.path}; next:")
  print(f"  curves:  tensorboard --logdir {folder.tensorboard}")
  if not complete:
    print("  resume:  the same command again")
  elif config.checkpoint.enable_checkpointing:
    budget = plan.budget
    amount = int(2 * budget.amount * budget.scale)
    print(f"  longer:  the same command with a larger budget, for example {budget.key}={amount}")


def _sample(resolved: ResolvedRun, trainer: Trainer, params: Parameters) -> str:
  run = resolved.config.run
  return generate(
    trainer.model,
    trainer.by_layer(params),
    build_tokenizer(resolved.config.data),
    run.prompt,
    run.generate_length,
    run.decode_sampling_temperature,
  )


def _sample_file(resolved: ResolvedRun) -> pathlib.Path:
  return resolved.folder.text_before_training
