"""micro_batch_size auto and explore: from a Config that asks for a choice to one that has it made.

All processes probe together, and every number that decides is process 0's: so all take the same
path through the search and end with the same size. Nothing of the training is consumed.
"""

import dataclasses
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

from maxbatch.batch.plan import plan_batches
from maxbatch.batch.solve import counted, text
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.compile.program import memory_suggestions
from maxbatch.compile.step_identity import compiler_environment, library_versions, lowered_hash
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import BatchConfig, Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.hardware.memory import machine_bytes
from maxbatch.training.build import build_trainer
from maxbatch.tuning.candidates import (
  Candidate,
  asked,
  batch_follows,
  default_batch_note,
  is_open,
  sizes_of,
  with_default_batch,
  with_policies,
)
from maxbatch.tuning.exploration import Exploration, explore
from maxbatch.tuning.processes import Say, agreed, in_process_0
from maxbatch.tuning.remembered import RememberedChoice
from maxbatch.tuning.search import ProbeSize, choose_largest

_KEY = "micro_batch_size"
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable by which jax takes a part of a GPU's memory."""


def choose(
  config: Config,
  place: Target,
  probe: ProbeSize,
  folder: pathlib.Path,
  *,
  forget: bool = False,
  say: Say = print,
) -> Config:
  """The configuration with micro_batch_size a number, and one line that says why.

  Without any size given the batch is the run's default, as it would be without auto.

  Args:
    config: returned as it is unless micro_batch_size is auto.
    place: the devices.
    probe: what one size needs and how long it takes; called in all processes in the same order.
    folder: where choices are remembered.
    forget: measure anew, whatever is remembered.
    say: prints a line; called in process 0 only.

  Raises:
    UserError: nothing fits, the size follows from other keys, or something is to be explored.
  """
  if config.model.remat_policy == "explore":
    raise UserError(_policy_not_here(config))
  if not is_open(config.batch):
    return config
  if config.batch.micro_batch_size != "auto":
    raise UserError(_not_here(config))
  asked_for, config = config, with_default_batch(config, place.layout)
  sizes = sizes_of(config, place.layout)
  depends_on = what_it_depends_on(config, place, sizes)
  memory, say = RememberedChoice(folder, _KEY, "auto", depends_on), in_process_0(say)
  by_size = {text(one.per_device): one for one in sizes}
  remembered = memory.agreed(by_size, forget=forget, say=say)
  if remembered:
    size = by_size[remembered[_KEY]]
    say(_line(asked_for, place, size, str(remembered.get("why"))) + memory.origin)
    return size.applied_to(config)
  choice = choose_largest(sizes, agreed(probe), memory_suggestions(config))
  size, content = choice.chosen.candidate, {_KEY: choice.chosen.size, "why": choice.why()}
  kept = memory.remember(content, [one.as_dict() for one in choice.tried])
  say(_line(asked_for, place, size, choice.why()) + kept)
  return size.applied_to(config)


def explore_sizes(
  config: Config, place: Target, probe: ProbeSize, *, say: Say = print
) -> tuple[Config, Exploration]:
  """Tries every size that micro_batch_size=explore asks for, says how it goes, and ranks them.

  With remat_policy=explore, every size is tried with every policy.

  Args:
    config: micro_batch_size is explore, and compile_only is set.
    place: the devices.
    probe: as in `choose`.
    say: prints a line; called in process 0 only.

  Returns:
    The configuration with what is recommended, and all that was learnt.

  Raises:
    UserError: compile_only is not set, or nothing fits.
  """
  if not config.compile.compile_only:
    raise UserError(_not_here(config))
  sizes = sizes_of(config, place.layout)
  sizes = with_policies(sizes) if config.model.remat_policy == "explore" else sizes
  say = in_process_0(say)
  found = explore(sizes, agreed(probe), memory_suggestions(config), say)
  say(f"\n{found}")
  return found.ranked[0].candidate.applied_to(config), found


def what_it_depends_on(config: Config, place: Target, sizes: Sequence[Candidate]) -> dict[str, Any]:
  """Everything by which another size could be the right one, as plain values.

  Keys of model, optimizer, pipeline and data, and the code, are in the step that is lowered for the
  first size: about a second, beside the compilations that a remembered choice saves.

  Args:
    config: the run; where `sizes` is empty, with its size chosen.
    place: the devices.
    sizes: what is chosen from, ascending.
  """
  flat, first = to_flat_dict(config), place.devices[0]
  return {
    "lowered": _lowered(sizes[0].applied_to(config) if sizes else config, place),
    "batch": {field.name: flat[field.name] for field in dataclasses.fields(BatchConfig)},
    "sizes": [[text(one.per_device), one.gradient_accumulation_steps, one.batch] for one in sizes],
    "mesh": {"ici": list(place.layout.ici), "dcn": list(place.layout.dcn)},
    "devices": {
      "kind": first.device_kind,
      "count": len(place.devices),
      "processes": jax.process_count(),
      "host": _host() if first.platform == "cpu" else "",
      "compile_topology": config.compile.compile_topology,
      "device_memory_gb": config.compile.device_memory_gb,
      _MEMORY_FRACTION: os.environ.get(_MEMORY_FRACTION, ""),
    },
    "compiler": compiler_environment(first),
    "versions": library_versions(),
  }


def _host() -> str:
  """This machine; "cpu" is all that a CPU says about itself."""
  return f"{platform.machine()}, {os.cpu_count()} cores, {machine_bytes()} bytes"


def _lowered(config: Config, place: Target) -> str:
  """The hash of the run's step."""
  # Which weights, not how many; it is in the program where there is dropout.
  model = dataclasses.replace(config.model, init_weights_seed=0)
  config = dataclasses.replace(config, model=model)
  plan = plan_batches(config.batch, config.run, place.layout)
  trainer = build_trainer(config, plan, place.devices)
  return lowered_hash(config, plan, trainer, placeholder_rows(config), plan.micro_batch_to_train)


def _not_here(config: Config) -> str:
  return (
    f"{asked(config.batch)} tries every size before it ranks them, and needs compile_only=true "
    f"(now {str(config.compile.compile_only).lower()}); micro_batch_size=auto chooses one for a run"
  )


def _policy_not_here(config: Config) -> str:
  return (
    f"remat_policy=explore is tried beside every size, and needs micro_batch_size=explore "
    f"compile_only=true (now {asked(config.batch)} "
    f"compile_only={str(config.compile.compile_only).lower()}); for a run, remat_policy=full"
  )


def _line(config: Config, place: Target, size: Candidate, why: str) -> str:
  """The choice and why; where the batch was open, the batch and where it comes from."""
  batch = ""
  if with_default_batch(config, place.layout) != config:
    batch = f"; {default_batch_note(size.batch, place.layout)}"
  elif batch_follows(config.batch):
    batch = f"; batch_size follows: {size.batch:,}"
  samples = counted(size.per_device, "sample")
  return f"micro_batch_size auto: {samples} per device ({why}){batch}"
