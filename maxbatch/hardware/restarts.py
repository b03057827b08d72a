"""With whom and from where a run starts again: decisions that need nothing but what supervisors say."""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import re
import signal
from collections.abc import Callable, Sequence

from maxbatch.batch.from_config import mesh_of, plan_batches
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.copies import Header
from maxbatch.hardware.messages import Message
from maxbatch.run_folder.events import END


@dataclasses.dataclass
class Place:
  """What a supervisor knows of the run and its part in it."""

  own: int
  """The number of its process, by which the run was started."""
  num: int
  """Processes that the run was started with."""
  port: int = 0
  generation: int = 0
  lineage: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
  """Generation and step of the copy from which the latest generation began; [0, 0]: from none."""
  members: list[int] = dataclasses.field(default_factory=list)
  """Those that were there when the latest generation began."""
  table: dict[int, str] = dataclasses.field(default_factory=dict)
  """HOST:PORT of each supervisor that has ever been part of the run."""


def choose_hosts(
  config: Config, num: int, there: Sequence[int], devices_each: int
) -> tuple[list[int], str]:
  """Returns the most processes for whose devices there is a plan with the same batch; or none, and why.

  Args:
    config: of the run.
    num: processes that it was started with.
    there: those that could take part.
    devices_each: 0: not known.
  """
  reason, least = "no supervisor is there", config.distributed.min_devices
  for count in range(len(there), 0, -1):
    devices = devices_each * count
    if devices_each and devices < least:
      return [], reason if count < len(
        there
      ) else f"{devices} devices are left of min_devices={least}"
    if count == num or not devices_each:
      return list(there[:count]), ""
    try:
      plan_batches(config.batch, config.run, mesh_of(config, devices), config.optimizer)
      return list(there[:count]), ""
    except UserError as error:
      reason = str(error)
  return [], reason


def headers_of(about: Message) -> list[Header]:
  """Returns the copies that a supervisor says it has."""
  return [Header.decoded(json.dumps(one).encode()) for one in about["copies"]]


def newest_copy(supervisors: Sequence[Message]) -> tuple[int, int]:
  """Returns generation and step of the newest copy that is whole; (0, 0): there is none.

  Of the latest generation, or the one it began from: after another one the training has taken another
  course.
  """
  latest = max(supervisors, key=lambda about: about["generation"])
  copies = collections.defaultdict[tuple[int, int], list[Header]](list)
  for header in (one for about in supervisors for one in headers_of(about)):
    if header.key[0] == latest["generation"] or list(header.key[:2]) == latest["lineage"]:
      copies[header.key[0], header.key[1]].append(header)
  whole = [key for key, headers in copies.items() if not missing_elements(headers)]
  return max(whole, default=(0, 0))


def missing_elements(headers: Sequence[Header]) -> int:
  """Returns how many elements of a state's arrays are in none of these copies of it."""
  if not headers:
    return 1
  missing = 0
  for name, leaf in headers[0].record["leaves"].items():
    parts = {piece.start: piece for header in headers for piece in header.pieces.get(name, ())}
    there = sum(math.prod(piece.shape) for piece in parts.values())
    missing += math.prod(leaf["shape"]) - there
  return missing


def how_ended(code: int) -> str:
  """Says how a training process has ended, by its exit code."""
  if code < 0:
    return f"was ended by {signal.Signals(-code).name}"
  return f"ended with exit code {code}"


def finish_since(events: pathlib.Path) -> Callable[[], bool]:
  """Returns a function that tells whether a run has ended, its budget trained, since this call.

  Args:
    events: the run's events.jsonl; what is there already is of earlier starts.
  """

  def lines_after(place: int) -> list[str]:
    with contextlib.suppress(OSError), events.open("rb") as file:
      file.seek(place)
      return file.read().decode(errors="replace").splitlines()
    return []

  seen = events.stat().st_size if events.exists() else 0
  finished = re.compile(rf'"event": "{END}".*"how": "finished"')
  return lambda: any(map(finished.search, lines_after(seen)))
