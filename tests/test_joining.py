"""How processes find each other: keys, variables, what jax detects; and refusals where they cannot."""

import json
import socket
import sys
import threading
from unittest.mock import Mock

import pytest
from processes import PATIENCE_SECONDS, environment
from several_processes import TRAIN, free_port, place, started, train, wait

from maxbatch.config.load import load_config
from maxbatch.config.schema import DistributedConfig
from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware import processes
from maxbatch.hardware.devices import devices_per_process
from maxbatch.hardware.peers import Peers
from maxbatch.hardware.processes import StatedProcesses, stated_processes

HOST = socket.gethostname()
JOINS = """
import json, os, sys
os.environ.update(json.loads(sys.argv.pop(1)))
import jax
from maxbatch.config.load import load_config
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import leave_with_others
devices = find_devices(load_config(["config=base", *sys.argv[1:]])).devices
print(jax.process_index(), jax.process_count(), jax.local_device_count(), len(devices))
leave_with_others(0)
"""


def joins(devices: int, variables: dict[str, str]) -> list[str]:
  """A process that sets these variables and says what it finds."""
  given = [json.dumps(variables), f"num_simulated_devices={devices}"]
  return [sys.executable, "-c", JOINS, *given]


def slurm(number: int, port: int) -> dict[str, str]:
  return {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": str(number),
    "SLURM_LOCALID": str(number),
    "JAX_COORDINATOR_PORT": str(port),
  }


def open_mpi(number: int, port: int) -> dict[str, str]:
  return {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": str(number),
    "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
    "JAX_COORDINATOR_PORT": str(port),
  }


def jobset(number: int, port: int) -> dict[str, str]:
  return {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    "JAX_PROCESS_COUNT": "2",
    "JOB_COMPLETION_INDEX": str(number),
  }


def maxtext(number: int, port: int) -> dict[str, str]:
  return {
    "JAX_COORDINATOR_IP": "127.0.0.1",
    "JAX_COORDINATOR_PORT": str(port),
    "NNODES": "2",
    "NODE_RANK": str(number),
  }


@pytest.mark.parametrize("variables", [slurm, open_mpi, jobset, maxtext])
def test_processes_find_each_other_by_the_variables_of(variables):
  port = free_port()
  ended = wait([started(joins(4, variables(number, port))) for number in range(2)])
  assert [(one.output.splitlines()[0], one.errors) for one in ended] == [
    ("0 2 2 4", ""),
    ("1 2 2 4", ""),
  ]


def test_one_of_several_processes_does_not_train_alone():
  # As in an sbatch script without srun: jax detects steps alone.
  variables = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "5"}
  (ended,) = wait([started([*TRAIN, "config=base"], variables)])
  assert (ended.exit_code, ended.output) == (2, "")
  assert ended.errors.startswith(
    "error: SLURM_NTASKS=8: there are several processes, and this one "
  )
  assert "nothing says where the others are" in ended.errors
  assert "coordinator_address=HOST:PORT" in ended.errors
  assert ended.errors.endswith("skip_jax_distributed_system=true trains with this process alone\n")


def test_a_process_waits_for_the_others_no_longer_than_the_limit():
  limit = "jax_distributed_initialization_timeout=1"
  places = [place(number, 2, free_port()) for number in range(2)]
  with socket.create_server(("", 0)) as taken:
    places.append(place(0, 2, taken.getsockname()[1]))
    ended = wait([started([*TRAIN, "config=base", *each, limit], {}) for each in places])
  assert [(one.exit_code, one.output) for one in ended] == [(2, "")] * 3
  first, second, third = (one.errors.splitlines() for one in ended)
  late = f"the 2 processes did not arrive within {limit} seconds"
  assert late in first[0]
  assert "; missing: process 1. If they only start late" in first[0]
  assert late in second[0]
  assert "and process 0 does not answer at localhost:" in second[0]
  assert "another program has port " in third[0]
  assert (len(first), len(second), len(third)) == (1, 1, 1)


def test_what_one_process_refuses_all_refuse():
  """Long before the limit, and with the words of that process."""
  first, second = train(
    2, ["config=base", "num_simulated_devices=2"], own={1: ["learning_rat=0.5"]}
  )
  assert (first.exit_code, second.exit_code) == (2, 2)
  assert first.errors.startswith(
    f"error: process 1 on {HOST}: command line: there is no key 'learning_rat'"
  )
  assert (len(first.errors.splitlines()), first.output) == (1, "")
  assert (second.errors, second.output) == ("", "")


def test_two_processes_of_one_number_are_refused():
  port, others = free_port(), []
  command = [*TRAIN, "config=base", "num_simulated_devices=3"]
  processes = [started([*command, *place(number, 3, port)], {}) for number in range(2)]
  other = threading.Thread(target=attend, args=(f"localhost:{port}", others), daemon=True)
  other.start()
  ended = wait(processes)
  assert [(one.exit_code, one.output) for one in ended] == [(2, "")] * 2
  said = f"process_id=1: a process on {HOST} and one on {HOST} both have this number"
  assert ended[0].errors.startswith(f"error: {said}")
  assert (len(ended[0].errors.splitlines()), ended[1].errors) == (1, "")
  other.join(PATIENCE_SECONDS)
  assert others[0].startswith(said)


def attend(address: str, said: list[str]) -> None:
  """A further process 1, which is told why it may not start."""
  try:
    Peers(60).check_in(address, 1)
  except SaidByAnotherError as error:
    said.append(str(error))


def test_a_process_may_train_alone_all_the_same(monkeypatch):
  monkeypatch.setenv("SLURM_NTASKS", "8")
  assert "SLURM_NTASKS" in environment()
  (ended,) = wait([started([*joins(1, {}), "skip_jax_distributed_system=true"])])
  assert (ended.output, ended.errors) == ("0 1 1 1\n", "")


def test_who_compiles_for_other_devices_waits_for_nobody(monkeypatch):
  monkeypatch.setenv("SLURM_NTASKS", "8")
  monkeypatch.setattr(processes, "Peers", Mock(side_effect=AssertionError("it joins")))
  given = ["config=base", "compile_topology=v5e-256", "learning_rat=1"]
  with pytest.raises(UserError, match="learning_rat"), processes.refusing_together(given):
    load_config(given)


def keys(*given: str) -> DistributedConfig:
  return load_config(["config=base", *given]).distributed


@pytest.mark.parametrize(
  ("given", "variables", "stated"),
  [
    ([], {}, StatedProcesses()),
    ([], {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, StatedProcesses()),
    ([], {"SLURM_NTASKS": "8"}, StatedProcesses(None, 8, None, "SLURM_NTASKS=8")),
    ([], {"PMI_SIZE": "4", "PMI_RANK": "3"}, StatedProcesses(None, 4, 3, "PMI_SIZE=4")),
    # mpirun inside an allocation of SLURM.
    (
      [],
      {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "PMI_SIZE": "4", "PMI_RANK": "3"},
      StatedProcesses(None, 4, 3, "PMI_SIZE=4"),
    ),
    # xpk: two jobs of four pods each.
    (
      [],
      {
        "JAX_COORDINATOR_ADDRESS": "host-0",
        "JAX_PROCESS_COUNT": "8",
        "JOB_INDEX": "1",
        "PROCESSES_IN_JOB": "4",
        "JOB_COMPLETION_INDEX": "2",
      },
      StatedProcesses("host-0:1234", 8, 6, "JAX_PROCESS_COUNT=8"),
    ),
    (
      [],
      {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
      StatedProcesses(None, 2, 1, "OMPI_COMM_WORLD_SIZE=2"),
    ),
    (
      [],
      {"JOB_COMPLETION_INDEX": "0"},
      StatedProcesses(None, None, None, "JOB_COMPLETION_INDEX=0"),
    ),
    ([], {"TPU_WORKER_HOSTNAMES": "localhost"}, StatedProcesses()),
    (
      [],
      {"TPU_WORKER_HOSTNAMES": "a,b"},
      StatedProcesses(None, None, None, "TPU_WORKER_HOSTNAMES=a,b"),
    ),
    (
      [],
      {"MEGASCALE_NUM_SLICES": "2"},
      StatedProcesses(None, None, None, "MEGASCALE_NUM_SLICES=2"),
    ),
    # Keys come first.
    (
      ["coordinator_address=a:1", "num_processes=2", "process_id=1"],
      {"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "JAX_COORDINATOR_ADDRESS": "b:2"},
      StatedProcesses("a:1", 2, 1, "SLURM_NTASKS=8"),
    ),
  ],
)
def test_keys_and_variables_say(given, variables, stated):
  assert stated_processes(keys(*given), variables) == stated


@pytest.mark.parametrize(
  ("given", "variables", "said"),
  [
    (["process_id=2", "num_processes=2"], {}, "process_id=2 num_processes=2: processes count from"),
    ([], {"SLURM_NTASKS": "many"}, "SLURM_NTASKS=many: must be a number"),
    (
      [],
      {"JAX_COORDINATOR_ADDRESS": "a:99999"},
      "JAX_COORDINATOR_ADDRESS=a:99999 must be HOST:PORT, .* for example a:1234",
    ),
    (
      [],
      {"JAX_COORDINATOR_IP": "::1", "JAX_COORDINATOR_PORT": "8000", "NNODES": "2"},
      "JAX_COORDINATOR_IP=::1 JAX_COORDINATOR_PORT=8000 must be HOST:PORT",
    ),
  ],
)
def test_what_cannot_be_is_refused(given, variables, said):
  with pytest.raises(UserError, match=said):
    stated_processes(keys(*given), variables)


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":1234", "localhost:99999"])
def test_an_address_has_a_host_and_a_port(address):
  with pytest.raises(UserError, match="coordinator_address must be HOST:PORT"):
    keys(f"coordinator_address={address}")


def test_processes_share_simulated_devices_equally():
  assert devices_per_process(8, 4) == 2
  with pytest.raises(UserError, match=r"num_simulated_devices=8: 3 processes .* example num_s.*=6"):
    devices_per_process(8, 3)
