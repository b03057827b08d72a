"""With whom and from where a run starts again: decisions that need nothing but what supervisors say."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
from collections.abc import Iterator, Sequence
from fractions import Fraction

from maxbatch.batch.from_config import is_rl, mesh_of, plan_batches
from maxbatch.config.schema import BatchConfig, Config
from maxbatch.errors import UserError
from maxbatch.hardware.copies import Header
from maxbatch.hardware.messages import Message
from maxbatch.run_folder.events import END

_END_BYTES = 1 << 16


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


@dataclasses.dataclass(frozen=True)
class Choice:
  """With whom a run goes on."""

  hosts: list[int]
  """Nobody where there is no plan."""
  reason: str = ""
  """Why there is none."""
  padding_rows: int = 0
  """Rows without weight that fill a step up where its batch does not divide over the devices."""

  @property
  def keys(self) -> dict[str, str]:
    """What the training processes are told."""
    return {"pad_batch": "true"} if self.padding_rows else {}


def choose_hosts(config: Config, num: int, there: Sequence[int], devices_each: int) -> Choice:
  """Returns the processes whose devices have the fewest rows each in a step of the same batch.

  Of equally fast ones the fewest: 1,024 rows are 17 on each of 61 devices, and on each of 63.

  Args:
    config: of the run.
    num: processes that it was started with.
    there: those that could take part.
    devices_each: 0: not known.
  """
  reason, least = "no supervisor is there", config.distributed.min_devices
  if there and (len(there) == num or not devices_each):
    return Choice(list(there))
  best, fewest = None, Fraction(0)
  for count in range(len(there), 0, -1):
    devices = devices_each * count
    if devices < least:
      short = f"{devices} devices are left of min_devices={least}"
      reason = short if count == len(there) else reason
      break
    if best and Fraction(best.global_batch_to_train, devices) > fewest:
      break
    for batch in _divided_batches(config):
      try:
        plan = plan_batches(batch, config.run, mesh_of(config, devices), config.optimizer)
      except UserError as error:
        reason = str(error)
        continue
      rows = plan.per_device_batch_size * plan.num_microbatches
      if best is None or rows <= fewest:
        best, fewest = plan, rows
      break
  if best is None:
    return Choice([], reason)
  return Choice(list(there[: best.topology.num_devices // devices_each]), "", best.padding_rows)


def _divided_batches(config: Config) -> Iterator[BatchConfig]:
  """Yields how a batch may be divided: evenly, else with padding where that works."""
  yield config.batch
  streamed = config.batch.accumulation == "streamed"
  if not (streamed or is_rl(config.rl) or config.pipeline.pipeline_schedule != "none"):
    yield dataclasses.replace(config.batch, pad_batch=True)


def headers_of(about: Message) -> list[Header]:
  """Returns the copies that a supervisor says it has."""
  return [Header.of(one) for one in about["copies"]]


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


def has_finished(events: pathlib.Path, since: float) -> bool:
  """Returns whether a run has ended, its budget trained, at or after a time.

  Args:
    events: the run's events.jsonl, of which the end is read.
    since: seconds since 1970; what was before is of earlier starts.
  """
  with contextlib.suppress(OSError), events.open("rb") as file:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
    for line in file:
      with contextlib.suppress(ValueError, KeyError, TypeError):  # The first line may be cut off.
        event = json.loads(line)
        if event["event"] == END and event["how"] == "finished" and event["time"] >= since:
          return True
  return False
