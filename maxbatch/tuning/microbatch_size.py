"""micro_batch_size auto and explore: from a Config that asks for a choice to one that has it made.

All processes probe together, and every number that decides is process 0's: so all take the same
path through the search and end with the same size. Nothing of the training is consumed.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

from maxbatch.batch.solve import counted, text
from maxbatch.compile.program import memory_suggestions
from maxbatch.compile.step_identity import source_hash
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import BatchConfig, Config
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Target
from maxbatch.tuning.candidates import (
  Candidate,
  asked,
  batch_follows,
  is_open,
  sizes_of,
  with_policies,
)
from maxbatch.tuning.exploration import Exploration, explore
from maxbatch.tuning.remembering import RememberedChoice
from maxbatch.tuning.search import ProbeResult, ProbeSize, choose_largest

_PACKAGES = ("jax", "jaxlib", "libtpu", "maxbatch")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""What changes what compilers do and what memory there is."""

Say = Callable[[str], None]


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

  Args:
    config: returned as it is unless micro_batch_size is auto.
    place: the devices.
    probe: what one size needs and how long it takes; called in all processes in the same order.
    folder: where choices are remembered.
    forgetting: measure anew, whatever is remembered.
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
  sizes = sizes_of(config, place.layout)
  memory = RememberedChoice(folder, "micro_batch_size", what_it_depends_on(config, place, sizes))
  say = in_process_0(say)
  size = _recalled(memory, config, sizes, forget, say)
  if size is None:
    choice = choose_largest(sizes, _agreed(probe), memory_suggestions(config))
    size = choice.chosen.candidate
    content = {"micro_batch_size": choice.chosen.size, "why": choice.why()}
    kept = memory.kept(content, [one.as_dict() for one in choice.tried])
    say(_line(config, size, choice.why()) + kept)
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
  found = explore(sizes, _agreed(probe), memory_suggestions(config), say)
  say(f"\n{found}")
  return found.ranked[0].candidate.applied_to(config), found


def what_it_depends_on(config: Config, place: Target, sizes: Sequence[Candidate]) -> dict[str, Any]:
  """Everything by which another size could be the right one, as plain values."""
  model = dataclasses.asdict(config.model)
  del model["init_weights_seed"]  # Which weights, not how many.
  flat = to_flat_dict(config)
  batch = {field.name: flat[field.name] for field in dataclasses.fields(BatchConfig)}
  first = place.devices[0]
  return {
    "model": model,
    "batch": batch,
    "sizes": [[text(one.per_device), one.gradient_accumulation_steps, one.batch] for one in sizes],
    "pipeline": dataclasses.asdict(config.pipeline),
    "mesh": {"ici": list(place.layout.ici), "dcn": list(place.layout.dcn)},
    "optimizer": {
      "opt_type": config.optimizer.opt_type,
      "gradient_clipping_threshold": config.optimizer.gradient_clipping_threshold,
      "sgd_momentum": config.optimizer.sgd_momentum,
    },
    "data": {"dataset_type": config.data.dataset_type, "packing": config.data.packing},
    "devices": {
      "kind": first.device_kind,
      "count": len(place.devices),
      "processes": jax.process_count(),
      # "cpu" is all that a CPU says about itself.
      "host": f"{platform.machine()}, {os.cpu_count()} cores" if first.platform == "cpu" else "",
      "compile_topology": config.compile.compile_topology,
      "device_memory_gb": config.compile.device_memory_gb,
    },
    # In a checkout the code changes and the version does not.
    "source": source_hash(config),
    "versions": {package: _version(package) for package in _PACKAGES},
    "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
  }


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


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def in_process_0(say: Say) -> Say:
  """The same, silent in the other processes."""
  return say if jax.process_index() == 0 else lambda line: None


def _agreed(probe: ProbeSize) -> ProbeSize:
  """The probe with process 0's numbers everywhere."""

  def agreed(candidate: Candidate) -> ProbeResult:
    mine = probe(candidate)
    numbers = dataclasses.asdict(mine) | {"per_device": text(mine.per_device)}
    theirs = broadcast_one_to_all(numbers)
    return ProbeResult(**theirs | {"per_device": Fraction(theirs["per_device"])})

  return agreed


def _recalled(
  memory: RememberedChoice, config: Config, sizes: Sequence[Candidate], forget: bool, say: Say
) -> Candidate | None:
  """The remembered size; says where it comes from, or why what is remembered is of no use."""
  choice, problem = memory.recalled(forget=forget)
  by_size = {text(one.per_device): one for one in sizes}
  if choice and choice.get("micro_batch_size") not in by_size:
    choice, problem = None, f"{memory.file} has a damaged choice"
  if problem:
    say(f"micro_batch_size auto: {problem}; measured anew")
  if choice is None:
    return None
  size = by_size[choice["micro_batch_size"]]
  say(
    f"{_line(config, size, str(choice.get('why')))} (remembered from {memory.file}; --forget "
    "measures anew)"
  )
  return size


def _line(config: Config, size: Candidate, why: str) -> str:
  """The choice and why; where the batch was open, the batch that follows from it."""
  follows = f"; batch_size follows: {size.batch:,}" if batch_follows(config.batch) else ""
  samples = counted(size.per_device, "sample")
  return f"micro_batch_size auto: {samples} per device ({why}){follows}"
