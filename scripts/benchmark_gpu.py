"""Training steps of maxbatch, MaxText and PyTorch in turn on one accelerator, and a table to paste.

    python scripts/benchmark_gpu.py [size=gpu] [cases=all] [sides=ours,maxtext,torch] [rounds=2]
      [maxtext=COMMAND] [torch=COMMAND] [out=benchmark_gpu] [timeout_s=120] [limit_s=480] [key=value ...]

Each side is a process of its own: `-m maxbatch.train`, maxtext=COMMAND (MaxText's trainer up to its keys,
"PEER/bin/python -m maxtext.trainers.pre_train.train …/base.yml"; left out without it) and torch=COMMAND
(scripts/torch_step.py). All get model, rows and policy by the same keys; more keys go to ours. Tokens per
second are those of the median step after the first four. A process that fails or takes over timeout_s
loses its own row alone, and none starts after limit_s. `out` gets every log and, after each process,
results.json, from which a repeated command goes on, trying again what failed. The first round compiles; later ones find compiled
programs in caches below `out`. PyTorch's step runs once a round for cases that give it the same keys.
This file needs Python alone; size=tiny rehearses on a CPU.
"""

import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
OWN = {
  "size": "gpu",
  "cases": "all",
  "sides": "ours,maxtext,torch",
  "rounds": "2",
  "maxtext": "",
  "torch": f"{sys.executable} {ROOT / 'scripts' / 'torch_step.py'}",
  "out": "benchmark_gpu",
  "timeout_s": "120",
  "limit_s": "480",
}
STEPS, WARM_UP = 14, 4
SMALL = """base_num_decoder_layers=12 base_emb_dim=768 base_mlp_dim=2048 base_num_query_heads=12
base_num_kv_heads=12 head_dim=64 vocab_size=32768 max_target_length=1024 per_device_batch_size=16"""
LARGE = """base_num_decoder_layers=16 base_emb_dim=2048 base_mlp_dim=8192 base_num_query_heads=16
base_num_kv_heads=16 head_dim=128 vocab_size=32768 max_target_length=2048 per_device_batch_size=8"""
TINY = """base_num_decoder_layers=2 base_emb_dim=64 base_mlp_dim=128 base_num_query_heads=4
base_num_kv_heads=4 head_dim=16 vocab_size=512 max_target_length=64 per_device_batch_size=2"""
CASES = {
  "small": (SMALL, "none"),
  "large": (LARGE, "none"),
  "large_full": (LARGE, "full"),
}
"""Models as large as GPT-2 and of 1.2 billion parameters, and remat_policy: all is kept, or nothing."""
MAXTEXT_POLICY = {
  "none": "remat_policy=minimal_with_context scan_layers=false",
  "full": "remat_policy=full scan_layers=true",
}
"""MaxText 0.2.5 takes none as full; minimal_with_context recomputes least there, unrolled as ours."""
KEYS = {
  "ours": """config=base dataset_type=synthetic packing=false generate_length=0 eval_samples=16
  eval_interval=-1 enable_checkpointing=false write_report=false log_period=1 run_name=run""",
  "maxtext": """run_name=run dataset_type=synthetic packing=false enable_checkpointing=false
  enable_goodput_recording=false skip_jax_distributed_system=true""",
  "torch": "",
}
MAXTEXT_ON = {
  "gpu": ("hardware=gpu", "attention=cudnn_flash_jax"),
  "tiny": ("hardware=cpu", "attention=dot_product"),
}
STEP = re.compile(r"completed step: \d+, seconds: ([\d.]+)(?:.*Tokens/s/device: ([\d.]+))?")
OWN_STEP = re.compile(r"^step ([1-9]\d*)/")
PEAK = re.compile(r"device_peak_bytes\"?[:=] ?(\d+)")
PARAMETERS = re.compile(r"parameters: ([\d.,]+\d)( billion)?|([\d,]+) parameters")


def command(given: Mapping[str, str], side: str, case: str, folder: pathlib.Path) -> list[str]:
  """A side's process for a case."""
  shapes, policy = CASES[case]
  keys = (TINY if given["size"] == "tiny" else shapes).split()
  keys += (MAXTEXT_POLICY[policy] if side == "maxtext" else f"remat_policy={policy}").split()
  keys += ["dtype=bfloat16", "weight_dtype=float32", f"steps={STEPS}", *KEYS[side].split()]
  if side == "torch":
    return [*shlex.split(given["torch"]), *keys]
  cache = folder.parent.resolve() / f"cache_{side}"
  keys += [f"base_output_directory={folder.resolve()}", f"jax_cache_dir={cache}"]
  if side == "maxtext":
    return [*shlex.split(given["maxtext"]), *keys, *MAXTEXT_ON[given["size"]]]
  return [sys.executable, "-m", "maxbatch.train", *keys]


def timed_lines(
  words: Sequence[str], env: Mapping[str, str], log: pathlib.Path, seconds: float
) -> tuple[int, list[tuple[float, str]]]:
  """A process's exit code, and its lines with the seconds since its start; ended after `seconds`."""
  began, lines = time.perf_counter(), []
  pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  pipes |= {"errors": "replace", "start_new_session": True}
  env = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
  with log.open("w") as kept, subprocess.Popen(words, env=env, **pipes) as process:
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    for line in process.stdout or ():
      lines.append((time.perf_counter() - began, line))
      kept.write(line)
    code = process.wait()
    timer.cancel()
  return code, lines


def measured(
  given: Mapping[str, str], side: str, words: Sequence[str], folder: pathlib.Path
) -> dict[str, Any]:
  """What a process says of its steps; `error` where it says too little."""
  folder.mkdir(parents=True, exist_ok=True)
  torch_cache = folder.parent.resolve() / "cache_torch"
  env = {"TORCHINDUCTOR_CACHE_DIR": str(torch_cache)}
  if side == "ours":
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
  log = folder / "log.txt"
  code, lines = timed_lines(words, env, log, float(given["timeout_s"]))
  keys = dict(word.split("=", 1) for word in words if "=" in word)
  tokens = int(keys["per_device_batch_size"]) * int(keys["max_target_length"])
  steps = [match for _, line in lines if (match := STEP.search(line))]
  seconds = [tokens / float(match[2]) if match[2] else float(match[1]) for match in steps]
  said = "".join(line for _, line in lines)
  if side == "ours":
    files = [folder / "run" / f"{name}.jsonl" for name in ("metrics", "events")]
    said += "".join(file.read_text() for file in files if file.exists())
    seconds = [float(each) for each in re.findall(r'"step_seconds": ([\d.e-]+)', said)]
  ends = [at for at, line in lines if (OWN_STEP if side == "ours" else STEP).search(line)]
  result = {
    "exit_code": code,
    "first_step_seconds": next(iter(ends), None),
    "process_seconds": lines[-1][0] if lines else 0.0,
    "parameters": next((match[0] for match in PARAMETERS.finditer(said)), None),
    "peak_bytes": max((int(each) for each in PEAK.findall(said)), default=None),
    # By the clock of this process, to check theirs by.
    "seconds_between_lines": [after - at for at, after in itertools.pairwise(ends)][WARM_UP:-1],
    # The last is not counted: a loop that reads its losses late has it at once.
    "step_seconds": seconds[WARM_UP:-1],
  }
  if code or not result["step_seconds"]:
    ending = " ".join(said.split())[-300:]
    # A killed compiler leaves files that are cut short.
    if side == "torch":
      shutil.rmtree(torch_cache, ignore_errors=True)
    return result | {"error": f"exit code {code} after {len(seconds)} steps ({log}): {ending}"}
  return result | {"tokens_per_second": tokens / statistics.median(result["step_seconds"])}


def table(results: Mapping[str, Any], cases: Sequence[str], sides: Sequence[str]) -> Iterator[str]:
  """Lines of Markdown: each side in each case, medians over the rounds."""
  yield "| case | side | tokens/s | ours / this | s to step 1, first round | later | peak GB |"
  yield "|---|---|---|---|---|---|---|"
  for case, side in itertools.product(cases, sides):
    rounds = [one for one in results[f"{case}/{side}"] if "error" not in one]
    ours = [one for one in results.get(f"{case}/ours", []) if "error" not in one]
    if not rounds:
      failed = [one["error"][:60] for one in results[f"{case}/{side}"]]
      yield f"| {case} | {side} | {failed[0] if failed else 'not run'} | | | | |"
      continue
    speed, own = (
      statistics.median([one["tokens_per_second"] for one in each] or [0.0])
      for each in (rounds, ours)
    )
    first = [f"{one['first_step_seconds']:.1f}" for one in rounds]
    peak = max(one["peak_bytes"] or 0 for one in rounds)
    columns = f"{speed:,.0f} | {own / speed:.3f} | {first[0]} | {' '.join(first[1:])}"
    yield f"| {case} | {side} | {columns} | {f'{peak / 1e9:.1f}' if peak else ''} |"


def main(arguments: Sequence[str]) -> int:
  """Runs what is not kept, and prints the table after each round."""
  pairs = [argument.partition("=") for argument in arguments]
  given = OWN | {key: value for key, _, value in pairs if key in OWN}
  extra = [f"{key}={value}" for key, _, value in pairs if key not in OWN]
  cases = list(CASES) if given["cases"] == "all" else given["cases"].split(",")
  sides = [side for side in given["sides"].split(",") if side != "maxtext" or given["maxtext"]]
  if unknown := {*cases, *sides} - {*CASES, *KEYS}:
    print(f"{', '.join(sorted(unknown))}: there are {', '.join((*CASES, *KEYS))}", file=sys.stderr)
    return 2
  out, began = pathlib.Path(given["out"]), time.perf_counter()
  out.mkdir(parents=True, exist_ok=True)
  kept = out / "results.json"
  before = json.loads(kept.read_text()) if kept.exists() else {}
  results = {name: [one for one in all if "error" not in one] for name, all in before.items()}
  for number in range(int(given["rounds"])):
    done: dict[str, Any] = {}
    for case, side in itertools.product(cases, sides):
      each = results.setdefault(f"{case}/{side}", [])
      folder = out / f"{case}_{side}_{number}"
      words = command(given, side, case, folder) + (extra if side == "ours" else [])
      if len(each) > number:
        done[str(words)] = each[number]
      elif str(words) in done:
        each.append(done[str(words)])
      elif time.perf_counter() - began < float(given["limit_s"]):
        each.append(done.setdefault(str(words), measured(given, side, words, folder)))
        short = {key: value for key, value in each[-1].items() if not isinstance(value, list)}
        print(f"{case} {side}: {json.dumps(short)}", flush=True)
      kept.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results, cases, sides)), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
