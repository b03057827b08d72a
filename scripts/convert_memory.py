"""Converts a random model of 3B parameters in and out and measures memory: python scripts/convert_memory.py FOLDER

Writes a Hugging Face folder with Llama 3.2 3B's shapes and random bfloat16 values, makes a run of it
and a folder of that run, each in a process of its own, and compares what came out with what went in.
Prints the most memory that each process has held, beside what is allowed: three times the largest
tensor and a gigabyte. FOLDER needs room for three times the model; what is made there is removed.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from maxbatch.checkpoints.tensor_files import TensorFolder, TensorSpec, write_tensors
from maxbatch.hugging_face.families.llama import TENSORS

D, F, L, N, K, H, V = 3072, 8192, 28, 24, 8, 128, 128_256
CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": D,
  "intermediate_size": F,
  "num_hidden_layers": L,
  "num_attention_heads": N,
  "num_key_value_heads": K,
  "head_dim": H,
  "vocab_size": V,
  "max_position_embeddings": 131_072,
  "rms_norm_eps": 1e-5,
  "rope_theta": 500_000.0,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
}
SHAPES = {
  "embed_tokens": (V, D),
  "q_proj": (N * H, D),
  "k_proj": (K * H, D),
  "v_proj": (K * H, D),
  "o_proj": (D, N * H),
  "gate_proj": (F, D),
  "up_proj": (F, D),
  "down_proj": (D, F),
}
GIGABYTE = 10**9


def specs() -> Iterator[TensorSpec]:
  """The tensors of the model."""
  for tensor in TENSORS:
    if tensor.name == "lm_head.weight" or tensor.name.endswith("bias"):
      continue
    shape = SHAPES.get(tensor.name.split(".")[-2], (D,))
    for layer in range(L if tensor.is_layered else 1):
      yield TensorSpec(tensor.name.format(layer), shape, np.dtype(ml_dtypes.bfloat16))


def random_values(tensors: Sequence[TensorSpec]) -> Iterator[np.ndarray]:
  """Finite numbers, other ones in every tensor."""
  generator = np.random.default_rng(0)
  for spec in tensors:
    bits = np.frombuffer(generator.bytes(spec.nbytes), np.uint16) & np.uint16(0xBFFF)
    yield bits.view(spec.dtype)


def measured(*arguments: str) -> tuple[int, float]:
  """The most bytes and the seconds that a conversion takes."""
  began = time.perf_counter()
  process = subprocess.Popen([sys.executable, "-m", "maxbatch.convert", *arguments])
  _, status, used = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode:
    sys.exit(process.returncode)
  print(f"{used.ru_utime + used.ru_stime:.0f} s of processor time")
  return used.ru_maxrss * 1024, time.perf_counter() - began


def different(left: pathlib.Path, right: pathlib.Path) -> list[str]:
  """The tensors of two folders that are not the same bits."""
  one, other = TensorFolder(left), TensorFolder(right)
  if one.names != other.names:
    return sorted(set(one.names) ^ set(other.names))
  return [
    name
    for name in one.names
    if any(
      a.tobytes() != b.tobytes()
      for a, b in zip(one[name].blocks(), other[name].blocks(), strict=True)
    )
  ]


def main(arguments: Sequence[str] | None = None) -> None:
  """Makes the model, converts it both ways, and prints what that took."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--weight_dtype", default="float32", choices=["float32", "bfloat16"])
  given = parser.parse_args(arguments)
  theirs, back = given.folder / "theirs", given.folder / "back"
  theirs.mkdir(parents=True)
  tensors = list(specs())
  (theirs / "config.json").write_text(json.dumps(CONFIG))
  write_tensors(theirs, tensors, random_values(tensors))
  size = sum(spec.nbytes for spec in tensors)
  largest = max(spec.nbytes for spec in tensors)
  allowed = 3 * largest + GIGABYTE
  print(f"{size / 2 / 1e9:.2f}B parameters, {size / GIGABYTE:.2f} GB in bfloat16")
  print(f"largest tensor {largest / GIGABYTE:.2f} GB, allowed {allowed / GIGABYTE:.2f} GB")
  place = [f"base_output_directory={given.folder}", "run_name=run"]
  ways = {
    "from_hf": [f"from_hf={theirs}", *place, f"weight_dtype={given.weight_dtype}"],
    "to_hf": [f"to_hf={back}", f"checkpoint={given.folder / 'run'}", "save_dtype=bfloat16"],
  }
  peaks = {name: measured(*way) for name, way in ways.items()}
  for name, (peak, seconds) in peaks.items():
    print(f"{name}: at most {peak / GIGABYTE:.2f} GB resident, {seconds:.0f} s")
  wrong = different(theirs, back)
  print(f"what came out is {'not ' if wrong else ''}what went in, bit for bit")
  for folder in (theirs, back, given.folder / "run"):
    shutil.rmtree(folder)
  if wrong or max(peak for peak, _ in peaks.values()) > allowed:
    sys.exit(1)


if __name__ == "__main__":
  main()
