"""Joins the processes that train together.

jax must know of the others before it starts a device. What keys and variables leave open it finds
itself, under SLURM, Open MPI and Kubernetes and on TPU pods.

Keys come first, then variables. JAX_COORDINATOR_IP, JAX_COORDINATOR_PORT, NNODES and NODE_RANK are
MaxText's; JAX_PROCESS_COUNT, JOB_INDEX and PROCESSES_IN_JOB are those that xpk sets in a JobSet.
"""

import collections
import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import jax
from jax._src import clusters

from maxbatch.config.declare import Address, declared
from maxbatch.config.load import load_config
from maxbatch.config.registry import naming_keys
from maxbatch.config.schema import Config, DistributedConfig
from maxbatch.core.keys import counted
from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware.agreement import shared_error
from maxbatch.hardware.ending import leave_with_others, watch_others
from maxbatch.hardware.messages import split_address
from maxbatch.hardware.peers import Peers

_POD = "JOB_COMPLETION_INDEX"
_NUMBERED = (
  ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
  ("PMI_SIZE", "PMI_RANK"),
  ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
  ("SLURM_NTASKS", "SLURM_PROCID"),
  ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
  ("JAX_PROCESS_COUNT", _POD),
  ("NNODES", "NODE_RANK"),
  ("WORLD_SIZE", "RANK"),
)
"""Variables that say how many processes there are, and which of them this one is."""

_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
_PORT_VARIABLE = "JAX_COORDINATOR_PORT"
_PORT = 1234
"""Where an address has none, as in MaxText."""

_JAX_LATER_SECONDS = 60
"""From our limits to jax's own, at which it ends the process with a stack trace."""
_JOINING = "joins the other processes"
"""The name of a thread, which goes on after our limit."""
_PATIENCE_SECONDS = 5.0
_NAMED = 8
_NOWHERE = (
  "nothing says where the others are. Start the processes by srun or by mpirun of Open MPI 4, or give each "
  "of them coordinator_address=HOST:PORT (a free port of process 0's host), num_processes=… and process_id=…"
)


@dataclasses.dataclass(frozen=True)
class StatedProcesses:
  """Where process 0 listens, how many processes there are, and which one this is, if it is said."""

  address: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  sign: str = ""
  """The variable that shows several processes, with its value; empty: none does."""

  @property
  def several(self) -> bool:
    """Whether there must be others."""
    return self.address is not None or bool(self.sign) or (self.num_processes or 1) > 1


def stated_processes(keys: DistributedConfig, environment: Mapping[str, str]) -> StatedProcesses:
  """Returns what is said of this process and the others.

  Raises:
    UserError: a variable is not a number or no address, or there is no such process.
  """
  number, own, sign = _numbers(environment)
  number = number if keys.num_processes < 0 else keys.num_processes
  own = own if keys.process_id < 0 else keys.process_id
  if number is not None and own is not None and own >= number:
    raise UserError(
      f"process_id={own} num_processes={number}{f' ({sign})' if sign else ''}: processes count "
      f"from 0 to {number - 1}; for example process_id={number - 1}"
    )
  return StatedProcesses(_address(keys, environment), number, own, sign)


def is_first_process(keys: DistributedConfig) -> bool:
  """Returns whether no other process is known to be the first, before any have joined.

  Raises:
    UserError: as `stated_processes`.
  """
  return not stated_processes(keys, os.environ).process_id


def _numbers(environment: Mapping[str, str]) -> tuple[int | None, int | None, str]:
  """Returns the number of processes, this one's number, and the variable that shows several."""
  for count, rank in _NUMBERED:
    number = _integer(environment, count)
    if number is None or number < 2:
      continue
    own = _integer(environment, rank)
    if own is not None and rank == _POD:
      own += (_integer(environment, "JOB_INDEX") or 0) * (
        _integer(environment, "PROCESSES_IN_JOB") or 0
      )
    return number, own, f"{count}={number}"
  workers = environment.get("TPU_WORKER_HOSTNAMES", "")
  for name, is_sign in (
    ("TPU_WORKER_HOSTNAMES", "," in workers),
    ("MEGASCALE_NUM_SLICES", (_integer(environment, "MEGASCALE_NUM_SLICES") or 1) > 1),
    # Of a pod in an indexed job; nothing says of how many.
    (_POD, _POD in environment),
  ):
    if is_sign:
      return None, None, f"{name}={environment[name]}"
  return None, None, ""


def _address(keys: DistributedConfig, environment: Mapping[str, str]) -> str | None:
  """Returns HOST:PORT of process 0. Raises UserError if a variable says something else."""
  name = next((name for name in _ADDRESSES if environment.get(name)), "")
  if keys.coordinator_address or not name:
    return keys.coordinator_address or None
  address, said = environment[name], f"{name}={environment[name]}"
  # An address of IPv6 has other colons.
  if address.count(":") != 1 and not address.rpartition("]:")[2].isdecimal():
    port = environment.get(_PORT_VARIABLE)
    address, said = (
      f"{address}:{port or _PORT}",
      f"{said} {_PORT_VARIABLE}={port}" if port else said,
    )
  if not Address().holds(address):
    raise UserError(
      f"{said} must be HOST:PORT, an IPv6 address in brackets; for example "
      f"{Address().nearest(address)}"
    )
  return address


def _integer(environment: Mapping[str, str], name: str) -> int | None:
  value = environment.get(name)
  if not value:
    return None
  if not value.isdecimal():
    raise UserError(f"{name}={value}: must be a number of processes or of one of them; unset it")
  return int(value)


_tried_to_join = threading.Event()
"""Whether jax may hold connections to other processes."""


def join(config: Config) -> int:
  """Joins the other processes, if there are any; call it before jax starts a device.

  Returns: The number of processes that keys or variables name; 1 where they name none.

  Raises:
    UserError: the others cannot be reached in time, or there are some and nothing says where.
  """
  if _is_alone(config):
    return 1
  keys = config.distributed
  stated = stated_processes(keys, os.environ)
  _check_numbered(keys, stated)
  if not jax.distributed.is_initialized() and (stated.several or _may_be_a_pod(config)):
    # The handlers of signals stay Python's, which end a run in order.
    jax.config.update("jax_enable_preemption_service", False)
    failure = _initialize(stated, keys)
    if isinstance(failure, UserError):
      raise failure
    if failure and stated.several:
      raise UserError(_refusal(stated, failure))
  return stated.num_processes or 1


def _check_numbered(keys: DistributedConfig, stated: StatedProcesses) -> None:
  """Refuses a process_id that would be read by nobody: the process would train alone, or as another."""
  if keys.process_id >= 0 and stated.num_processes is None and stated.address is None:
    raise UserError(
      f"process_id={keys.process_id} needs num_processes and coordinator_address, and neither keys nor "
      "variables give them, so this process would not be one of several; for example "
      f"process_id={keys.process_id} num_processes={max(keys.process_id + 1, 2)} "
      f"coordinator_address=HOST:{_PORT}, or process_id=-1"
    )


def check_joined(num_processes: int, num_simulated_devices: int) -> None:
  """Checks, once jax has started, that as many processes have joined as `join` returned.

  Raises:
    UserError: this one is alone, or the processes have not as many devices each.
  """
  joined = jax.process_count()
  devices = jax.devices() if joined > 1 else []
  counts = collections.Counter(device.process_index for device in devices)
  if len(set(counts.values())) > 1:
    (least, fewest), (most, largest) = counts.most_common()[-1], counts.most_common(1)[0]
    raise shared_error(
      f"process {least} has {counted(fewest, 'device')} and process {most} has {largest}: all must "
      f"have as many (num_simulated_devices={num_simulated_devices} here)"
    )
  if num_processes > 1 and joined == 1:
    raise UserError(
      f"{num_processes} processes were started, and this one is alone, as jax had started before "
      "it could join the others"
    )
  if num_simulated_devices > 0 and joined != num_processes:
    raise UserError(
      f"num_simulated_devices={num_simulated_devices}: {joined} processes have joined, and nothing "
      f"said before how many share these devices; for example num_processes={joined}"
    )


def leave_together(exit_code: int) -> NoReturn:
  """Ends this process, with the others if it has joined them."""
  # What is left of a connection that failed may wait, or crash, while Python is taken down.
  leave_with_others(exit_code, at_once=_tried_to_join.is_set())


@contextlib.contextmanager
def refusing_together(arguments: Sequence[str]) -> Iterator[None]:
  """Refuses in all processes what one refuses in this context before it has joined the others.

  Such as a key in it alone, or a file that it alone does not have: the others wait for it. The command's
  `arguments` say where they are.

  Raises:
    UserError: one was raised in this context; process 0 says it, and whose it is.
  """
  try:
    yield
  except UserError as error:
    if not _tried_to_join.is_set() and not jax.distributed.is_initialized():
      _tell(arguments, error)
    raise


def _tell(arguments: Sequence[str], error: UserError) -> None:
  """Tells the others, if there are any, that this process cannot start; raises SaidByAnotherError then."""
  try:
    config = _config_of_processes(arguments)
    stated = stated_processes(config.distributed, os.environ)
  except UserError:
    return  # What says where the others are is wrong itself.
  if _is_alone(config) or not stated.several or config.distributed.elastic:
    return  # Supervisors see the exit code.
  is_first = stated.process_id == 0
  if is_first:
    print(f"error: {error}", file=sys.stderr, flush=True)  # It may be long until all have come.
  answer = _initialize(stated, config.distributed, str(error))
  if is_first or isinstance(answer, SaidByAnotherError):
    raise SaidByAnotherError(str(error)) from None


def _config_of_processes(arguments: Sequence[str]) -> Config:
  """Returns the keys that say where the others are, whatever is wrong with other keys or their file."""

  def given(*names: str) -> list[str]:
    return [argument for argument in arguments if argument.partition("=")[0] in names]

  own = given(*declared(DistributedConfig), "compile_topology")
  with contextlib.suppress(UserError):
    # With the plug-ins, whose keys the file may have.
    return load_config([*given("config", *naming_keys()), *own])
  return load_config(["config=base", *own])


def _is_alone(config: Config) -> bool:
  """Returns whether this process joins no other, whatever variables say."""
  return config.distributed.skip_jax_distributed_system or bool(config.compile.compile_topology)


def _may_be_a_pod(config: Config) -> bool:
  """Returns whether this may be one host of a TPU pod, which no variable need say.

  Not in other containers of Kubernetes, where jax would ask the cluster's interface.
  """
  return config.mesh.num_simulated_devices <= 0 and "KUBERNETES_SERVICE_HOST" not in os.environ


def located(config: Config) -> StatedProcesses:
  """Returns `stated_processes`, and what the cluster tells where nothing is said."""
  stated = stated_processes(config.distributed, os.environ)
  is_unknown = None in (stated.address, stated.num_processes, stated.process_id)
  if is_unknown and (stated.several or _may_be_a_pod(config)):
    with contextlib.suppress(ValueError, RuntimeError, LookupError, OSError):
      return _detected(stated, config.distributed.jax_distributed_initialization_timeout)
  return stated


def _detected(stated: StatedProcesses, limit: int) -> StatedProcesses:
  """Returns what jax's own `initialize` finds out; but the processes meet at that address before."""
  known = stated if stated.address else StatedProcesses()
  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  given = known.address, known.num_processes, known.process_id
  address, number, own, _ = detect(*given, None, None, limit)
  return StatedProcesses(address, number, own, stated.sign)


def _initialize(
  stated: StatedProcesses, keys: DistributedConfig, failure: str = ""
) -> str | UserError:
  """Joins by jax; why it could not, or nothing.

  In a thread: jax waits without hearing signals, and at its own limit it ends the process.
  """
  if stated.several:
    _tried_to_join.set()
  limit = keys.jax_distributed_initialization_timeout
  silence = keys.jax_distributed_heartbeat_timeout_seconds
  peers = Peers(silence, failure)
  outcome: queue.SimpleQueue[str | UserError] = queue.SimpleQueue()

  def initialize() -> None:
    try:
      # Of a package that jax would use to ask Kubernetes, if it were installed.
      warnings.simplefilter("ignore")
      address, number, own, _ = dataclasses.astuple(_detected(stated, limit))
      if None in (address, number, own):
        return outcome.put(_NOWHERE)
      if own:
        address = peers.check_in(address, own)
      else:
        everywhere = f"[::]:{address.rpartition(':')[2]}"
        peers.serve(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", everywhere), number)
      jax.distributed.initialize(
        address,
        number,
        own,
        initialization_timeout=limit + _JAX_LATER_SECONDS,
        heartbeat_timeout_seconds=silence + _JAX_LATER_SECONDS,
      )
    except UserError as error:
      outcome.put(error)
    except (ValueError, RuntimeError, LookupError, OSError) as error:
      outcome.put(str(error).splitlines()[0] or type(error).__name__)
    else:
      _tried_to_join.set()
      watch_others(peers)
      outcome.put("")

  with warnings.catch_warnings():
    threading.Thread(target=initialize, daemon=True, name=_JOINING).start()
    try:
      return outcome.get(timeout=limit)
    except queue.Empty:
      if peers.refusal:  # Those that never came have not heard of it.
        return UserError(peers.refusal)
      return _late(stated, limit, peers.missing(_NAMED), peers.num_missing())


def _late(stated: StatedProcesses, limit: int, missing: Sequence[int], num_missing: int) -> str:
  """Returns why processes may not have joined in time; the first of those missing are known in process 0
  alone."""
  count = f"the {stated.num_processes}" if stated.num_processes else "all"
  late = f"{count} processes did not arrive within jax_distributed_initialization_timeout={limit}"
  late += " seconds"
  if missing:
    more = num_missing - len(missing)
    numbers = ", ".join(map(str, missing))
    late += f"; missing: process {numbers}{f' and {more:,} more' if more > 0 else ''}"
  elif stated.address is not None:
    try:
      socket.create_connection(split_address(stated.address), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
      late += f", and process 0 does not answer at {stated.address} ({error.strerror or error})"
    else:
      late += f"; process 0 answers at {stated.address}, so that others are missing"
  return f"{late}. If they only start late, raise that limit"


def _refusal(stated: StatedProcesses, reason: str) -> str:
  given = {
    "coordinator_address": stated.address,
    "num_processes": stated.num_processes,
    "process_id": stated.process_id,
  }
  known = " ".join(f"{key}={value}" for key, value in given.items() if value is not None)
  return (
    f"{stated.sign or known}: there are several processes, and this one cannot join the others: "
    f"{reason}; skip_jax_distributed_system=true trains with this process alone"
  )
