"""micro_batch_size and eval_per_device_batch_size, auto and explore: from a Config that asks for a choice to
one that has it made.

All processes probe together, and every number that decides is process 0's: so all take the same
path through the search and end with the same size. Nothing of the training is consumed.
"""

import dataclasses
import functools
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from maxbatch.batch.from_config import plan_batches
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.compile.program import memory_suggestions
from maxbatch.compile.step_identity import (
  compiler_environment,
  library_versions,
  lowered_hash,
  traced_hash,
)
from maxbatch.config.keys.batch import Explore
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import EXPLORE, compiler_flags
from maxbatch.hardware.devices import Target, machine_bytes
from maxbatch.training.build import build_trainer, eval_batch_rows
from maxbatch.training.evaluation import traced_eval
from maxbatch.tuning.candidates import (
  Candidate,
  asked,
  batch_follows,
  default_batch_note,
  is_open,
  sizes_of,
  with_default_batch,
)
from maxbatch.tuning.eval_candidates import asked_to_evaluate, eval_sizes_of
from maxbatch.tuning.exploration import (
  Exploration,
  explore,
  with_shared_rows,
  with_variants,
)
from maxbatch.tuning.remembered import Made, RememberedChoice
from maxbatch.tuning.search import ProbeSize, Say, agreed, choose_largest, in_process_0

_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable by which jax takes a part of a GPU's memory."""


def choose(
  config: Config,
  place: Target,
  probe: ProbeSize,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with micro_batch_size a number, and one line that says why.

  Without any size given the batch is the run's default, as it would be without auto.

  Args:
    config: returned as it is unless micro_batch_size is auto.
    probe: what one size needs and how long it takes; called in all processes in the same order.
    say: prints a line; called in process 0 only.

  Raises:
    UserError: nothing fits, the size follows from other keys, or something is to be explored.
  """
  if not chooses(config):
    return config
  asked_for, config = config, with_default_batch(config, place.layout)
  sizes = sizes_of(config, place.layout)
  depends_on = what_it_depends_on(config, place, sizes)
  line = functools.partial(_line, asked_for, place)
  return choose_from(config, sizes, depends_on, probe, folder, line, retune=retune, say=say)


def choose_to_evaluate(
  config: Config,
  place: Target,
  probe: ProbeSize,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with eval_per_device_batch_size a number, by the same search; arguments as
  `choose`, of a run whose microbatch is known.

  Raises:
    UserError: nothing fits.
  """
  if config.batch.eval_per_device_batch_size != "auto":
    return config
  sizes = eval_sizes_of(config, place.layout)
  depends_on = what_it_depends_on(config, place, sizes, _lowered_eval)
  line = functools.partial("{0.key} auto: {0.words} ({1})".format)
  return choose_from(config, sizes, depends_on, probe, folder, line, retune=retune, say=say)


def chooses(config: Config) -> bool:
  """Returns whether there is a size to choose for a run.

  Raises:
    UserError: something is to be explored, which is not for runs.
  """
  check_explored(config)
  if is_open(config.batch) and config.batch.micro_batch_size != "auto":
    raise UserError(_not_here(asked(config.batch), config))
  return is_open(config.batch)


def check_explored(config: Config) -> None:
  """Checks that nothing is to be explored but with compile_only, and that what is beside the size comes with
  the size.

  Raises:
    UserError: it does not.
  """
  evaluated, compiles = config.batch.eval_per_device_batch_size, config.compile.compile_only
  if isinstance(evaluated, Explore) and not compiles:
    raise UserError(_not_here(asked_to_evaluate(config.batch), config))
  if config.batch.micro_batch_size == "explore" and compiles:
    return
  for key, value, instead in (
    ("remat_policy", config.model.remat_policy, "full"),
    ("compiler_flags", config.compile.compiler_flags, "published"),
  ):
    if value == EXPLORE:
      raise UserError(
        f"{key}=explore tries every size, and needs micro_batch_size=explore "
        f"compile_only=true (now {asked(config.batch)} "
        f"compile_only={str(config.compile.compile_only).lower()}); for a run, {key}={instead}"
      )


def choose_from(
  config: Config,
  sizes: Sequence[Candidate],
  depends_on: Mapping[str, Any],
  probe: ProbeSize,
  folder: pathlib.Path,
  line: Callable[[Candidate, str], str],
  *,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with the largest of the sizes that fits and is fast, or a remembered one.

  Raises:
    UserError: nothing fits.
  """
  by_size = {text(one.size): one for one in sizes}

  def make() -> Made:
    choice = choose_largest(sizes, agreed(probe), memory_suggestions(config))
    return Made(choice.chosen.size, choice.why(), [one.as_dict() for one in choice.tried])

  memory = RememberedChoice(folder, sizes[0].key, "auto", depends_on)
  size = memory.recalled_or_made(
    by_size, make, lambda size, why: line(by_size[size], why), retune=retune, say=say
  )
  return by_size[size].applied_to(config)


def explore_sizes(
  config: Config,
  place: Target,
  probe: ProbeSize,
  *,
  find: Callable[[Config, Topology], Sequence[Candidate]] = sizes_of,
  say: Say = print,
) -> tuple[Config, Exploration]:
  """Tries every size that micro_batch_size=explore asks for, says how it goes, and ranks them.

  With remat_policy=explore, every size is tried with every policy; with compiler_flags=explore,
  with every set of flags. Long rows are tried shared by more and more devices.

  Args:
    config: micro_batch_size is explore, and compile_only is set.
    say: prints a line; called in process 0 only.

  Returns: The configuration with what is recommended, and all that was learnt.

  Raises:
    UserError: compile_only is not set, or nothing fits.
  """
  if not config.compile.compile_only:
    raise UserError(_not_here(asked(config.batch), config))
  sizes = with_shared_rows(find, config, place.layout)
  sizes = with_variants(sizes, config, place.devices[0])
  say = in_process_0(say)
  result = explore(sizes, agreed(probe), memory_suggestions(config), say)
  say(f"\n{result}")
  return result.ranked[0].candidate.applied_to(config), result


def what_it_depends_on(
  config: Config,
  place: Target,
  sizes: Sequence[Candidate],
  lowered: Callable[[Config, Target], str] | None = None,
) -> dict[str, Any]:
  """Returns everything by which another size could be the right one, as plain values.

  Keys of model, optimizer, pipeline and data, and the code, are in the step that is lowered for the
  first size: about a second, beside the compilations that a remembered choice saves.

  Args:
    config: the run; where `sizes` is empty, with its size chosen.
    lowered: the hash of the run's step; None: of one that trains on text.
  """
  first = place.devices[0]
  # "cpu" is all that a CPU says about itself.
  host = f"{platform.machine()}, {os.cpu_count()} cores, {machine_bytes()} bytes"
  return {
    "lowered": (lowered or _lowered)(sizes[0].applied_to(config) if sizes else config, place),
    "batch": to_flat_dict(config.batch),
    "sizes": [[text(one.size), one.num_microbatches, one.batch] for one in sizes],
    "mesh": {
      "ici": list(place.layout.ici.values()),
      "dcn": list(place.layout.dcn.values()),
    },
    "devices": {
      "kind": first.device_kind,
      "count": len(place.devices),
      "processes": jax.process_count(),
      "host": host if first.platform == "cpu" else "",
      "compile_topology": config.compile.compile_topology,
      "network_gbps": config.compile.compile_topology_network_gbps,
      "device_memory_gb": config.compile.device_memory_gb,
      "compiler_flags": str(compiler_flags(config.compile.compiler_flags, first)),
      _MEMORY_FRACTION: os.environ.get(_MEMORY_FRACTION, ""),
    },
    "compiler": compiler_environment(first),
    "versions": library_versions(),
  }


def _lowered(config: Config, place: Target) -> str:
  """Returns the hash of the run's step."""
  # Which weights, not how many; it is in the program where there is dropout.
  model = dataclasses.replace(config.model, init_weights_seed=0)
  config = dataclasses.replace(config, model=model)
  plan = plan_batches(config.batch, config.run, place.layout, config.optimizer)
  trainer = build_trainer(config, plan, place.devices)
  return lowered_hash(config, plan, trainer, placeholder_rows(config), plan.micro_batch_to_train)


def _lowered_eval(config: Config, place: Target) -> str:
  """Returns the hashes of the run's step, whose state lies beside it, and of the evaluation."""
  plan = plan_batches(config.batch, config.run, place.layout, config.optimizer)
  trainer = build_trainer(config, plan, place.devices)
  rows = eval_batch_rows(plan, trainer, placeholder_rows(config))
  return f"{_lowered(config, place)} {traced_hash(lambda: traced_eval(trainer, rows))}"


def _not_here(explored: str, config: Config) -> str:
  return (
    f"{explored} tries every size before it ranks them, and needs compile_only=true "
    f"(now {str(config.compile.compile_only).lower()}); {explored.partition('=')[0]}=auto chooses one for a run"
  )


def _line(config: Config, place: Target, size: Candidate, why: str) -> str:
  """Returns the choice and why; where the batch was open, the batch and where it comes from."""
  batch = ""
  if with_default_batch(config, place.layout) != config:
    batch = f"; {default_batch_note(size.batch, place.layout)}"
  elif batch_follows(config.batch):
    batch = f"; batch_size follows: {size.batch:,}"
  return f"micro_batch_size auto: {size.words} ({why}){batch}"
