"""What it costs and saves that only some hosts load, and what the check of a step's rows costs.

  python scripts/who_loads.py [--hosts 4] [--steps 20]

Starts processes of itself on this machine, with one device each, that train a small model on text
with all, half and a quarter of them loading. The output is a Markdown table: how often each host
opened the file of tokens and read a row of it in a step, and the time of the hand-over beside that of
a step, both begun on idle devices. A second one sets the check of the rows beside the step that it
belongs to, in one process, in seconds of the processor: other programs on the machine change them
little.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.host_loads import loading_hosts
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Arrays, RowSource, first_wrong_row
from maxbatch.training import build

SHAPES = [
  "base_num_decoder_layers=4",
  "base_emb_dim=128",
  "base_mlp_dim=512",
  "base_num_query_heads=4",
  "base_num_kv_heads=4",
  "head_dim=32",
  "max_target_length=128",
  "vocab_size=264",
  "batch_size=32",
]
REST_SECONDS = 0.2
"""Between steps, so that the next rows are there and the devices have nothing else to do."""


@dataclasses.dataclass
class CountedRows:
  """A source that counts the rows that are read."""

  source: RowSource
  count: int = 0

  def __len__(self) -> int:
    return len(self.source)

  def rows(self, indices: np.ndarray) -> Arrays:
    """See `RowSource.rows`."""
    self.count += len(indices)
    return self.source.rows(indices)


@contextlib.contextmanager
def counted_opens(suffix: str) -> Iterator[list[str]]:
  """The files with this ending that Python opens meanwhile."""
  opened: list[str] = []
  active = True

  def hear(event: str, arguments: tuple[object, ...]) -> None:
    if active and event == "open" and str(arguments[0]).endswith(suffix):
      opened.append(str(arguments[0]))

  sys.addaudithook(hear)  # There is no way to remove it.
  try:
    yield opened
  finally:
    active = False


def train(config: Config) -> dict[str, object]:
  """Trains and counts; what this process read and how long it took."""
  devices = jax.devices()
  plan = plan_batches(config.batch, config.run, topology(config.mesh, len(devices)))
  trainer = build.build_trainer(config, plan, devices)
  dataset = build_dataset(config.data, config.batch.max_target_length)
  micro_batch = plan.micro_batch_to_train
  step = build.compiled_step(config, plan, trainer, dataset.train, micro_batch)
  state, microbatches = trainer.init(0), trainer.microbatches(plan.gradient_accumulation_steps)
  source = CountedRows(dataset.train)
  counted = dataclasses.replace(dataset, train=source)
  handing, stepping = [], []
  open_rows = build.train_rows(config, trainer, counted)
  with counted_opens(".tokens") as opened, open_rows(plan, Position(0, 0)) as loader:
    for _ in range(plan.steps):
      time.sleep(REST_SECONDS)
      began = time.perf_counter()
      rows = jax.block_until_ready(next(loader))
      handed = time.perf_counter()
      state, _ = jax.block_until_ready(step(state, rows, microbatches, np.float32(0)))
      handing.append(handed - began)
      stepping.append(time.perf_counter() - handed)
  loading = loading_hosts(plan, len(devices)) or tuple(range(len(devices)))
  return {
    "loading": len(loading),
    "opens": len(opened),
    "rows_per_step": source.count / plan.steps,
    "hand_over_ms": statistics.median(handing) * 1e3,
    "step_ms": statistics.median(stepping) * 1e3,
  }


def check_cost(config: Config, rounds: int) -> dict[str, float]:
  """Returns processor seconds of a step, and of the check of its rows, were they sent by other hosts."""
  devices = jax.devices()
  plan = plan_batches(config.batch, config.run, topology(config.mesh, len(devices)))
  trainer = build.build_trainer(config, plan, devices)
  dataset = build_dataset(config.data, config.batch.max_target_length)
  step = build.compiled_step(config, plan, trainer, dataset.train, plan.micro_batch_to_train)
  with build.train_rows(config, trainer, dataset)(plan, Position(0, 0)) as loader:
    rows = jax.block_until_ready(next(loader))
  check = jax.jit(first_wrong_row)
  microbatches = trainer.microbatches(plan.gradient_accumulation_steps)
  state = jax.block_until_ready(trainer.init(0))
  sent = rows._replace(checksums=jnp.zeros(rows.sample_ids.shape, np.uint32))
  jax.block_until_ready(check(sent))
  checking, stepping = [], []
  for _ in range(rounds):
    began = time.process_time()
    jax.block_until_ready([check(sent) for _ in range(100)])
    checking.append((time.process_time() - began) / 100)
    began = time.process_time()
    state, _ = jax.block_until_ready(step(state, rows, microbatches, np.float32(0)))
    stepping.append(time.process_time() - began)
  return {"check": statistics.median(checking), "step": statistics.median(stepping)}


def configurations(folder: str, hosts: int, steps: int) -> list[Config]:
  """The same training with all hosts loading, then with fewer and fewer."""
  text = pathlib.Path(folder, "text")
  paths = [f"dataset_path={text}", f"dataset_cache_directory={folder}", "dataset_type=text"]
  factors = [-1, *(2**n for n in range(1, hosts.bit_length()) if 2**n <= hosts)]
  return [
    load_config(
      ["config=base", *SHAPES, *paths, f"steps={steps}", f"expansion_factor_real_data={factor}"]
    )
    for factor in factors
  ]


def process(folder: str, hosts: int, steps: int, number: int, port: int) -> None:
  """One of the processes."""
  jax.config.update("jax_num_cpu_devices", 1)
  jax.distributed.initialize(f"localhost:{port}", hosts, number)
  for config in configurations(folder, hosts, steps):
    print(json.dumps(train(config)), flush=True)
  jax.distributed.shutdown()


def several(folder: str, hosts: int, steps: int) -> Iterator[str]:
  """The table of the processes."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  own = [sys.executable, __file__, "--hosts", str(hosts), "--steps", str(steps)]
  outputs = [pathlib.Path(folder, f"said-{number}") for number in range(hosts)]
  started = []
  for number, output in enumerate(outputs):
    command = [*own, "--folder", folder, "--number", str(number), "--port", str(port)]
    with output.open("w") as file:
      started.append(subprocess.Popen(command, stdout=file))
  codes = [one.wait() for one in started]
  if any(codes):
    raise SystemExit(f"exit codes {codes}")
  said = [
    [json.loads(line) for line in output.read_text().splitlines() if line[:1] == "{"]
    for output in outputs
  ]
  yield "| hosts that load | opens per host | rows read per host and step | hand-over, ms | step, ms |"
  yield "|---|---|---|---|---|"
  for runs in zip(*said, strict=True):
    opens, rows = ([run[name] for run in runs] for name in ("opens", "rows_per_step"))
    times = [max(run[name] for run in runs) for name in ("hand_over_ms", "step_ms")]
    cells = [f"{runs[0]['loading']} of {hosts}", _listed(opens), _listed(rows)]
    yield f"| {' | '.join([*cells, *(f'{each:.1f}' for each in times)])} |"


def _listed(numbers: Sequence[float]) -> str:
  return ", ".join(f"{number:.0f}" for number in numbers)


def main() -> None:
  """Parses the arguments and prints the tables."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--hosts", type=int, default=4)
  parser.add_argument("--steps", type=int, default=20)
  parser.add_argument("--folder", help=argparse.SUPPRESS)
  parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
  given = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  if given.folder:
    process(given.folder, given.hosts, given.steps, given.number, given.port)
    return
  with tempfile.TemporaryDirectory() as folder:
    text = "".join(f"the number {n} follows {n - 1}\n" for n in range(200_000))
    pathlib.Path(folder, "text").write_text(text)
    config, *_ = configurations(folder, 1, given.steps)
    build_dataset(config.data, config.batch.max_target_length)
    print("\n".join(several(folder, given.hosts, given.steps)))
    cost = check_cost(config, given.steps)
    print("\n| check of the rows, processor ms | step, processor ms | share |\n|---|---|---|")
    check, step = cost["check"] * 1e3, cost["step"] * 1e3
    print(f"| {check:.3f} | {step:.1f} | {check / step:.3%} |")


if __name__ == "__main__":
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  main()
