"""How a checkpoint's arrays are written and read, by name.

A format is a pair of Orbax `CheckpointArgs`, one to save and one to restore, each registered with a
handler of its own. So Orbax treats every format as its own: it writes under a temporary name, in
the background, on all processes, and keeps as many steps as it is asked to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxbatch.config.registry import registered


@dataclasses.dataclass(frozen=True)
class Format:
  """What makes the arguments that Orbax is given for a step's arrays.

  A handler that cannot read what is there raises OSError or ValueError; the step then counts as
  damaged. It need not check values: their fingerprints are compared after every restore.
  """

  save: Callable[[dict[str, jax.Array]], Any]
  """Of the arrays by leaf name, none of them empty."""
  restore: Callable[[dict[str, jax.ShapeDtypeStruct]], Any]
  """Of the shapes, dtypes and shardings by leaf name; `restore` returns arrays."""
  restore_some: Callable[[dict[str, jax.ShapeDtypeStruct]], Any] | None = None
  """The same where these are not all that was saved; None: `restore` can do that too."""


def _restore_some(wanted: dict[str, jax.ShapeDtypeStruct]) -> Any:
  targets = ocp.checkpoint_utils.construct_restore_args(wanted)
  return ocp.args.PyTreeRestore(wanted, restore_args=targets, partial_restore=True)


FORMATS: dict[str, Format] = {
  "orbax": Format(ocp.args.StandardSave, ocp.args.StandardRestore, _restore_some),
}


def format_named(name: str) -> Format:
  """The format that `checkpoint_format` names.

  Raises:
    UserError: for an unknown name.
  """
  return registered("checkpoint_format", name, FORMATS)
