"""What compilations for a slice found, remembered one by one: an exploration that is interrupted goes on."""

import dataclasses
import pathlib
from typing import Any

import jax

from maxbatch.batch.from_config import mesh_of
from maxbatch.config.schema import Config
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Target
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.microbatch_size import what_it_depends_on
from maxbatch.tuning.remembered import RememberedChoice
from maxbatch.tuning.search import ProbeResult, ProbeSize, Say

_KEY = "explored"
_FIELDS = {field.name for field in dataclasses.fields(ProbeResult)}


def remembering(
  probe: ProbeSize,
  config: Config,
  place: Target,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
) -> ProbeSize:
  """Returns the probe of a training on text, which compiles only what is not remembered.

  Each result has a file, under everything it depends on: to know that, a candidate is traced and lowered, in
  about a second.

  Args:
    retune: compile all anew.
    say: prints a line; called in process 0 only.
  """

  def probed(candidate: Candidate) -> ProbeResult:
    chosen = candidate.applied_to(config)
    layout = mesh_of(chosen, len(place.devices), place.layout.num_slices)
    there = dataclasses.replace(place, layout=layout)
    memory = RememberedChoice(folder, _KEY, "explore", what_it_depends_on(chosen, there, ()))
    known = None if retune else _recalled(memory)
    if known is not None:
      if jax.process_index() == 0:
        say(f"INFO: remembered from {memory.file}; --retune compiles again")
      return known
    result = probe(candidate)
    memory.remember({_KEY: dataclasses.asdict(result)}, [])
    return result

  return probed


def _recalled(memory: RememberedChoice) -> ProbeResult | None:
  """Returns process 0's result in all processes; None where there is none, or its file is damaged."""
  mine: Any = memory.recall()[0] if jax.process_index() == 0 else None
  known = (broadcast_one_to_all(mine) or {}).get(_KEY)
  if not isinstance(known, dict) or {*known} != _FIELDS:
    return None
  return ProbeResult(**known)
