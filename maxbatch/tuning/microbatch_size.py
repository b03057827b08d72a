"""micro_batch_size and eval_per_device_batch_size, auto and explore, and remat_policy=auto: from a Config that
asks for a choice to one that has it made.

What a layer keeps is chosen on a ladder of tensors (models/remat.py), in the order of the products that the
backward pass does not compute again for a byte: memory grows on it, and time, as a rule, falls.

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
from maxbatch.command_line.screen import gib
from maxbatch.compile.compile_step import Saving, placeholder_rows, remat_savings
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
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import EXPLORE, compiler_flags
from maxbatch.hardware.devices import Target, machine_bytes
from maxbatch.models.remat import NAMED, all_steps, joined_step, ladder, step_names, with_step
from maxbatch.training.build import build_trainer, eval_batch_rows
from maxbatch.training.evaluation import traced_eval
from maxbatch.tuning.before_compiling import grid_of
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
from maxbatch.tuning.exploration import Exploration, explore, with_shared_rows, with_variants
from maxbatch.tuning.remembered import Made, RememberedChoice
from maxbatch.tuning.search import (
  Choice,
  CompilingProber,
  ProbeSize,
  Say,
  Tried,
  agreed,
  choose_largest,
  choose_shared,
  in_process_0,
  name_of,
)

_REMAT = "remat_policy"
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable by which jax takes a part of a GPU's memory."""


def choose(
  config: Config,
  place: Target,
  probe: ProbeSize,
  folder: pathlib.Path,
  *,
  find: Callable[[Config, Topology], Sequence[Candidate]] = sizes_of,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with micro_batch_size a number, and one line that says why.

  Without any size given the batch is the run's default, as it would be without auto.

  Args:
    config: returned as it is unless micro_batch_size is auto.
    probe: what one size needs and how long it takes; called in all processes in the same order.
    find: the sizes of a configuration on a mesh.
    say: prints a line; called in process 0 only.

  Raises:
    UserError: nothing fits, the size follows from other keys, or something is to be explored.
  """
  if not chooses(config):
    return config
  asked_for, config = config, with_default_batch(config, place.layout)
  sizes = find(config, place.layout)
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
  `choose`, of a run whose microbatch is known. Raises UserError: nothing fits.
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


def is_remat_open(config: Config) -> bool:
  """Returns whether the tensors that a layer keeps are to be chosen."""
  return config.model.remat_policy == "auto"


def before_remat(config: Config) -> Config:
  """Returns the configuration with the policy of least memory, by which sizes are chosen, if it is to be."""
  return _with_step(config, "full") if is_remat_open(config) else config


class RematProber(CompilingProber[Candidate]):
  """Finds what a run needs and takes with one step of the ladder."""

  def _with(self, size: Candidate) -> Config:
    return _with_step(self._config, _step(size))


def choose_remat_policy(
  config: Config,
  plan: BatchPlan,
  place: Target,
  probe: ProbeSize,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with what a layer keeps chosen, and one line that says why.

  The highest step that fits, or the one below if that is faster, and smaller tensors for which there is room.

  Args:
    config: its sizes are chosen, with `before_remat`.
    plan: the run's.
    probe: what one step of the ladder needs and takes; called in all processes in the same order.
    say: prints a line; called in process 0 only.

  Raises:
    UserError: not even remat_policy=full fits.
  """

  def make() -> Made:
    each = remat_savings(config, plan, place.devices)
    steps = [_candidate(plan, step) for step in ladder([one.name for one in each])]
    choice = choose_largest(steps, agreed(probe), memory_suggestions(config))
    added = [Tried(one, agreed(probe)(one)) for one in _with_room(choice, each, plan)]
    fitting = [choice.chosen, *(one for one in added if one.probe.fits)]
    best, tried = max(fitting, key=lambda one: one.samples_per_second), [*choice.tried, *added]
    return Made(_step(best.candidate), _why(best, tried), [one.as_dict() for one in tried])

  memory = RememberedChoice(folder, _REMAT, "auto", what_it_depends_on(config, place, ()))
  line = functools.partial("{0} auto: {1} ({2})".format, _REMAT)
  step = memory.recalled_or_made(
    all_steps(), make, lambda step, why: line(_words(step), why), retune=retune, say=say
  )
  return _with_step(config, step)


def _with_room(choice: Choice, each: Sequence[Saving], plan: BatchPlan) -> list[Candidate]:
  """Returns the highest step that fits with tensors above it for which there is room, by the memory of two
  steps that were compiled, if there are any."""
  top, least = choice.largest, min(choice.tried, key=lambda one: one.probe.peak_bytes)
  kept, sizes = step_names(_step(top.candidate)), {one.name: one.bytes for one in each}
  more = sum(sizes[name] for name in kept - step_names(_step(least.candidate)))
  if choice.above is None or not more:
    return []
  growth = (top.probe.peak_bytes - least.probe.peak_bytes) / more
  room, with_more = top.probe.capacity_bytes - top.probe.peak_bytes, kept
  for one in each:
    if one.name not in kept and one.bytes * growth <= room:
      with_more, room = with_more | {one.name}, room - one.bytes * growth
  return [] if with_more == kept else [_candidate(plan, joined_step(with_more))]


def _candidate(plan: BatchPlan, step: str) -> Candidate:
  own = plan.per_device_batch_size, plan.num_microbatches, plan.micro_batch_to_train
  return Candidate(*own, plan.global_batch_to_train, plan.max_target_length, remat_policy=step)


def _step(candidate: Candidate) -> str:
  return candidate.remat_policy or "full"


def _with_step(config: Config, step: str) -> Config:
  return dataclasses.replace(config, model=with_step(config.model, step))


def _words(step: str) -> str:
  """Returns a step as the keys that give it by hand."""
  places = "".join(f" {name}=device" for name in NAMED if name in step_names(step))
  return f"{_REMAT}=custom{places}" if places else f"{_REMAT}={step}"


def _why(best: Tried, tried: Sequence[Tried]) -> str:
  """Returns a choice's memory, and what does not fit."""
  beyond = [(t.probe.peak_bytes, _step(t.candidate)) for t in tried if not t.probe.fits]
  needs = [f"{step} needs {gib(peak)} GiB" for peak, step in sorted(beyond)[:1]]
  return "; ".join([best.probe.memory, *needs])


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
  by_size = {name_of(one): one for one in sizes}

  def make() -> Made:
    choice = choose_shared(sizes, agreed(probe), memory_suggestions(config))
    tried = [one.as_dict() for one in choice.tried]
    return Made(name_of(choice.chosen.candidate), choice.why(), tried)

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
  """Tries the sizes that micro_batch_size=explore asks for, says how it goes, and ranks them.

  Of all combinations with policies and flags, those that are worth it (grid_search.py). Long rows are tried shared.

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
  fixes, grid = memory_suggestions(config), grid_of(sizes, config, place)
  result = explore(sizes, agreed(probe), fixes, say, grid)
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
