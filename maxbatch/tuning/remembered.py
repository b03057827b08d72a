"""A choice remembered in a file, under everything it depends on: with anything changed, another file.

One JSON file per choice, to be read by people too: what the choice depends on, the choice, the probes
it rests on, and when it was made. All processes take what process 0 reads; process 0 alone writes.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.run_folder.atomic import write_whole
from maxbatch.tuning.search import Say, in_process_0

_PARTS = {"depends_on": dict, "choice": dict, "probes": list, "when": str}
"""What a file holds, and of which type."""


class Made(NamedTuple):
  """A choice that was made anew."""

  value: Any
  why: str
  probes: Sequence[Mapping[str, Any]]
  heading: str = ""
  """What is said before the choice."""


@dataclasses.dataclass(frozen=True)
class RememberedChoice:
  """The file of one choice."""

  folder: pathlib.Path
  key: str
  """The configuration key that is chosen."""
  asked: str
  """The value by which the key asks for a choice: `auto`, `-1`."""
  depends_on: Mapping[str, Any]

  @property
  def file(self) -> pathlib.Path:
    """The file in which it is, or will be."""
    digest = hashlib.sha256(_canonical(self.depends_on).encode()).hexdigest()[:16]
    return self.folder / f"{self.key}-{digest}.json"

  def recalled_or_made(
    self,
    allowed: Collection[Any],
    make: Callable[[], Made],
    line: Callable[[Any, str], str],
    *,
    retune: bool,
    say: Say,
  ) -> Any:
    """Returns the value that is remembered, or else the one that `make` finds, and remembers it.

    Args:
      make: probes; called in all processes, if in any.
      line: a value and why, in a line.
      say: prints a line; called in process 0 only.
    """
    say = in_process_0(say)
    if (remembered := self.agreed(allowed, retune=retune, say=say)) is not None:
      value, why = remembered[self.key], str(remembered.get("why"))
      say(f"{line(value, why)} (remembered from {self.file}; --retune measures again)")
      return value
    made = make()
    kept = self.remember({self.key: made.value, "why": made.why}, made.probes)
    said = f"{line(made.value, made.why)}{kept}"
    say(f"{made.heading}{said}\n" if made.heading else said)
    return made.value

  def agreed(self, allowed: Collection[Any], *, retune: bool, say: Say) -> dict[str, Any] | None:
    """Returns process 0's choice in all processes; None where there is none, after a line if it is
    damaged.

    Args:
      retune: delete the file instead.
    """
    choice, problem = broadcast_one_to_all(self._read_or_delete(retune))
    # With their types, since for Python true and 1.0 are 1.
    values = [(type(value), value) for value in allowed]
    if choice is not None and (type(choice.get(self.key)), choice.get(self.key)) not in values:
      choice, problem = None, f"{self.file} has a damaged choice"
    if problem:
      say(f"{self.key} {self.asked}: {problem}; measured again")
    return choice

  def recall(self) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the choice, or why what is there is of no use; (None, None) where nothing is."""
    if self.file.is_fifo():
      return None, f"{self.file} cannot be read: it is a pipe"
    try:
      content = json.loads(self.file.read_text(encoding="utf-8"))
    except FileNotFoundError:
      return None, None
    except OSError as error:
      return None, f"{self.file} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
      return None, f"{self.file} is no JSON"
    problem = self._problem(content)
    return (None, f"{self.file} {problem}") if problem else (content["choice"], None)

  def remember(self, choice: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> str:
    """Writes the choice, in process 0; what is said of it, be it that it cannot be written."""
    if jax.process_index() != 0:
      return ""
    try:
      self.write(choice, probes)
    except OSError as error:
      return f"; not remembered, {self.folder} cannot be written: {error.strerror}"
    return f"; remembered in {self.file}"

  def write(self, choice: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> None:
    """Writes the choice; readers see the file before or the file after, never a part.

    Raises:
      OSError: the folder cannot be written.
    """
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    values = (json.loads(_canonical(self.depends_on)), choice, list(probes), when)
    content = dict(zip(_PARTS, values, strict=True))
    write_whole(self.file, json.dumps(content, indent=2, default=str) + "\n")

  def _read_or_delete(self, retune: bool) -> tuple[dict[str, Any] | None, str | None]:
    if jax.process_index() != 0:
      return None, None
    if not retune:
      return self.recall()
    # A file that cannot be deleted is written over, or that fails and is said.
    with contextlib.suppress(OSError):
      self.file.unlink(missing_ok=True)
    return None, None

  def _problem(self, content: Any) -> str | None:
    """Returns what is wrong with the file's content."""
    if not isinstance(content, dict):
      return "is not a remembered choice"
    missing = [part for part in _PARTS if part not in content]
    if missing:
      return f"lacks {', '.join(missing)}"
    for part, kind in _PARTS.items():
      if not isinstance(content[part], kind):
        return f"has a damaged {part}"
    # The name holds only a digest: an edited or a misplaced file would pass for another's.
    is_mine = content["depends_on"] == json.loads(_canonical(self.depends_on))
    return None if is_mine else "depends on something else"


def _canonical(depends_on: Mapping[str, Any]) -> str:
  """Returns the same text for the same things, whatever their order."""
  return json.dumps(depends_on, sort_keys=True, default=str)
