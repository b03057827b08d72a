"""Figures in pages of what the TPU compiler says of a few configurations: memory, time, utilisation.

    .venv/bin/python scripts/compiled_tables.py noise    # one of TABLES or PRINTED; minutes for each row

Each row is `compile_only=true` with its keys. Reports stay in runs/compiled_tables, by the newest commit of
the code, by the compiler and by the keys: what was interrupted goes on where it was, and a step of several
tables is compiled once. `reports` also puts its reports into docs/reports.
"""

import hashlib
import importlib.metadata
import itertools
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GB, GIB = 10**9, 2**30
OUT = pathlib.Path("runs/compiled_tables")
REPORTS = pathlib.Path("docs/reports")
CODE = ("maxbatch", "configs")
_FSDP = "dtype=bfloat16 ici_data_parallelism=1 ici_fsdp_parallelism=-1"
_LLAMA = "model_name=llama2-7b max_target_length=2048 dtype=bfloat16 remat_policy=full"
_SLICE = f"{_LLAMA} compile_topology=v5e-16"
_4_STAGES = (
  f"{_SLICE} packing=false ici_pipeline_parallelism=4 ici_fsdp_parallelism=4 ici_data_parallelism=1"
)
_STAGES = (
  f"{_4_STAGES} per_device_batch_size=1 gradient_accumulation_steps=4 num_pipeline_microbatches=4"
)
_RESIDUALS = "pipeline_schedule=1f1b pipeline_saved_activations=residuals"
_TWICE = (
  "pipeline_schedule=interleaved_1f1b num_pipeline_repeats=2 pipeline_saved_activations=residuals"
)
_EACH_LAYER = _TWICE.replace("repeats=2", "repeats=8")
_SLICES = (
  f"{_SLICE} compile_topology_num_slices=4 packing=false per_device_batch_size=1 ici_data_parallelism=1 \
ici_fsdp_parallelism=16 gradient_accumulation_steps=4"
)
_NOISE = f"{_SLICE} ici_fsdp_parallelism=16 per_device_batch_size=1 gradient_accumulation_steps=2"
_FORMATS = (
  "model_name=llama2-7b compile_topology=v5e-256 max_target_length=2048 per_device_batch_size=4 \
ici_data_parallelism=1 ici_fsdp_parallelism=-1 remat_policy=full"
)
_OFFLOADED = "decoder_layer_input=offload query_proj=offload key_proj=offload value_proj=offload"

_70B = "base_num_decoder_layers=80 base_emb_dim=8192 base_mlp_dim=28672 base_num_query_heads=64 \
base_num_kv_heads=8"


def _case(model: str, place: str, size: int, length: int, keys: str = "remat_policy=full") -> str:
  return (
    f"{_FSDP} model_name={model} compile_topology={place} per_device_batch_size={size} "
    f"max_target_length={length} {keys}"
  )


_TWO = "gradient_accumulation_steps=2"
_BFLOAT16_WEIGHTS = "remat_policy=full weight_dtype=bfloat16 weight_rounding=nearest"
PUBLISHED = "remat_policy=full compiler_flags=published"
ALL_REDUCES = "remat_policy=full compiler_flags=all_reduces"
_WITHOUT_WINDOWS = (
  "remat_policy=custom context=offload "
  "compiler_flags='published --xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'"
)
_BFLOAT16 = {
  "Llama-2-7B, v5e-256, 4 × 2048": _case("llama2-7b", "v5e-256", 4, 2048),
  "Llama-2-7B, v5p-64, 4 × 2048": _case("llama2-7b", "v5p-64", 4, 2048),
  "Llama-3-8B, v6e-64, 4 × 2048": _case("llama3-8b", "v6e-64", 4, 2048),
  "the same with `compiler_flags=published`": _case("llama3-8b", "v6e-64", 4, 2048, PUBLISHED),
  "Llama-3-8B, tpu7x-64, 4 × 2048": _case("llama3-8b", "tpu7x-64", 4, 2048),
  "Llama-3-8B, h100-64, 2 × 8192": _case("llama3-8b", "h100-64", 2, 8192) + " packing=false",
}
# The label of a row, and its keys.
ROWS: Mapping[str, Mapping[str, str]] = {
  "noise": {
    "`gns=off`": f"{_NOISE} gns=off",
    "`gns=all`": f"{_NOISE} gns=all",
  },
  "pipeline": {
    "no pipeline: fsdp 16, 4 accumulation steps": f"{_SLICE} packing=false ici_fsdp_parallelism=16 "
    "per_device_batch_size=1 gradient_accumulation_steps=4",
    "`1f1b`, residuals": f"{_STAGES} {_RESIDUALS}",
    "`interleaved_1f1b`, 2 repeats, residuals": f"{_STAGES} {_TWICE}",
    "`interleaved_1f1b`, 2 repeats": f"{_STAGES} pipeline_schedule=interleaved_1f1b num_pipeline_repeats=2",
    "`circular`, 2 repeats": f"{_STAGES} pipeline_schedule=circular num_pipeline_repeats=2",
    "`1f1b`": f"{_STAGES} pipeline_schedule=1f1b",
  },
  "slices": {
    "a replica on each, fsdp 16 inside (`dcn_data_parallelism=4`)": f"{_SLICES} dcn_data_parallelism=4",
    "a stage on each, fsdp 16 inside (`dcn_pipeline_parallelism=4`), `1f1b`, residuals": f"{_SLICES} "
    f"dcn_data_parallelism=1 dcn_pipeline_parallelism=4 num_pipeline_microbatches=4 {_RESIDUALS}",
  },
  "precision": {
    "float32": f"{_FORMATS} precision=float32",
    "bfloat16": f"{_FORMATS} precision=bfloat16",
    "float16": f"{_FORMATS} precision=float16",
    "cbfloat16 (emulated)": f"{_FORMATS} precision=cbfloat16",
  },
  "narrow": {
    "GPT-2 small, v5e-16, 8 × 1024, `none`, no dropout": _case(
      "gpt2-small", "v5e-16", 8, 1024, "remat_policy=none dropout_rate=0"
    ),
    "the same with dropout": _case("gpt2-small", "v5e-16", 8, 1024, "remat_policy=none"),
    "the same with `full`, no dropout": _case(
      "gpt2-small", "v5e-16", 8, 1024, "remat_policy=full dropout_rate=0"
    ),
    "SmolLM-360M, v6e-16, 8 × 2048, `minimal`": _case(
      "smollm-360m", "v6e-16", 8, 2048, "remat_policy=minimal"
    ),
    "Qwen3-0.6B, v5e-16, 4 × 2048, `minimal`": _case(
      "qwen3-0.6b", "v5e-16", 4, 2048, "remat_policy=minimal"
    ),
    "the same, 8 × 1024, `full`": _case("qwen3-0.6b", "v5e-16", 8, 1024),
    "Llama-3.2-1B, v6e-8, 4 × 2048, `full`, bfloat16 weights": _case(
      "llama3.2-1b", "v6e-8", 4, 2048, _BFLOAT16_WEIGHTS
    ),
    "Gemma-2-2B, v6e-16, 2 × 8192, `full`": _case("gemma2-2b", "v6e-16", 2, 8192),
  },
  "eight_bits": {
    f"{label}{', ' + bits if bits else ''}": f"{keys} quantization={bits}" if bits else keys
    for (label, keys), eight in zip(_BFLOAT16.items(), ("int8",) * 4 + ("fp8",) * 2, strict=True)
    for bits in ("", eight)
  },
  "reports": {
    "Llama-2-7B, v5e-256": _case("llama2-7b", "v5e-256", 4, 2048),
    "Llama-3-8B, v5e-256": _case("llama3-8b", "v5e-256", 4, 2048),
    "Llama-2-7B, v6e-64": _case("llama2-7b", "v6e-64", 4, 2048),
    "Llama-3-8B, v6e-64": _case("llama3-8b", "v6e-64", 4, 2048),
    "gpt2-small, v5e-16": _case("gpt2-small", "v5e-16", 8, 1024, "gradient_accumulation_steps=4"),
  },
  "published": {
    "Llama-2-70B, v5e-256, 2 per device, T=2048": _case(
      "llama2-7b", "v5e-256", 2, 2048, f"remat_policy=full {_70B}"
    ),
    "Llama-3.2-1B, v6e-8, 4 per device, T=2048, bfloat16 weights, full remat": _case(
      "llama3.2-1b",
      "v6e-8",
      4,
      2048,
      _BFLOAT16_WEIGHTS,
    ),
    "Mistral-7B, v6e-8, T=8192, theirs 6 per device, ours 3 with `compiler_flags=published`": _case(
      "mistral-7b", "v6e-8", 3, 8192, PUBLISHED
    ),
  },
  "maxtext": {
    "Qwen3-0.6B, v5e-16, 8 × 1024 tokens a device": _case("qwen3-0.6b", "v5e-16", 8, 1024),
    "GPT-2 small, v5e-16, 8 × 1024": _case(
      "gpt2-small", "v5e-16", 8, 1024, "remat_policy=full dropout_rate=0"
    ),
    "Llama-3.2-1B, v6e-8, 4 × 2048": _case(
      "llama3.2-1b",
      "v6e-8",
      4,
      2048,
      _BFLOAT16_WEIGHTS,
    ),
    "Llama-2-7B, v5p-64, 4 × 2048": _case("llama2-7b", "v5p-64", 4, 2048),
    "Llama-3.1-8B, v6e-16, 3 × 8192, published flags; queries, keys, values, outputs and inputs of layers on "
    "the host; ours without windows": _case(
      "llama3.1-8b", "v6e-16", 3, 8192, f"{_OFFLOADED} {_WITHOUT_WINDOWS}"
    ),
    "Llama-2-7B, v5e-256, 4 × 2048": _case("llama2-7b", "v5e-256", 4, 2048),
    "Llama-2-7B, v5e-256, 4 × 2048, both with `compiler_flags=all_reduces`": _case(
      "llama2-7b", "v5e-256", 4, 2048, ALL_REDUCES
    ),
    "Llama-2-7B, v5e-256, 1 × 2048 in each of 4 microbatches": _case(
      "llama2-7b", "v5e-256", 1, 2048, "remat_policy=full gradient_accumulation_steps=4"
    ),
    "Llama-2-7B, v5e-256, 1 × 2048 in each of 4 microbatches, both with `compiler_flags=all_reduces`": _case(
      "llama2-7b", "v5e-256", 1, 2048, f"{ALL_REDUCES} gradient_accumulation_steps=4"
    ),
    "Llama-3-8B, v6e-64, 4 × 2048": _case("llama3-8b", "v6e-64", 4, 2048),
    "the same with `compiler_flags=published`": _case("llama3-8b", "v6e-64", 4, 2048, PUBLISHED),
    "Mistral-7B, v6e-8, 3 × 8192; theirs with its recipe's flags and activations on the host, ours with "
    "`compiler_flags=published`, no windows and the same on the host, attention's output in place of its "
    "projection": _case("mistral-7b", "v6e-8", 3, 8192, f"{_OFFLOADED} {_WITHOUT_WINDOWS}"),
    "Llama-2-7B, v5e-16, 4 × 2048, 4 stages, 16 microbatches; ours `1f1b` with "
    "`pipeline_saved_activations=residuals`": f"{_4_STAGES} per_device_batch_size=4 "
    f"num_pipeline_microbatches=16 {_RESIDUALS}",
    "the same; ours `interleaved_1f1b` with 8 repeats": f"{_4_STAGES} per_device_batch_size=4 "
    f"num_pipeline_microbatches=16 {_EACH_LAYER}",
    "the same, ours keeping attention's output and its projection": f"{_4_STAGES} per_device_batch_size=4 "
    f"num_pipeline_microbatches=16 {_EACH_LAYER} remat_policy=custom context=device out_proj=device",
    "Llama-2-7B, v5p-64, 4 × 2048; ours in 2 microbatches": _case(
      "llama2-7b", "v5p-64", 2, 2048, f"remat_policy=full {_TWO}"
    ),
    "Llama-3-8B, v6e-64, 4 × 2048, both with `compiler_flags=published`; ours in 2 microbatches": _case(
      "llama3-8b", "v6e-64", 2, 2048, f"{PUBLISHED} {_TWO}"
    ),
  },
}
PUBLISHED_USE = (
  (
    "57% (MaxText, `Run_Llama2.md`, `configs/v5e/llama2_70b.sh`)",
    "they offload q, k, v instead of recomputing them",
  ),
  (
    "20.3% (MaxText, measured by MinText's authors)",
    "the program: the estimate of theirs is 16.8%",
  ),
  (
    "47.1% as MaxText counts, 40.2% as we do (7,777 tokens/s a device; tpu-recipes)",
    "they offload activations and use other compiler flags",
  ),
)
"""The utilisation that others have published for the rows of `published`, where, and what differs."""
MAXTEXT: Mapping[str, Sequence[tuple[float, float]]] = {
  "maxtext": (
    (0.718, 6.35),
    (0.194, 2.05),
    (0.415, 6.29),
    (2.417, 8.13),
    (3.525, 30.0),
    (3.550, 4.44),
    (3.471, 4.88),
    (3.816, 2.15),
    (3.644, 2.14),
    (1.295, 8.16),
    (1.052, 7.19),
    (3.390, 29.1),
    (4.114, 15.3),
    (4.114, 15.3),
    (4.114, 15.3),
    (2.417, 8.13),
    (1.052, 7.19),
  ),
  "reports": ((0, 4.60), (0, 7.03), (0, 6.01), (0, 8.18)),
}
"""MaxText 0.2.5, compiled by jax 0.12.0.1 and libtpu 0.0.52 on 2026-11-22 and 28, priced by the estimator of
commit 5e97a668, the pipeline by that of e8bd6a61: seconds of a step, and GB at a device's peak, or in `reports` GB of arguments and temporaries."""


def sources_commit() -> str:
  """Returns the newest commit of the code that is compiled."""
  git = ["git", "log", "-1", "--format=%h", "--", *CODE]
  return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def compiler() -> str:
  """Returns the versions by which steps are compiled here, in words."""
  jax, libtpu = (importlib.metadata.version(name) for name in ("jax", "libtpu"))
  return f"jax {jax} and libtpu {libtpu}"


def run(keys: str) -> tuple[pathlib.Path, str]:
  """Compiles a configuration unless its report is there, of this table or of another; returns the report's
  folder and what the command printed. Raises SystemExit: it fails."""
  name = hashlib.sha256(" ".join(sorted(shlex.split(keys))).encode()).hexdigest()[:12]
  folder = OUT / f"{sources_commit()}-{compiler().replace(' ', '-')}" / name
  printed = folder / "printed.txt"
  if not printed.exists():
    where = [f"base_output_directory={folder.parent}", f"run_name={folder.name}"]
    command = [sys.executable, "-m", "maxbatch.train", "config=base", "compile_only=true"]
    result = subprocess.run(
      [*command, *shlex.split(keys), *where], stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
      raise SystemExit(f"{keys}: exit code {result.returncode}")
    printed.write_text(result.stdout, encoding="utf-8")
  return folder, printed.read_text(encoding="utf-8")


def noise(row: dict[str, Any]) -> Sequence[str]:
  """Returns seconds of a step, the peak, and messages of a microbatch."""
  messages = sum(each["count"] for each in row["collectives"] if each["in_microbatch_loop"])
  return (*time_and_peak(row), f"{messages:,}")


def pipeline(row: dict[str, Any]) -> Sequence[str]:
  """Returns seconds of a step, the peak, and the share of the devices' peak FLOPs."""
  return (*time_and_peak(row), f"{row['time']['model_flop_utilisation']:.1%}")


def time_and_peak(row: dict[str, Any]) -> tuple[str, str]:
  """Returns seconds of a step and the peak of a device."""
  return f"{row['time']['step_seconds']:.4g} s", f"{_peak(row) / GIB:.3f} GiB"


def reports(row: dict[str, Any], theirs: tuple[float, float] | None) -> Sequence[str]:
  """Returns GB of arguments and temporaries, theirs and ours, and what of ours accumulates gradients."""
  memory = row["memory_bytes_per_device"]
  held = ("parameters", "optimizer_state", "accumulators", "rows", "activations_and_temporaries")
  ours, accumulators = sum(memory[key] for key in held) / GB, memory["accumulators"] / GB
  peak = f"{_peak(row) / GB:.2f}"
  if theirs is None:
    return ("", f"{ours:.2f}", f"{accumulators:.2f}", "", peak)
  ratio = (ours - accumulators) / theirs[1]
  return (f"{theirs[1]:.2f}", f"{ours:.2f}", f"{accumulators:.2f}", f"{ratio:.2f}", peak)


def published(row: dict[str, Any], theirs: tuple[str, str] | None) -> Sequence[str]:
  """Returns the published share of the devices' peak FLOPs, ours, and what differs."""
  if theirs is None:
    raise ValueError("each row has a published figure")
  return (theirs[0], f"{row['time']['model_flop_utilisation']:.1%}", theirs[1])


def maxtext(row: dict[str, Any], theirs: tuple[float, float] | None) -> Sequence[str]:
  """Returns time and peak, theirs and ours, and the ratio of the times."""
  if theirs is None:
    raise ValueError("each row has a figure of MaxText's")
  seconds, ours = row["time"]["step_seconds"], f"{_peak(row) / GB:.2f} GB"
  return (
    f"{theirs[0]:.3f} s, {theirs[1]:.3g} GB",
    f"{seconds:.3f} s, {ours}",
    f"{seconds / theirs[0]:.2f}",
  )


def _peak(row: dict[str, Any]) -> int:
  return row["memory_bytes_per_device"]["peak"]


_TIME_AND_PEAK = ("a step", "peak memory of a device")
TABLES: Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any]], Sequence[str]]]] = {
  "noise": ((*_TIME_AND_PEAK, "messages each pass"), noise),
  "pipeline": ((*_TIME_AND_PEAK, "utilisation"), pipeline),
  "slices": (_TIME_AND_PEAK, time_and_peak),
  "precision": (_TIME_AND_PEAK, time_and_peak),
  "narrow": (_TIME_AND_PEAK, time_and_peak),
  "eight_bits": (_TIME_AND_PEAK, time_and_peak),
}
_BESIDE = Callable[[dict[str, Any], Any], Sequence[str]]
BESIDE: Mapping[str, tuple[Sequence[str], _BESIDE]] = {
  "reports": (
    ("MaxText", "maxbatch", "of which gradient accumulators", "ratio without them", "peak"),
    reports,
  ),
  "maxtext": (("MaxText", "maxbatch", "ratio of times"), maxtext),
  "published": (("published utilisation", "our estimate", "what differs"), published),
}
"""Tables that have figures of others, too."""
PRINTED: Mapping[str, tuple[str, str]] = {
  "explore": (
    "model_name=llama2-7b compile_topology=v5e-256 max_target_length=2048 dtype=bfloat16 batch_size=8192 "
    "ici_data_parallelism=1 ici_fsdp_parallelism=-1 micro_batch_size=explore",
    "   micro_batch_size",
  ),
  "schedules": (
    f"{_4_STAGES} per_device_batch_size=4 num_pipeline_microbatches=16 pipeline_schedule=auto "
    "pipeline_saved_activations=auto",
    "Pipeline schedules",
  ),
  "ranking": (
    "compile_topology=v5e-16 ici_pipeline_parallelism=4 ici_fsdp_parallelism=4 ici_data_parallelism=1 "
    "base_num_decoder_layers=8 base_emb_dim=512 base_mlp_dim=2048 base_num_query_heads=8 "
    "base_num_kv_heads=8 head_dim=64 max_target_length=512 per_device_batch_size=8 dtype=bfloat16 "
    "remat_policy=full packing=false pipeline_schedule=interleaved_1f1b num_pipeline_repeats=2 num_pipeline_microbatches=-1",
    "Pipeline microbatches of",
  ),
}
"""What a command itself prints: its keys, and how the part begins that a page shows, up to an empty line."""


def table(name: str) -> None:
  """Prints a table, and puts the reports of `reports` into docs."""
  columns, cells = BESIDE[name] if name in BESIDE else TABLES[name]
  theirs = {**MAXTEXT, "published": PUBLISHED_USE}.get(name, ())
  lines = [["", *columns], ["---"] * (len(columns) + 1)]
  for at, (label, keys) in enumerate(ROWS[name].items()):
    folder, _ = run(keys)
    (row,) = json.loads((folder / "compile_report.json").read_text(encoding="utf-8"))
    more = (theirs[at] if at < len(theirs) else None,) if theirs else ()
    lines.append([label, *cells(row, *more)])
    if name == "reports":
      asked = dict(each.split("=", 1) for each in keys.split())
      file = REPORTS / f"{asked['model_name']}-{asked['compile_topology']}.txt"
      shutil.copy(folder / "compile_report.txt", file)
      lines[-1][0] = f"[{label}](reports/{file.name})"
  print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n")


def show(name: str) -> None:
  """Prints a part of what a command prints, indented."""
  keys, first = PRINTED[name]
  _, printed = run(keys)
  part = printed[printed.index(first) :].partition("\n\n")[0]
  # Where a choice is remembered, and all that follows, is this machine's.
  shown = itertools.takewhile(lambda line: "; remembered in " not in line, part.splitlines())
  print("\n".join("    " + line for line in shown))
  if name == "explore":
    (REPORTS / "llama2-7b-v5e-256-explore.txt").write_text(printed, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
  """Prints what is asked for."""
  (name,) = arguments
  show(name) if name in PRINTED else table(name)
  print(f"\nCompiled by {compiler()}.")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
