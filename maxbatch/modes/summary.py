"""What a run says of itself: its parts before it trains, and how it went at its end."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.command_line.screen import colored, for_screen, printable
from maxbatch.compile.program import gib
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.registry import build_tokenizer
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.copies import kept_bytes, own_copies
from maxbatch.hardware.devices import describe_devices, machine_bytes
from maxbatch.models.registry import Parameters, parameter_counts
from maxbatch.modes.method import ResolvedRun
from maxbatch.run_folder.metrics import each_record
from maxbatch.sampling.sampler import Sampler, on_fewest_devices, sample
from maxbatch.sampling.text import choice_of, encoded, prompts_of, vocabulary_of
from maxbatch.training.build import lost_updates, undivided_parameters
from maxbatch.training.step import Trainer


def description(
  resolved: ResolvedRun, trainer: Trainer, data: str, beginning: Sequence[str] = ()
) -> str:
  """Describes what the run is made of, and what it begins with, in a few lines."""
  return "\n".join(_described(resolved, trainer, data, beginning))


def _described(
  resolved: ResolvedRun, trainer: Trainer, data: str, beginning: Sequence[str]
) -> Iterator[str]:
  yield f"Model   {resolved.config.model.model_name}: {parameter_counts(trainer.model)}"
  for line in lost_updates(trainer.model):
    yield f"        {line}"
  for line, label in zip(
    beginning, itertools.chain(["Begins"], itertools.repeat("")), strict=False
  ):
    yield f"{label:<7} {line}"
  if trainer.formats:
    yield f"Format  {trainer.formats}"
  yield "Data    " + data.replace("\n", "\n        ")
  if trainer.pipeline:
    yield f"Pipeline\n        {trainer.pipeline}"
  yield f"Mesh    {resolved.plan.topology} on {describe_devices(list(trainer.mesh.devices.flat))}"
  for line in undivided_parameters(trainer):
    yield f"        {line}"
  if resolved.config.distributed.elastic:
    yield f"Copies  {copies_kept(trainer)}"
  yield f"Folder  {resolved.folder.path}"


def copies_kept(trainer: Trainer) -> str:
  """Says how much of each host's memory copies of the state take (hardware/copies.py).

  Raises:
    UserError: more than it has.
  """
  kept = own_copies()
  domains = kept.domains if kept else range(jax.process_count())
  own, others = kept_bytes(jax.tree.leaves(trainer.abstract_saved), domains)
  parts = f"two of its part of the state {gib(own)}"
  parts += f", two of what its neighbour alone has {gib(others)}" if others else ""
  if own + others > machine_bytes():
    raise UserError(
      f"elastic=true keeps {gib(own + others)} in each host's memory ({parts}), which is {gib(machine_bytes())}; "
      "divide the state over more hosts, by ici_fsdp_parallelism, or set elastic=false"
    )
  return f"{gib(own + others)} of each host's memory: {parts}"


class SampleTexts:
  """What a run's model writes to its prompt; keeps the latest, and in a file the very first."""

  def __init__(self, resolved: ResolvedRun, trainer: Trainer):
    self.latest = ""
    self._resolved, self._trainer = resolved, trainer

  def __call__(self, params: Parameters) -> str:
    """Writes with these parameters; all processes must call it."""
    self.latest = sample_text(self._resolved, self._trainer, params)
    return self.latest

  def keep(self) -> None:
    """Keeps text of the untrained model, to be shown beside that of the trained one."""
    write_shared_file(self._resolved.folder.text_before_training, self.latest)


def sum_up(
  resolved: ResolvedRun, plan: BatchPlan, position: Position, written: str, skipped: str = ""
) -> None:
  """Says how far, how well and where.

  Args:
    written: what the model wrote last.
    skipped: what to say if every step was skipped.
  """
  config, folder = resolved.config, resolved.folder
  complete = position.step == plan.steps
  if complete:
    before = resolved.folder.text_before_training
    if config.run.generate_length and before.exists():
      _show("before", before.read_bytes().decode())
    if written:
      _show("after", written)
  tokens = plan.tokens(position.samples)
  end = colored("Finished", "green") if complete else colored("Stopped", "yellow")
  end = colored("Nothing learned", "red") if skipped else end
  print(f"\n{end} after step {position.step:,}: {position.samples:,} samples, {tokens:,} tokens")
  evaluated = [record for record in each_record(folder.path) if "eval/loss" in record]
  if evaluated:
    first, last = evaluated[0], evaluated[-1]
    parts = [key for key in last if key.startswith("eval/loss/") and key in first]
    of_each = ", ".join(f"{key[10:]} {first[key]:.3f} → {last[key]:.3f}" for key in parts)
    change = colored(f"{first['eval/loss']:.3f} → {last['eval/loss']:.3f}", "bold")
    line = f"Validation loss {change} nats per token" + (f" ({of_each})" if parts else "")
    print(for_screen(line))
  print(f"Everything is in {folder.path}")


def print_next(
  resolved: ResolvedRun, plan: BatchPlan, position: Position, *, has_report: bool
) -> None:
  """Says how to look at the run, and how to go on with it."""
  lines = ["Next:"]
  if has_report:
    lines.append(f"  report:  {resolved.folder.report}")
  if resolved.folder.tensorboard.is_dir():
    lines.append(f"  curves:  tensorboard --logdir {resolved.folder.tensorboard}")
  if position.step < plan.steps:
    lines.append("  resume:  the same command again")
  elif resolved.config.checkpoint.enable_checkpointing:
    longer = _longer(resolved, plan)
    lines.append(f"  longer:  the same command with a larger budget, for example\n{longer}")
  print(for_screen("\n".join(lines)))


def _longer(resolved: ResolvedRun, plan: BatchPlan) -> str:
  """Suggests twice the budget, and what keeps the rate where a longer schedule raises it."""
  config, unit, end = resolved.config.optimizer, resolved.config.run.schedule_unit, plan.end()
  budget = dataclasses.replace(plan.budget, amount=2 * plan.budget.amount)
  keys = f"{budget.key}={int(budget.amount * budget.scale)}"
  longer = dataclasses.replace(plan, budget=budget).starting_at(end)
  now = learning_rate(config, plan, unit)
  kept, lifted = now(end), learning_rate(config, longer, unit)(end)
  jump = f"the schedule spans the whole budget, and the rate jumps from {kept:.3g} to {lifted:.3g}"
  schedule = f"learning_rate_schedule_steps={math.ceil(now.length)}"
  if math.isclose(kept, lifted, rel_tol=0.01):
    lines = [keys]
  elif kept == 0:
    lines = [f"{keys}:", jump]
  else:
    lines = [f"{keys} {schedule}", f"(the last learning rate stays; without {schedule} {jump})"]
  return "\n".join(f"{'':<9}  {line}" for line in lines)


def show_sample(resolved: ResolvedRun, trainer: Trainer, params: Parameters) -> None:
  """Prints text of the trained model, if the run asks for any."""
  if resolved.config.run.generate_length:
    _show("after", sample_text(resolved, trainer, params))


def _show(when: str, text: str) -> None:
  print(f"\n{colored(f'--- text {when} training', 'faint')}\n{printable(text).rstrip()}")


def sample_text(resolved: ResolvedRun, trainer: Trainer, params: Parameters) -> str:
  """Returns the prompt and a text that goes on from it, the same at every call, of fixed length."""
  config, tokenizer = resolved.config, build_tokenizer(resolved.config.data)
  params, mesh = on_fewest_devices(trainer.by_layer(params), trainer.mesh, num_texts=1)
  length, model = config.run.generate_length, trainer.model
  sampler = Sampler(model, choice_of(config.run), length, config.batch.max_target_length, mesh)
  prompt = encoded(tokenizer, config.run.prompt, add_bos=config.data.add_bos)
  vocabulary = vocabulary_of(tokenizer, model.config.vocab_size)
  samples = sample(sampler, params, prompts_of([prompt], seed=0, numbers=[0]), vocabulary)
  return tokenizer.decode([*prompt, *np.asarray(samples.tokens_BN)[0]])
