"""A choice that all processes take from process 0's file, or make and leave there for next time."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.tuning import remembered


@dataclasses.dataclass(frozen=True)
class RememberedChoice:
  """The file of one choice."""

  folder: pathlib.Path
  key: str
  """The configuration key that is chosen."""
  depends_on: dict[str, Any]

  @property
  def file(self) -> pathlib.Path:
    """Where it is, or will be."""
    return remembered.file_of(self.folder, self.depends_on, self.key)

  def recalled(self, *, forget: bool) -> tuple[dict[str, Any] | None, str | None]:
    """The choice, or why what is there is of no use; (None, None) where nothing is.

    Args:
      forgetting: delete it instead.
    """
    return broadcast_one_to_all(self._read(forget))

  def kept(self, choice: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> str:
    """Writes the choice down; says where, or why not."""
    if jax.process_index() != 0:
      return ""
    try:
      remembered.remember(self.folder, self.depends_on, choice, probes, self.key)
    except OSError as error:
      return f"; not remembered, {self.folder} cannot be written: {error.strerror}"
    return f"; remembered in {self.file}"

  def _read(self, forget: bool) -> tuple[dict[str, Any] | None, str | None]:
    """The choice in the file of process 0."""
    if jax.process_index() != 0:
      return None, None
    if forget:
      # A file that cannot be deleted is written over, or that fails and is said.
      with contextlib.suppress(OSError):
        remembered.forget(self.folder, self.depends_on, self.key)
      return None, None
    found, problem = remembered.recall(self.folder, self.depends_on, self.key)
    return found.choice if found else None, problem
