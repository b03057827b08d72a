"""Checkpoints: written in the background, compared with what was saved when read.

`checkpoints/` holds one folder per step, written by Orbax under a temporary name and renamed when
complete, so a killed run leaves whole steps only. Each has two items: `state`, the arrays by leaf
name, and `record`, a JSON object with the position, the plan, the run's identity and the shape,
dtype and fingerprint of every leaf. Orbax restores a flipped bit without an error and stops at a
truncated file; here a step counts only when its fingerprints match, else the next older one is
tried, and older ones are deleted only when a newer one has been read back. Reading changes nothing
on disk: folders that turned out damaged are renamed, never deleted, when the next save begins.
"""

import contextlib
import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from maxbatch.checkpoints.find import (
  Barrier,
  DamagedError,
  cause,
  free_bytes,
  lone_reader,
  resumable_steps,
  silence_orbax,
  together,
)
from maxbatch.checkpoints.fingerprint import named_leaves
from maxbatch.checkpoints.formats import format_named, share_large_arrays_only
from maxbatch.checkpoints.reading import (
  check_leaves,
  difference_on_disk,
  patiently,
  read_arrays,
  read_copy,
  read_copy_record,
  read_record,
  write_copy,
)
from maxbatch.checkpoints.record import (
  changed_settings,
  format_name,
  identity_differences,
  listed,
  make_record,
  state_differences,
)
from maxbatch.config.schema import CheckpointConfig
from maxbatch.core.plan import Position
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all, gather
from maxbatch.hardware.copies import MemoryCopies, own_copies

_UNWRITABLE = (OSError, ValueError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Restored:
  """A verified checkpoint: the state on its new devices, its position, its batch plan and notes."""

  state: Any
  position: Position
  plan: dict[str, Any]
  notes: dict[str, Any] = dataclasses.field(default_factory=dict)


class Checkpointer:
  """Saves and restores a pytree of arrays in one folder; a context manager.

  With several processes, each makes the same calls in the same order on a shared folder.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    config: CheckpointConfig,
    identity: Mapping[str, object],
    report: Callable[[str], None] = print,
    *,
    settings: Mapping[str, object] | None = None,
    verified: Callable[[int], None] = lambda step: None,
  ):
    """Takes as `identity` what must not change between runs (model, dataset, seed, ...), and as
    `settings` what may, as JSON values; `report` receives a text whenever something deserves a
    person's attention, and `verified` the step of a save that was read back as it was saved.

    Raises UserError for an unknown checkpoint_format.
    """
    self._directory = pathlib.Path(directory).absolute()
    self._config, self._copies = config, own_copies()
    self._identity = dict(identity)
    self._settings = dict(settings or {})
    self._report, self._verified = report, verified
    self._format = format_named(config.checkpoint_format)
    self._damaged: dict[int, str] = {}
    self._ready_to_write = False
    self._pending: int | None = None
    self._failure: str | None = None
    self._barrier = Barrier()
    silence_orbax()
    share_large_arrays_only()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind and jax.process_count() > 1:
      return  # The others may have no such error, and not come here.
    # A failed save must not hide the error that is already on its way.
    with contextlib.suppress(*([UserError] if kind else [])):
      self.close()

  def steps(self) -> list[int]:
    """Lists the steps whose saves were completed, oldest first, by the disk; not verified."""
    return resumable_steps(self._directory)

  def save(
    self,
    state: object,
    position: Position,
    plan: Mapping[str, object],
    notes: Mapping[str, object] | None = None,
  ) -> None:
    """Writes a checkpoint, in the background if so configured; nothing if the step has one.

    `notes` are JSON values that a restore returns: whatever else a run needs to continue exactly.
    Returns once the state is copied off the devices: its buffers may be donated at once. A failure
    is reported and not raised; the next save tries again. Raises UserError: this process, one of
    several, could not write; here or when waiting later.
    """
    self.wait()
    if position.step in self._agreed_steps() and position.step not in self._damaged:
      return
    about = self._identity, self._settings, notes or {}, self._config.checkpoint_format
    record = make_record(state, position, plan, *about)
    arrays = {name: leaf for name, leaf in named_leaves(state).items() if leaf.size}
    items = ocp.args.Composite(state=self._format.save(arrays), record=ocp.args.JsonSave(record))
    try:
      self._prepare_to_write()
      self._manager.save(position.step, args=items, force=True)
    except _UNWRITABLE as error:
      self._record_failure(position.step, error)
      return
    self._pending = position.step
    if not self._config.async_checkpointing:
      self.wait()

  def copy_due(self, position: Position) -> bool:
    """Returns whether the state after this step is to be copied to the hosts' memory."""
    return self._copies is not None and position.step >= self._copies.next_step

  def copy(
    self,
    state: object,
    position: Position,
    plan: Mapping[str, object],
    notes: Mapping[str, object],
    step_seconds: float,
  ) -> dict[str, Any]:
    """Copies the state to the memory of this host and another; returns what is noted of it.

    Arguments are those of `save`, and the seconds of a step. Raises UserError: too little memory."""
    assert self._copies is not None
    about = self._identity, self._settings, notes, self._config.checkpoint_format
    make = functools.partial(make_record, state, position, plan, *about)
    return write_copy(self._copies, make, named_leaves(state), step_seconds)

  def poll(self) -> None:
    """Reports a background save that has failed since the last call, without waiting for one."""
    if self._pending is None:
      return
    if jax.process_count() > 1:  # They do not find out at the same time that one has ended.
      if self._barrier.failure is not None:
        self._record_failure(self._pending, self._barrier.failure)
    elif not self._manager.is_saving_in_progress():
      self.wait()

  def restore(self, abstract_state: object) -> Restored | None:
    """Restores the newest checkpoint that verifies, or returns None if none was ever completed.

    `abstract_state` is a pytree of ShapeDtypeStructs; arrays arrive on the shardings they name
    (else the first device), whatever mesh they are from. Raises UserError: the run differs from the
    checkpoint's in identity or in the state's shapes, or there are checkpoints and none verifies.
    """
    self.wait()
    damaged: dict[int, str] = {}
    steps = self._agreed_steps()
    if self._copies and (self._copies.step or -1) >= max(steps, default=0):
      try:
        return self._restore_copy(self._copies, abstract_state)
      except DamagedError as damage:
        self._report(f"the copy of step {self._copies.step} in memory cannot be used ({damage})")
    for step in reversed(steps):
      try:
        read = functools.partial(self._restore_step, step, abstract_state)
        restored = patiently(self._directory, step, read)
      except DamagedError as damage:
        damaged[step] = str(damage)
        continue
      self._damaged = damaged
      for bad, reason in damaged.items():
        self._report(f"checkpoint step {bad} is damaged ({reason}); using step {step} instead")
      return restored
    if damaged:
      raise UserError(
        f"No checkpoint in {self._directory} can be used:\n"
        + listed([f"step {step}: {reason}" for step, reason in damaged.items()])
        + "\nRestore the folder from a backup, choose another run_name, or remove the folder to"
        " start again from the beginning."
      )
    for path in self._unfinished():
      self._report(f"ignoring {path}: the save was interrupted before it was complete")
    return None

  def close(self) -> None:
    """Waits for the save in progress and closes the folder; a second call does nothing. Raises
    UserError: the last save of this object failed."""
    self.wait()
    self._close_manager()
    failure, self._failure = self._failure, None
    if failure:
      raise UserError(
        f"{failure}\nThe end of this run is not saved. Free some space, or move the run's folder and"
        " set base_output_directory to its new parent, then start again: the run continues from"
        " its last checkpoint."
      )

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    # Always asynchronous: Orbax's synchronous save leaves a broken event loop behind on failure,
    # and waiting at once has the same effect. Lightweight: ignores old metadata. It preserves all,
    # since it would delete older steps before the newer one has been read back.
    # Folders are made at once: threads would wait ten minutes for one that cannot be made, and the
    # process with them.
    options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.LatestN(None),
      lightweight_initialize=True,
      async_options=ocp.AsyncOptions(
        create_directories_asynchronously=False,
        barrier_sync_fn=self._barrier if jax.process_count() > 1 else None,
      ),
    )
    return ocp.CheckpointManager(self._directory, options=options)

  @property
  def _reader(self) -> ocp.CheckpointManager:
    """The manager that reads: in each of several processes by itself, so that one that cannot keeps
    nobody waiting."""
    return self._manager if jax.process_count() == 1 else self._lone_reader

  @functools.cached_property
  def _lone_reader(self) -> ocp.CheckpointManager:
    return lone_reader(self._directory)

  def _close_manager(self) -> None:
    """Drops Orbax's list of steps, which after a failed save names one that does not exist."""
    if "_manager" in self.__dict__:
      # It waits for the last save once more, and raises again what was recorded of it.
      with contextlib.suppress(*_UNWRITABLE):
        self._manager.close()
      del self._manager

  def wait(self) -> None:
    """Waits for the save in progress, if any, and reports it if it failed."""
    if self._pending is None:
      return
    step, self._pending = self._pending, None
    try:
      self._manager.wait_until_finished()
    except _UNWRITABLE as error:
      self._record_failure(step, error)
    else:
      self._failure = self._difference_on_disk(step)
      if self._failure:
        self._report(f"warning: {self._failure}; training continues, and older ones are kept")
      else:
        if jax.process_count() == 1:
          self._verified(step)
        self._remove_old()

  def _difference_on_disk(self, step: int) -> str | None:
    """Reads a completed save back; what differs from what was saved, or None.

    With several processes, of which none holds the whole state, the save counts as it is.
    """
    difference = difference_on_disk(self._reader, step) if jax.process_count() == 1 else ""
    where = f"checkpoint step {step} in {self._directory} does not read back as it was saved"
    return f"{where}: {difference}" if difference else None

  def _remove_old(self) -> None:
    """Deletes the steps that are not to be kept; the newest one has been read back."""
    period, steps = self._config.checkpoint_keep_period, self._agreed_steps()
    for step in steps[: -self._config.max_num_checkpoints_to_keep]:
      if step not in self._damaged and (period <= 0 or step % period):
        self._manager.delete(step)

  def _record_failure(self, step: int, error: BaseException) -> None:
    failure = (
      f"checkpoint step {step} could not be written to {self._directory}"
      f" ({free_bytes(self._directory)} bytes free): {cause(error)}"
    )
    if jax.process_count() > 1:  # Orbax has the others wait for this one.
      raise UserError(failure) from error
    self._failure, self._ready_to_write = failure, False
    self._close_manager()
    steps = [good for good in self.steps() if good not in self._damaged]
    last = f"the newest checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
    self._report(f"warning: {self._failure}; training continues, {last}")

  def _agreed_steps(self) -> list[int]:
    """Returns `steps` as process 0 sees them."""
    return broadcast_one_to_all(self.steps())

  def _unfinished(self) -> list[pathlib.Path]:
    return sorted(self._directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))

  def _prepare_to_write(self) -> None:
    """Removes what interrupted saves left, which nothing can read, and renames damaged steps so
    that their numbers are free: before the first save, and after a failed one."""
    if self._ready_to_write:
      return
    self._close_manager()
    if jax.process_index() == 0:
      for path in self._unfinished():
        # Orbax may still write to the folder of a save that has failed: then it is for later.
        shutil.rmtree(path, ignore_errors=True)
      for step in self._damaged:
        self._move_aside(step)
    gather(None)
    self._damaged = {}
    self._ready_to_write = True

  def _move_aside(self, step: int) -> None:
    target, attempt = self._directory / f"damaged-{step}", 1
    while target.exists():
      attempt += 1
      target = self._directory / f"damaged-{step}-{attempt}"
    (self._directory / str(step)).rename(target)
    self._report(f"checkpoint step {step} was damaged; its files are kept as {target}")

  def _restore_copy(self, copies: MemoryCopies, abstract_state: object) -> Restored:
    record = together(lambda: read_copy_record(copies))
    return self._restored(record, abstract_state, functools.partial(read_copy, copies))

  def _restore_step(self, step: int, abstract_state: object) -> Restored:
    record = together(lambda: read_record(self._reader, step))

    def read(wanted: dict[str, Any]) -> dict[str, jax.Array]:
      return read_arrays(self._reader, step, format_name(record), wanted)

    return self._restored(record, abstract_state, read)

  def _restored(
    self,
    record: dict[str, Any],
    abstract_state: object,
    read: Callable[[dict[str, Any]], dict[str, jax.Array]],
  ) -> Restored:
    """Reads and verifies the state of which `record` is. Raises DamagedError: it is not that."""
    step = record["step"]
    changed = identity_differences(record, self._identity)
    if changed and not self._config.allow_changed_resume:
      raise UserError(
        f"This run differs from the one that wrote checkpoint step {step} in {self._directory}:\n"
        + listed(changed)
        + "\nSet these values back, choose another run_name, or resume anyway with"
        " allow_changed_resume=true."
      )
    wanted = named_leaves(abstract_state)
    misfits = state_differences(record, wanted)
    if misfits:
      raise UserError(
        f"The state of this run has other arrays than checkpoint step {step} in {self._directory}:\n"
        + listed(misfits)
        + "\nModel and optimizer must have the shapes of the checkpoint (config.yml beside the"
        " checkpoints has its settings); set them back, or choose another run_name."
      )
    arrays = together(lambda: read(wanted))
    check_leaves(record, arrays)
    if changed:
      self._report(f"resuming from step {step} although it differs: " + "; ".join(changed))
    if lines := list(changed_settings(record, self._settings).values()):
      self._report(f"Changed since checkpoint step {step}, and in force from here on:")
      self._report("\n".join(f"  {line}" for line in lines))
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), list(arrays.values()))
    position = Position(step, record["samples"])
    # Checkpoints of earlier versions have no notes.
    return Restored(state, position, record["plan"], record.get("notes", {}))
