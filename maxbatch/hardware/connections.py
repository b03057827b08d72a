"""Connects the CPU devices of several processes before a step needs them.

jax joins them by Gloo: a group of devices when a program first reduces over it, and there each process waits
half a minute for the addresses of the others, which may still compile. So they meet here first, for as long
as our own limit says, and then add up a few numbers over every group of the mesh.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.errors import UserError
from maxbatch.hardware.agreement import Exchange, check_none_failed, failed_here

_connected: set[Mesh] = set()
"""A group is connected once for all programs."""


def connect_processes(limit_seconds: float) -> None:
  """Waits for all processes, that may still start their devices.

  Raises:
    UserError: they have not come by then.
  """
  try:
    Exchange()(None, limit_seconds)
  except TimeoutError:
    raise UserError(
      f"the {jax.process_count()} processes did not arrive within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds to connect their devices. If they are only slow, raise that limit"
    ) from None


def connect(mesh: Mesh, limit_seconds: float) -> None:
  """Connects every group of a mesh's devices; all processes call it.

  Args:
    mesh: of a run; only CPU devices of several processes need it.
    limit_seconds: for how long the processes wait for each other.

  Raises:
    UserError: they have not come by then, or cannot be connected, in all processes.
  """
  is_needed = jax.process_count() > 1 and jax.devices()[0].platform == "cpu"
  if is_needed and mesh not in _connected:
    _together(lambda: _reduce_over_all_axes(mesh), limit_seconds)
    _connected.add(mesh)


def _together(work: Callable[[], None], limit_seconds: float) -> None:
  """Does `work` in all processes at the same time; where one of them fails, all end with what each says.

  There is no second try: jaxlib keeps a group whose connection has failed, and fails again at once.
  """
  connect_processes(limit_seconds)
  mine = _failure(work)
  if mine:
    # Who comes late would take our address, at which nobody answers any more, and wait for ever.
    client: Any = jax_distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, RuntimeError, AttributeError):
      client.key_value_delete("cpu:gloo/")
  try:
    check_none_failed(Exchange()(failed_here(mine and _refusal(mine)), limit_seconds))
  except TimeoutError:
    raise UserError(
      f"a process did not connect its devices within jax_distributed_initialization_timeout="
      f"{limit_seconds:g} seconds of the others. If it is only slow, raise that limit; else start again"
    ) from None


def _failure(work: Callable[[], None]) -> str:
  """Does `work`; returns what Gloo has said, or nothing."""
  try:
    work()
  except jax.errors.JaxRuntimeError as error:
    if "Gloo" not in str(error):
      raise
    return str(error).splitlines()[0]
  return ""


def _refusal(failure: str) -> str:
  return (
    f"its devices and those of the other processes could not be connected: {failure}. A process that stands "
    "still for half a minute is enough for that; start again, on a machine that is less busy or with fewer "
    "processes"
  )


def _reduce_over_all_axes(mesh: Mesh) -> None:
  """Adds up a number of each device along every choice of axes."""
  spec = PartitionSpec(*mesh.axis_names)
  ones = jax.make_array_from_callback(
    mesh.devices.shape,
    NamedSharding(mesh, spec),
    lambda _: np.ones((1,) * mesh.devices.ndim, np.float32),
  )
  long = [name for name, size in mesh.shape.items() if size > 1]
  for count in range(1, len(long) + 1):
    for names in itertools.combinations(long, count):
      # Not jnp.sum, of which the compiler makes a sum for each axis.
      add = functools.partial(jax.lax.psum, axis_name=names)
      jax.block_until_ready(
        jax.jit(jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(ones)
      )
