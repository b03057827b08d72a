"""One run of reinforcement learning: a warm start, then training on what the policy itself has sampled."""

import dataclasses
import re

import jax

from maxbatch.compile import cache
from maxbatch.config.schema import Config
from maxbatch.core.phases import Position
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.ending import ending_together
from maxbatch.modes.method import Purpose
from maxbatch.modes.run import run
from maxbatch.modes.start import connected_devices, started
from maxbatch.rl.demonstrations import warm_start, warms_up
from maxbatch.rl.method import GRPO, GRPOMethod
from maxbatch.run_folder.metrics import each_record
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.state import TrainState


def run_rl(config: Config, *, retune: bool = False) -> tuple[TrainState, Position]:
  """Runs a warm start, where one is asked for, then the run; returns its state and position at the end.

  Args:
    config: the run; its batch counts prompts.
    retune: choose anew what the keys leave open, whatever is remembered.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
  """
  with started(config), ending_together():
    cache.enable(config.compile.jax_cache_dir)
    resolved = GRPO.resolve(config, connected_devices(config), Purpose.RUN, retune=retune)
    warms = warms_up(resolved.config)
  if warms and config.distributed.elastic:
    raise UserError(
      f"elastic=true warm_start_steps={config.rl.warm_start_steps}: the batch of a warm start depends on the "
      "number of devices, which may become fewer. Train it first, by warm_start_steps and elastic=false, and stop "
      "once it has saved; or start from other parameters, by warm_start_steps=0 load_parameters_path=…"
    )
  if warms:
    config = _warmed_up(resolved.config, resolved.target.layout)
    resolved = dataclasses.replace(resolved, given=config, config=config)
  return run(resolved.config, method=GRPOMethod(resolved))


def _warmed_up(config: Config, training: Topology) -> Config:
  """Returns the configuration of a run that begins with what was trained on demonstrations, which
  it is now."""
  warm = warm_start(config, training)
  _say(
    f"Warm start: {warm.run.steps} steps of {warm.batch.batch_size} demonstrations of "
    f"rl_task={config.rl.rl_task}, in {RunFolder.of(warm.run).path}\n"
  )
  run(warm, advise=False)
  _say("\nReinforcement learning\n")
  path = str(RunFolder.of(warm.run).path)
  return dataclasses.replace(
    config, checkpoint=dataclasses.replace(config.checkpoint, load_parameters_path=path)
  )


def _say(text: str) -> None:
  """Prints between two runs, where each process has its terminal: the first alone speaks."""
  if jax.process_index() == 0:
    print(text, flush=True)


_PASS_AT = re.compile(r"eval/(greedy_)?pass_at_(\d+)")


def sum_up_rl(folder: RunFolder) -> None:
  """Prints what the policy wrote before and afterwards, and how often it was right."""
  if jax.process_index():
    return
  for path, word in ((folder.examples_before, "before"), (folder.examples_after, "after")):
    if path.exists():
      print(f"\n--- {word} training\n{path.read_text().rstrip()}")
  records = list(each_record(folder.path))
  evaluated = [record for record in records if any(map(_PASS_AT.fullmatch, record))]
  if len(evaluated) < 2 or evaluated[0] is not records[0]:
    return
  first, last = evaluated[0], evaluated[-1]
  shown = ", ".join(
    f"{'greedy ' if of[1] else ''}pass@{of[2]} {first[of[0]]:.3f} → {last[of[0]]:.3f}"
    for of in map(_PASS_AT.fullmatch, last)
    if of and of[0] in first
  )
  print(f"\n{shown}", flush=True)
