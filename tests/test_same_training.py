"""The same training in 1, 2 and 4 processes, and from one number of them to another."""

import pathlib
import shutil
import sys

import numpy as np
import pytest
from processes import small_run
from several_processes import records, start, wait

RUNS = [sys.executable, str(pathlib.Path(__file__).with_name("many_runs.py"))]
COMMON = "num_simulated_devices=4 eval_interval=2 checkpoint_period=2 metrics_writers=[jsonl]"
FUSED = (
  "batch_size=-1 batch_schedule=[[0,16],[48,32]] per_device_batch_size=2 dropout_rate=0.1 "
  "num_experts=4 base_moe_mlp_dim=8 routed_bias=true load_balance_loss_weight=0.1 "
  "load_balance_loss_type=last_step"
)
"""A mixture of experts, so that biases and loads move with the run too."""
CASES = {
  "pipeline": "batch_size=8 pipeline_schedule=1f1b ici_pipeline_parallelism=4 "
  "num_pipeline_microbatches=4 base_num_decoder_layers=4",
  "streamed": "batch_size=8 accumulation=streamed gradient_accumulation_steps=2 "
  "ici_tensor_parallelism=2 gns=norm precision=float16 initial_loss_scale=16777216 "
  "loss_scale_backoff_factor=0.001 eval_fraction=0",
  # Short rows, of which each says little: their noise scale is above the batch.
  "steered": "steps=-1 total_samples=72 schedule_unit=samples eval_fraction=0 checkpoint_period=96 "
  "batch_schedule=gns gns=all gns_window_steps=8 gns_windows_before_growth=1 gns_hold_tokens=0 "
  "batch_size=4 per_device_batch_size=1 max_target_length=4 learning_rate=1e-3 warmup_steps=0 "
  "init_weights_seed=2",
  # Rows of which each process has half, with documents that the processes share.
  "shared": "batch_size=8 per_device_batch_size=1/2 ici_context_parallelism=4 gns=norm",
  # Two rows on each of 4 devices, the last of which has nothing but padding.
  "padded": "batch_size=6 pad_batch=true dropout_rate=0.1 num_experts=4 base_moe_mlp_dim=8 "
  "load_balance_loss_weight=0.1 load_balance_loss_type=last_step gns_from_microbatches=true",
}
"""What each run adds to the common keys."""
UNSAVED = "enable_checkpointing=false"
"""Their parameters are kept beside their folders."""
OF = {1: list(CASES), 2: ["streamed", "steered", "shared", "padded"], 4: ["pipeline"]}
"""The runs of so many processes; a fused one goes from one number of them to another."""

LOADING = {
  4: "expansion_factor_real_data=2 loading_hosts=[1,3]",
  2: "expansion_factor_real_data=2 loading_hosts=[1]",
}
"""Who reads in several processes; in one that saves none reads for another."""


def line(folder: pathlib.Path, name: str, keys: str, steps: int) -> str:
  paths = f"base_output_directory={folder} run_name={name}"
  return f"{paths} steps={steps} {COMMON} {keys}\n"


def run_lines(count: int, folder: pathlib.Path, shared: list[str], lines: list[str]) -> None:
  """Trains the runs of these lines in `count` processes."""
  file = folder / f"runs-of-{count}.txt"
  file.write_text("".join(lines))
  ended = wait(start(count, [str(file), *shared], command=RUNS))
  assert [process.exit_code for process in ended] == [0] * count, ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
  """A folder of runs for each number of processes; `chain` went from one process to 4 and to 2."""
  folder = tmp_path_factory.mktemp("runs")
  shared = small_run(folder, folder / "words.txt", folder / "cache")
  places = {count: folder / str(count) for count in (1, 2, 4)}
  lines = {
    count: [line(places[count], name, f"{CASES[name]} {UNSAVED}", 4) for name in names]
    for count, names in OF.items()
  }
  one_mesh = f"{FUSED} ici_fsdp_parallelism=2 ici_expert_parallelism=2"
  other_mesh = f"{FUSED} ici_expert_parallelism=4"
  divides = f"{CASES['padded']} pad_batch=false ici_tensor_parallelism=2"
  lines[1] += [
    line(places[1], "divides", f"{divides} {UNSAVED}", 4),
    line(places[1], "undisturbed", one_mesh, 6),
    line(places[1], "chain", one_mesh, 2),
  ]
  run_lines(1, folder, shared, lines[1])
  shutil.move(places[1] / "chain", places[4] / "chain")
  run_lines(4, folder, shared, [*lines[4], line(places[4], "chain", f"{one_mesh} {LOADING[4]}", 4)])
  shutil.copytree(places[4] / "chain", places[1] / "alone")
  shutil.move(places[4] / "chain", places[2] / "chain")
  lines[2].append(line(places[2], "chain", f"{other_mesh} {LOADING[2]}", 6))
  run_lines(2, folder, shared, lines[2])
  run_lines(1, folder, shared, [line(places[1], "alone", one_mesh, 6)])
  return folder


def parameters(path: pathlib.Path) -> list[np.ndarray]:
  with np.load(path) as arrays:
    return list(arrays.values())


def assert_same(
  one: pathlib.Path, other: pathlib.Path, *, exactly: bool, but: tuple[str, ...] = ()
) -> None:
  """That two runs are one: in what they recorded, but for these names, and in their parameters."""
  ours, theirs = (
    [{name: x for name, x in each.items() if not name.startswith(but)} for each in records(run)]
    for run in (one, other)
  )
  assert len(ours) == len(theirs) > 4
  for mine, its in zip(ours, theirs, strict=True):
    assert mine == pytest.approx(its, rel=1e-6, abs=1e-6)
  pairs = zip(
    *(parameters(path.with_name(f"{path.name}.npz")) for path in (one, other)), strict=True
  )
  for mine, its in pairs:
    np.testing.assert_allclose(mine, its, rtol=0, atol=0 if exactly else 1e-6)


@pytest.mark.parametrize(("name", "count"), [(name, n) for n in (2, 4) for name in OF[n]])
def test_several_processes_train_as_one(trained, name, count):
  assert_same(trained / "1" / name, trained / str(count) / name, exactly=True)


def test_a_padded_batch_trains_as_one_that_divides(trained):
  """Noise of microbatches is of others, where they are others."""
  but = ("micro_batch_to_train", "gns/")
  assert_same(trained / "1" / "divides", trained / "1" / "padded", exactly=False, but=but)


def test_the_batch_follows_the_noise_scale(trained):
  """In the runs that are compared: else they would show nothing."""
  assert [one["global_batch_to_train"] for one in records(trained / "2" / "steered")[-3:]] == [
    8
  ] * 3


def test_the_batch_grows_in_4_processes(trained):
  """In the run that changes processes: else it would not show that rows follow a schedule."""
  sizes = [one.get("global_batch_to_train") for one in records(trained / "2" / "chain")]
  assert sizes == [None, 16, 16, 16, 32, 32, 32]


def test_steps_are_skipped(trained):
  """In the runs that are compared: else they would show nothing of the loss scale."""
  assert [one.get("skipped_steps") for one in records(trained / "2" / "streamed")] == [
    None,
    *(1, 2, 2, 2),
  ]


def test_a_run_goes_from_one_process_to_4_and_to_2_on_another_mesh_with_other_hosts_reading(
  trained,
):
  assert_same(trained / "1" / "undisturbed", trained / "2" / "chain", exactly=False)


def test_what_4_processes_saved_goes_on_in_one(trained):
  assert_same(trained / "1" / "undisturbed", trained / "1" / "alone", exactly=True)
