"""Compares pipelines on 4 simulated devices: memory by microbatches, speed, compile time.

  python scripts/compare_pipeline.py [--microbatches 4 8 16 32] [--rounds 2] [--peer COMMAND]

Every microbatch has 2 rows of 256 tokens, so that more of them are a larger batch. COMMAND is a
shell command that trains the same model for a few steps, with {per_device}, {microbatches} and
{layers} (of a stage in one repeat) filled in. Of its output these are read, the second and third
as jax prints them where JAX_LOG_COMPILES is set:
  temporary bytes: N                                    memory_analysis() of its compiled step
  Finished XLA compilation of jit(…step…) in S sec
  completed step: N, seconds: S

Each program runs in a process of its own, in turn; the output is Markdown tables. The model: 8
layers, width 256, 8 heads of 32, feed-forward 1024, float32, remat_policy=full.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

STAGES, LAYERS, ROWS, LENGTH, WARM_UP = 4, 8, 2, 256, 2
SHAPES = {
  "base_num_decoder_layers": LAYERS,
  "base_emb_dim": 256,
  "base_mlp_dim": 1024,
  "base_num_query_heads": 8,
  "base_num_kv_heads": 8,
  "head_dim": 32,
  "max_target_length": LENGTH,
  "vocab_size": 260,
  "remat_policy": "full",
}
OWN = {
  "gpipe": {"pipeline_schedule": "gpipe"},
  "circular, 2 repeats": {"pipeline_schedule": "circular", "num_pipeline_repeats": 2},
  "1f1b": {"pipeline_schedule": "1f1b"},
  "1f1b, residuals": {"pipeline_schedule": "1f1b", "pipeline_saved_activations": "residuals"},
  "interleaved_1f1b, 2 repeats": {
    "pipeline_schedule": "interleaved_1f1b",
    "num_pipeline_repeats": 2,
  },
}
PEER = {"peer, 1 repeat": 2, "peer, 2 repeats": 1}
"""Layers of a stage in one repeat."""
TEMPORARY = re.compile(r"temporary bytes: (\d+)")
COMPILED = re.compile(r"Finished XLA compilation of jit\(\w*step\w*\) in ([\d.]+) sec")
STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+)")


@dataclasses.dataclass(frozen=True)
class Measured:
  """One program: bytes of temporary memory, seconds to compile, and seconds of a step."""

  temporary: int
  compiling: float
  step: float


def own(microbatches: int, keys: dict[str, object]) -> Measured:
  """The figures of one of our schedules, from the report of compile_only."""
  with tempfile.TemporaryDirectory() as folder:
    values = SHAPES | {
      "num_simulated_devices": STAGES,
      "ici_pipeline_parallelism": STAGES,
      "num_pipeline_microbatches": microbatches,
      "per_device_batch_size": microbatches * ROWS / STAGES,
      "dataset_type": "synthetic",
      "packing": "false",
      "compile_only": "true",
      "jax_cache_dir": "none",
      "base_output_directory": folder,
      "run_name": "one",
    }
    given = [f"{key}={value}" for key, value in (values | keys).items()]
    text = output([sys.executable, "-m", "maxbatch.train", "config=base", *given])
    report = json.loads((pathlib.Path(folder) / "one" / "compile_report.json").read_text())[0]
  return Measured(
    report["memory_bytes_per_device"]["activations_and_temporaries"],
    _compiling(text) or report["compile_seconds"],
    report["time"]["step_seconds"],
  )


def peer(command: str, microbatches: int, layers: int) -> Measured:
  """The figures of the peer, from the output of its run."""
  per_device = microbatches * ROWS / STAGES
  text = output(command.format(per_device=per_device, microbatches=microbatches, layers=layers))
  steps = [float(seconds) for number, seconds in STEP.findall(text) if int(number) >= WARM_UP]
  result = TEMPORARY.search(text)
  if not (result and steps):
    raise SystemExit(f"the peer printed no steps or no bytes:\n{text[-2000:]}")
  return Measured(int(result[1]), _compiling(text), statistics.median(steps))


def output(command: Sequence[str] | str) -> str:
  """What a command prints, on both streams."""
  done = subprocess.run(
    command,
    shell=isinstance(command, str),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  if done.returncode:
    raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}")
  return done.stdout


def _compiling(text: str) -> float:
  return sum(map(float, COMPILED.findall(text)))


def main() -> None:
  """Measures and prints three tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32])
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument("--peer", help="the peer's shell command")
  options = parser.parse_args()
  results: dict[tuple[str, int], list[Measured]] = {}
  for _ in range(options.rounds):
    for count in options.microbatches:
      for name, measured in _programs(options.peer, count):
        results.setdefault((name, count), []).append(measured)
        print(f"{name}, {count} microbatches: {measured}", file=sys.stderr, flush=True)
  print("\n\n".join(_tables(results, options.microbatches)))


def _programs(command: str | None, microbatches: int) -> Iterator[tuple[str, Measured]]:
  for name, keys in OWN.items():
    yield name, own(microbatches, dict(keys))
  for name, layers in PEER.items() if command else ():
    yield name, peer(command or "", microbatches, layers)


def _tables(results: dict[tuple[str, int], list[Measured]], counts: Sequence[int]) -> Iterator[str]:
  names = list(dict.fromkeys(name for name, _ in results))
  columns = {
    "temporary memory, MiB": lambda measured, count: f"{measured.temporary / 2**20:.1f}",
    "tokens per second": lambda measured, count: f"{count * ROWS * LENGTH / measured.step:,.0f}",
    "compiling, s": lambda measured, count: f"{measured.compiling:.1f}",
  }
  for title, text in columns.items():
    lines = [f"| {title} | {' | '.join(f'm = {count}' for count in counts)} |"]
    lines.append("|---" * (1 + len(counts)) + "|")
    for name in names:
      cells = [text(_median(results[name, count]), count) for count in counts]
      lines.append(f"| {name} | {' | '.join(cells)} |")
    yield "\n".join(lines)


def _median(rounds: Sequence[Measured]) -> Measured:
  """The median of each figure."""
  figures = zip(*(dataclasses.astuple(each) for each in rounds), strict=True)
  return Measured(*(statistics.median(values) for values in figures))


if __name__ == "__main__":
  main()
