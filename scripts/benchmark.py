"""Measures how fast maxbatch trains, as ratios of programs that run side by side.

  python scripts/benchmark.py [--devices 1 8] [--accumulation 1 4] [--rounds 5] [--peer COMMAND]
    [--cache FOLDER] [--experts 8] [--tables inside noise runs]

Inside one process, in turn (so that a slow period of the machine affects all of them):
  step / plain   the compiled step against scripts/plain_step.py, the same model in plain JAX
  loop / step    the training loop against the bare compiled step
  16 / parts     accumulation of 16 against 16 times one forward/backward plus one update
  norm / off     the step with gns=norm against the step without, in time and in memory by the
  all / off      compiler (arguments and temporaries); the same for gns=all
Against a peer, each a process of its own, in turns: tokens per second, and seconds from process
start to the first finished step. COMMAND is a shell command in which {devices}, {per_device},
{accumulation}, {steps} and {cache} are filled in, and which prints `completed step: N, seconds: S`.
Without --cache our program is compiled at every start, and {cache} is an empty folder each time.
With it both keep compiled programs below FOLDER, and the first start of each is not counted.

The shapes: 6 layers, width 256, 8 heads of 32, feed-forward 1024, 256 tokens a row, 16 rows a
microbatch, float32. With --experts, beside a peer: so many of width 512 in place of the feed-forward
layer, two for each token, and a balance loss. Run it with the environment that scripts/train.sh sets, or without.
"""

import argparse
import dataclasses
import io
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_step
from jax.sharding import NamedSharding, PartitionSpec

from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.registry import build_dataset
from maxbatch.hardware.devices import find_devices
from maxbatch.models.registry import Parameters
from maxbatch.run_folder.metrics import MetricsLog, Record, read_metrics
from maxbatch.run_folder.progress import Progress
from maxbatch.training import build
from maxbatch.training.job import Evaluation, Hooks, Job, Outputs, Profiler
from maxbatch.training.loop import train
from maxbatch.training.loss import loss_sum
from maxbatch.training.noise_run import StepPrograms
from maxbatch.training.step import Step

ROWS, LENGTH = 16, 256
SHAPES = {
  "base_num_decoder_layers": 6,
  "base_emb_dim": 256,
  "base_mlp_dim": 1024,
  "base_num_query_heads": 8,
  "base_num_kv_heads": 8,
  "head_dim": 32,
  "max_target_length": LENGTH,
  "vocab_size": 260,
}
MIXTURE = {"num_experts_per_tok": 2, "base_moe_mlp_dim": 512, "load_balance_loss_weight": 0.01}
PEER_STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")
OWN_STEP = re.compile(r"^step (\d+)/")
WARM_UP = 3


def arguments(devices: int, accumulation: int, **keys: object) -> list[str]:
  """The command line of a run of these shapes."""
  values = SHAPES | {
    "num_simulated_devices": devices,
    "per_device_batch_size": ROWS // devices,
    "gradient_accumulation_steps": accumulation,
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "generate_length": 0,
    "eval_fraction": 0,  # The peer evaluates nothing, neither before the first step nor later.
    "log_period": 1,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (values | keys).items())]


@dataclasses.dataclass(frozen=True)
class Bench:
  """One configuration, ready to be timed."""

  config: Config
  plan: BatchPlan
  trainer: build.Trainer

  @classmethod
  def of(cls, devices: int, **keys: object) -> "Bench":
    """The configuration, prepared as a run of the command prepares it."""
    return cls.configured(load_config(arguments(devices, 1, packing="false", **keys)))

  @classmethod
  def configured(cls, config: Config) -> "Bench":
    """Any configuration, likewise."""
    target = find_devices(config)
    plan = plan_batches(config.batch, config.run, target.layout)
    return cls(config, plan, build.build_trainer(config, plan, target.devices))

  @property
  def length(self) -> int:
    """Tokens of a row."""
    return self.config.batch.max_target_length

  def fresh(self):
    """A new state."""
    return self.trainer.init(0)


def _compiled(bench: Bench) -> Step:
  source = build_dataset(bench.config.data, bench.length).train
  micro_batch = bench.plan.micro_batch_to_train
  return build.compiled_step(bench.config, bench.plan, bench.trainer, source, micro_batch)


def seconds_per_step(run: Callable[[int], object], steps: int) -> float:
  """Mean over `steps` steps that are dispatched without waiting for each other."""
  began = time.perf_counter()
  jax.block_until_ready(run(steps))
  return (time.perf_counter() - began) / steps


def bare_runner(bench: Bench, num_microbatches: int) -> Callable[[int], object]:
  """The compiled step over and over on one batch."""
  dataset = build_dataset(bench.config.data, bench.length)
  step = _compiled(bench)
  with build.train_rows(bench.config, bench.trainer, dataset)(bench.plan, Position(0, 0)) as loader:
    rows = next(loader)
  held = [bench.fresh()]

  def run(steps: int) -> object:
    metrics = None
    for _ in range(steps):
      held[0], metrics = step(held[0], rows, np.int32(num_microbatches), np.float32(1e-3))
    return metrics

  return run


class _FromFirstStep(Hooks):
  """Notes when the devices have ended the first step and nothing is under way, and when each later one."""

  began = ended = 0.0

  def publish(self, position: Position, params: Parameters) -> None:
    if position.step == 1:
      jax.block_until_ready(params)
      self.began = time.perf_counter()

  def completed(self, record: Record) -> Record:
    self.ended = time.perf_counter()
    return record


def loop_runner(bench: Bench) -> Callable[[int], float]:
  """The training loop as the command runs it: loader, metrics, files. Seconds per step after the first.

  By no figure of the loop's own, and as those of the bare step: from idle devices to idle devices.
  """
  config, plan, trainer = bench.config, bench.plan, bench.trainer
  dataset = build_dataset(config.data, bench.length)
  step = _compiled(bench)

  def run(steps: int) -> float:
    short_run = dataclasses.replace(config.run, steps=steps)
    short = plan_batches(config.batch, short_run, plan.topology)
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
      folder = pathlib.Path(name)
      with (
        MetricsLog(folder, 0) as log,
        Progress(0, steps, 1) as progress,
        StepPrograms(lambda micro_batch: step, plan.micro_batches) as programs,
      ):
        job = Job(
          plan=short,
          run=config.run,
          checkpoint=config.checkpoint,
          learning_rate=learning_rate(config.optimizer, short, "steps"),
          programs=programs,
          trainer=trainer,
          train_rows=build.train_rows(config, trainer, dataset),
          row_hosts=build.row_hosts(trainer, bench.plan),
          evaluation=Evaluation(None, ()),
          outputs=Outputs(log, progress, Profiler(config.profiling, folder, 0), None),
          hooks=(hooks := _FromFirstStep()),
        )
        train(job, bench.fresh(), Position(0, 0))
    return (hooks.ended - hooks.began) / (steps - 1)

  return run


def plain_runner(bench: Bench, dtype: str = "float32") -> Callable[[int], object]:
  """The hand-written step, its batch divided over the devices."""
  model, mesh = bench.config.model, bench.trainer.mesh
  whole, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
  params = plain_step.init(model, jax.random.key(0))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state = jax.device_put((params, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(())), whole)
  shape = (bench.plan.micro_batch_to_train, bench.length + 1)
  tokens = jax.random.randint(jax.random.key(1), shape, 0, 256)
  fed = jax.device_put((tokens[:, :-1], tokens[:, 1:]), by_rows)
  function = jax.jit(
    lambda state, x, y: plain_step.step(model, state, x, y, 1e-3, dtype),
    donate_argnums=0,
    out_shardings=whole,
  )
  held = [state]

  def run(steps: int) -> object:
    value = None
    for _ in range(steps):
      held[0], value = function(held[0], *fed)
    return value

  return run


def parts_runners(bench: Bench) -> tuple[Callable[[int], object], Callable[[int], object]]:
  """One forward/backward of a microbatch, and one update, each alone."""
  model, optimizer = bench.trainer.model, bench.trainer.optimizer
  dataset = build_dataset(bench.config.data, bench.length)
  with build.train_rows(bench.config, bench.trainer, dataset)(bench.plan, Position(0, 0)) as loader:
    rows = jax.tree.map(lambda x: x[0], next(loader))
  key = bench.trainer.dropout_key
  gradient = jax.jit(jax.value_and_grad(lambda params: loss_sum(model, params, rows, key)))

  def update(params, opt_state, gradients):
    updates, opt_state = optimizer.update(
      gradients, opt_state, params, jnp.float32(1e3), learning_rate=1e-3
    )
    return optax.apply_updates(params, updates), opt_state

  apply = jax.jit(update, donate_argnums=(0, 1))
  state = bench.fresh()
  gradients = gradient(bench.fresh().params)[1]
  held = [(state.params, state.opt_state)]
  params = bench.fresh().params

  def run_gradient(steps: int) -> object:
    out = None
    for _ in range(steps):
      out = gradient(params)
    return out

  def run_update(steps: int) -> object:
    for _ in range(steps):
      held[0] = apply(*held[0], gradients)
    return held[0]

  return run_gradient, run_update


def inside(devices: int, rounds: int, scan: bool) -> dict[str, list[float]]:
  """The ratios of the first table, one value a round."""
  bench = Bench.of(devices, scan_layers=str(scan).lower())
  bare, plain, loop = bare_runner(bench, 1), plain_runner(bench), loop_runner(bench)
  # Small microbatches: 16 of them in one step, and the cost of the update shows.
  small = Bench.of(
    devices,
    scan_layers=str(scan).lower(),
    per_device_batch_size=max(4 // devices, 1),
    gradient_accumulation_steps=16,
  )
  sixteen = bare_runner(small, 16)
  gradient, update = parts_runners(small)
  results: dict[str, list[float]] = {"step / plain": [], "loop / step": [], "16 / parts": []}
  for number in range(rounds + 1):
    step_time = seconds_per_step(bare, 4)
    plain_time = seconds_per_step(plain, 4)
    loop_time = loop(5)
    step_again = seconds_per_step(bare, 4)
    sixteen_time = seconds_per_step(sixteen, 1)
    parts_time = 16 * seconds_per_step(gradient, 8) + seconds_per_step(update, 4)
    if number:  # the first round warms up
      results["step / plain"].append((step_time + step_again) / 2 / plain_time)
      results["loop / step"].append(loop_time / ((step_time + step_again) / 2))
      results["16 / parts"].append(sixteen_time / parts_time)
  return results


def noise(devices: int, rounds: int, scan: bool) -> dict[str, list[float]]:
  """The cost of measuring the noise scale in the step: ratios in time, one a round, and memory."""
  return noise_ratios(
    lambda mode: Bench.of(devices, gns=mode, scan_layers=str(scan).lower()), rounds
  )


def noise_ratios(bench_of: Callable[[str], Bench], rounds: int) -> dict[str, list[float]]:
  """The same for the benches of the modes off, norm and all."""
  benches = {mode: bench_of(mode) for mode in ("off", "norm", "all")}
  runners = {mode: bare_runner(bench, 1) for mode, bench in benches.items()}
  held = {mode: held_bytes(bench) for mode, bench in benches.items()}
  results: dict[str, list[float]] = {}
  for number in range(rounds + 1):
    times = {mode: seconds_per_step(run, 4) for mode, run in runners.items()}
    times["off"] = (times["off"] + seconds_per_step(runners["off"], 4)) / 2
    for mode in ("norm", "all"):
      if number:  # the first round warms up
        results.setdefault(f"{mode} / off", []).append(times[mode] / times["off"])
      results[f"{mode} / off, memory"] = [held[mode] / held["off"]]
  return results


def held_bytes(bench: Bench) -> int:
  """Bytes of the compiled step's arguments and temporaries, by the compiler."""
  memory = cast(jax.stages.Compiled, _compiled(bench)).memory_analysis()
  assert memory is not None
  return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def lines_with_times(command: Sequence[str] | str) -> Iterator[tuple[float, str]]:
  """A command's output lines, each with the seconds since its start."""
  began = time.perf_counter()
  process = subprocess.Popen(
    command,
    shell=isinstance(command, str),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert process.stdout is not None
  for line in process.stdout:
    yield time.perf_counter() - began, line
  if process.wait():
    raise SystemExit(f"{command} failed with exit code {process.returncode}")


Timed = tuple[float, float, float]
"""Tokens per second in the median and in the best step; seconds to the first finished step."""


def run_own(devices: int, accumulation: int, steps: int, **keys: object) -> Timed:
  """One run of the command itself."""
  with tempfile.TemporaryDirectory() as folder:
    keys = keys | {"base_output_directory": folder, "steps": steps}
    command = [sys.executable, "-m", "maxbatch.train", *arguments(devices, accumulation, **keys)]
    first = 0.0
    for at, line in lines_with_times(command):
      match = OWN_STEP.match(line)
      if match and int(match[1]) == 1:
        first = at
    records = read_metrics(pathlib.Path(folder) / "first_run")
  speeds = [record["tokens_per_second"] for record in records[1 + WARM_UP :]]
  return statistics.median(speeds), max(speeds), first


def run_peer(command: str, devices: int, accumulation: int, steps: int, cache: str) -> Timed:
  """One run of the peer, with its programs kept in `cache`; empty: in a folder made for it."""
  first, seconds = 0.0, []
  with tempfile.TemporaryDirectory() as empty:
    filled = command.format(
      devices=devices,
      per_device=ROWS // devices,
      accumulation=accumulation,
      steps=steps,
      cache=cache or empty,
    )
    for at, line in lines_with_times(filled):
      if match := PEER_STEP.search(line):
        first = first or at
        if int(match[1]) >= WARM_UP:
          seconds.append(float(match[2]))
  tokens = ROWS * LENGTH * accumulation
  return tokens / statistics.median(seconds), tokens / min(seconds), first


def spread(values: Sequence[float]) -> str:
  """Median with the range."""
  return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
  """Measures and prints Markdown tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
  parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=10, help="steps of a run beside the peer")
  parser.add_argument("--peer", help="the peer's shell command")
  parser.add_argument("--scan", action="store_true", help="scan over layers, for all of ours")
  parser.add_argument("--experts", type=int, default=1, help="of a mixture, beside the peer")
  parser.add_argument("--cache", default="", help="where both keep compiled programs; else nowhere")
  names = ("inside", "noise", "runs")
  parser.add_argument("--tables", nargs="+", choices=names, default=names, help="of these alone")
  parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
  parser.add_argument("--noise", type=int, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.inside:
    print(json.dumps(inside(options.inside, options.rounds, options.scan)))
    return
  if options.noise:
    print(json.dumps(noise(options.noise, options.rounds, options.scan)))
    return
  for name in options.tables:
    if name == "runs":
      peer_table(options)
    else:
      table(name, options)


def table(kind: str, options: argparse.Namespace) -> None:
  """One process per number of devices, as jax can only simulate one at a time."""
  for number, devices in enumerate(options.devices):
    command = [sys.executable, __file__, f"--{kind}", str(devices), "--rounds", str(options.rounds)]
    command += ["--scan"] if options.scan else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    if number == 0:
      print(f"| devices | {' | '.join(result)} |\n{'|---' * (1 + len(result))}|")
    print(f"| {devices} | " + " | ".join(spread(result[key]) for key in result) + " |", flush=True)
  print()


def peer_table(options: argparse.Namespace) -> None:
  """Prints the table of whole processes, ours and the peer's in turn."""
  measures = ("tokens/s, median step", "tokens/s, best step", "s to step 1")
  heads = " | ".join(f"ours: {measure} | peer | ratio" for measure in measures)
  print(f"| devices | accumulation | {heads} |\n|{'---|' * 11}")
  ours, theirs = (options.cache and f"{options.cache}/{side}" for side in ("ours", "peer"))
  keys = {"scan_layers": str(options.scan).lower(), "jax_cache_dir": ours or "none"}
  if options.experts > 1:
    keys |= {"num_experts": options.experts, **MIXTURE}
  rounds, cold = max(options.rounds // 2, 1), int(bool(options.cache))
  for devices in options.devices:
    for accumulation in options.accumulation:
      own, peer = [], []
      for _ in range(cold + rounds):
        own.append(run_own(devices, accumulation, options.steps, **keys))
        if options.peer:
          peer.append(run_peer(options.peer, devices, accumulation, options.steps, theirs))
      print(f"| {devices} | {accumulation} | {_columns(own[cold:], peer[cold:])} |", flush=True)


def _columns(own: list[Timed], peer: list[Timed]) -> str:
  """Both sides and their ratio: medians over the rounds, or the best where the best is asked for.

  On a shared machine the best step says most about the program.
  """
  columns = []
  reduce = (statistics.median, max, min)
  for index, form in enumerate(("{:,.0f}", "{:,.0f}", "{:.1f}")):
    ours = reduce[index](each[index] for each in own)
    columns.append(form.format(ours))
    if peer:
      theirs = reduce[index](each[index] for each in peer)
      columns += [form.format(theirs), f"{ours / theirs:.2f}"]
    else:
      columns += ["-", "-"]
  return " | ".join(columns)


if __name__ == "__main__":
  main()
