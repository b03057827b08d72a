"""Sizes out of this world: a sentence at once, from validate_only and the run alike."""

import contextlib
import signal
from collections.abc import Iterator

import pytest
from support import TINY

from maxbatch import critical_batch, pipeline, train
from maxbatch.plan import main as plan_command

KEYS = [f"{key}={value}" for key, value in TINY.items()]
PIPELINE = ["pipeline_schedule=1f1b", "ici_pipeline_parallelism=2"]


@contextlib.contextmanager
def soon(seconds: float) -> Iterator[None]:
  """Fails what takes longer on the wall; generous, since other tests may run beside this one."""

  def stop(*_: object) -> None:
    raise TimeoutError

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def refusal(capsys: pytest.CaptureFixture[str], main, *arguments: str) -> str:
  """What a command says that refuses at once."""
  capsys.readouterr()
  with soon(30):
    assert main(arguments) == 2
  printed = capsys.readouterr().err
  assert printed.startswith("error: ")
  assert "Traceback" not in printed
  return printed


@pytest.mark.parametrize(
  ("size", "said"),
  [
    ("base_emb_dim=20000000", "every device holds before it computes anything"),
    ("vocab_size=100000000000", "vocab_size must be at most 2,147,483,647"),
    ("vocab_size=2000000000", "every device holds before it computes anything"),
    ("per_device_batch_size=1e999", "per_device_batch_size must be at most 2,147,483,647"),
    ("per_device_batch_size=100000000", "per_device_batch_size=100000000: a device needs at least"),
    ("batch_size=1000000000", "per_device_batch_size=125000000: a device needs at least"),
    ("gradient_accumulation_steps=1000000000", "the rows of 1,000,000,000 gradient accumulation"),
    ("max_target_length=2000000000", "per_device_batch_size=4: a device needs at least"),
    ("generate_length=100000000", "generate_length must be at least 0 and at most 100000"),
    ("sliding_window_size=1000000000000", "sliding_window_size must be at most 2,147,483,647"),
    ("eval_per_device_batch_size=10000000", "eval_per_device_batch_size=10000000: a device needs"),
    ("steps=10000000000", "steps must be at most 2,147,483,647"),
    ("num_simulated_devices=100000", "num_simulated_devices must be at most 1,024"),
    ("grain_worker_count=5000", "grain_worker_count must be at most 256"),
  ],
)
def test_validate_only_and_the_run_refuse_it_alike(tmp_path, capsys, size, said):
  keys = ["config=base", *KEYS, f"base_output_directory={tmp_path}", "steps=1", size]
  checked = refusal(capsys, train.main, *keys, "validate_only=true")
  assert said in checked
  assert refusal(capsys, train.main, *keys) == checked
  assert not list(tmp_path.iterdir())


def test_a_smaller_size_that_fits_is_named(tmp_path, capsys):
  keys = ["config=base", *KEYS, f"base_output_directory={tmp_path}", "device_memory_gb=0.01"]
  printed = refusal(capsys, train.main, *keys, "validate_only=true", "per_device_batch_size=9000")
  fitting = int(printed.rpartition("at most ")[2].partition(" fit")[0])
  assert 0 < fitting < 9000
  assert train.main([*keys, "validate_only=true", f"per_device_batch_size={fitting}"]) == 0


@pytest.mark.parametrize(
  "mesh",
  [
    ("ici_data_parallelism=-1", "ici_fsdp_parallelism=1"),
    ("ici_data_parallelism=-1", "ici_fsdp_parallelism=2"),
    ("ici_data_parallelism=8", "ici_fsdp_parallelism=1"),
  ],
)
def test_a_division_of_the_weights_that_fits_is_named(tmp_path, capsys, mesh):
  keys = ["config=base", *KEYS, f"base_output_directory={tmp_path}", "device_memory_gb=0.0002"]
  printed = refusal(capsys, train.main, *keys, *mesh, "validate_only=true")
  offered = printed.rpartition("for example ")[2].split()
  assert "ici_fsdp_parallelism=4" in offered
  assert train.main([*keys, *mesh, *offered, "validate_only=true"]) == 0


def test_no_division_of_the_weights_is_named_where_none_is_left(tmp_path, capsys):
  keys = ["config=base", *KEYS, f"base_output_directory={tmp_path}", "device_memory_gb=0.00001"]
  mesh = "ici_data_parallelism=1", "ici_fsdp_parallelism=-1"
  printed = refusal(capsys, train.main, *keys, *mesh, "validate_only=true")
  assert printed.endswith("for example a smaller model, or more devices\n")


@pytest.mark.parametrize(
  ("main", "arguments", "said"),
  [
    (plan_command, ["num_devices=99999999999999"], "num_devices must be at most 1,048,576"),
    (plan_command, ["num_hosts=99999999999999"], "num_hosts must be at most 1,048,576"),
    (
      plan_command,
      ["per_device_batch_size=1e9", "gradient_accumulation_steps=2000000000"],
      "there",
    ),
    (
      pipeline.main,
      [*PIPELINE, "gradient_accumulation_steps=1000000"],
      "are a timetable of 4,000,000 forwards, of which there can be 50,000",
    ),
    (critical_batch.main, ["factors=1," + "9" * 5000], "is not a number"),
  ],
)
def test_other_commands_refuse_it(capsys, main, arguments, said):
  assert said in refusal(
    capsys, main, *(["config=base"] * (main is not critical_batch.main)), *arguments
  )
