"""Measures tokens per second of greedy texts beside transformers' generate, in one run, on the CPU.

  python scripts/benchmark_sampling.py [--models small gpt2-small smollm-135m] [--batch 8]
    [--prompt 64] [--tokens 128] [--rounds 5] [--cores 2] [--scan]

Both have the same random weights in float32, the same prompts, padded on the left, the same cores,
and write as many tokens; a round is one call of each, in turn, after one that compiles and warms up.
The tokens are compared. `prefill` is the time to the first token, `decode` tokens per second after it.

--models  `small` (8 layers of width 256), or names of configs/models
--cores   of so many alone; where other programs run too, 1 is fairer: torch's threads wait for each other
--scan    ours with scan_layers=true, as a run has it that does not say otherwise
Needs the extra `test`.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# As transformers has it: all cores in one device.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import torch
import transformers

from maxbatch.batch.from_config import topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, to_flat
from maxbatch.conversion.source import open_source
from maxbatch.hardware.sharding import make_mesh
from maxbatch.hugging_face.registry import family_for
from maxbatch.models.registry import build_model, placed
from maxbatch.sampling.choice import Choice, Vocabulary
from maxbatch.sampling.sampler import Sampler, on_fewest_devices, sample
from maxbatch.sampling.text import prompts_of

SMALL = (
  "vocab_size=8192",
  "base_emb_dim=256",
  "base_num_decoder_layers=8",
  "base_num_query_heads=8",
  "base_num_kv_heads=4",
  "head_dim=32",
  "base_mlp_dim=1024",
)

CORES = sorted(os.sched_getaffinity(0))

Write = Callable[[int], np.ndarray]
"""So many tokens after each prompt: int32[B, N]."""


class Speed(NamedTuple):
  """Of one call."""

  prefill_seconds: float
  decode_tokens_per_second: float
  tokens_per_second: float


def config_of(name: str, arguments: argparse.Namespace) -> Config:
  """The model, in float32, with rows that hold prompt and text."""
  keys = list(SMALL) if name == "small" else [f"model_name={name}"]
  length = arguments.prompt + arguments.tokens
  return load_config(
    [
      "config=base",
      *keys,
      f"max_target_length={length}",
      "dtype=float32",
      "weight_dtype=float32",
      f"scan_layers={str(arguments.scan).lower()}",
      "num_simulated_devices=1",
    ]
  )


def theirs(config: Config, folder: Path, prompts: list[list[int]]) -> Write:
  """transformers' generate with random weights, which are written to `folder`."""
  _, values = family_for(to_flat(config), config.batch.max_target_length)
  kind = values.pop("model_type")
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.for_model(kind, **values), dtype=torch.float32
  ).eval()
  model.save_pretrained(folder)
  longest = max(map(len, prompts))
  ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
  mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])

  def write(tokens: int) -> np.ndarray:
    with torch.inference_mode():
      result: Any = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
      )
    return result[:, longest:].numpy()

  return write


def ours(config: Config, folder: Path, prompts: list[list[int]]) -> Write:
  """Our sampler with the weights in `folder`."""
  length = config.batch.max_target_length
  model = build_model(dataclasses.replace(config.model, attention="dot_product"), length)
  mesh = make_mesh(topology(config.mesh, 1), jax.devices())
  read = open_source("folder", folder).read(model, placed(model, mesh))
  params, _ = on_fewest_devices(read, mesh, 1)
  V = config.model.vocab_size
  vocabulary = Vocabulary(np.ones(V, bool), np.zeros(V, bool))
  given = prompts_of(prompts, seed=0, numbers=[0] * len(prompts))

  def write(tokens: int) -> np.ndarray:
    sampler = Sampler(model, Choice(temperature=0.0), tokens, length)
    return np.asarray(sample(sampler, params, given, vocabulary).tokens_BN)

  return write


def timed(write: Write, batch: int, tokens: int) -> Speed:
  """One text of a token, then one of all of them."""
  began = time.perf_counter()
  write(1)
  prefill = time.perf_counter() - began
  began = time.perf_counter()
  write(tokens)
  whole = time.perf_counter() - began
  return Speed(prefill, batch * (tokens - 1) / (whole - prefill), batch * tokens / whole)


def measure(name: str, arguments: argparse.Namespace) -> None:
  """Prints the figures of one model."""
  config = config_of(name, arguments)
  draw = np.random.default_rng(0)
  lengths = np.linspace(arguments.prompt // 2, arguments.prompt, arguments.batch).astype(int)
  prompts = [draw.integers(0, config.model.vocab_size, n).tolist() for n in lengths]
  with tempfile.TemporaryDirectory() as folder:
    writers = {"transformers": theirs(config, Path(folder), prompts)}
    writers["maxbatch"] = ours(config, Path(folder), prompts)
    texts = {}
    for side, write in writers.items():
      write(1)
      texts[side] = write(arguments.tokens)
    alike = (texts["transformers"] == texts["maxbatch"]).mean()
    speeds: dict[str, list[Speed]] = {side: [] for side in writers}
    for _ in range(arguments.rounds):
      for side, write in writers.items():
        speeds[side].append(timed(write, arguments.batch, arguments.tokens))
  print(f"\n{name}: {alike:.1%} of the tokens are the same")
  for field in Speed._fields:
    values = {side: [getattr(each, field) for each in of] for side, of in speeds.items()}
    ratios = [b / a for a, b in zip(values["transformers"], values["maxbatch"], strict=True)]
    if field == "prefill_seconds":
      ratios = [1 / ratio for ratio in ratios]
    figures = "  ".join(f"{side} {statistics.median(of):8.3g}" for side, of in values.items())
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"  {field:<26} {figures}   times as fast {statistics.median(ratios):.2f} {spread}")


def main() -> None:
  """Measures each model."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--models", nargs="+", default=["small", "gpt2-small", "smollm-135m"])
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--prompt", type=int, default=64)
  parser.add_argument("--tokens", type=int, default=128)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--cores", type=int, default=len(CORES))
  parser.add_argument("--scan", action="store_true")
  arguments = parser.parse_args()
  # Before jax starts its threads.
  os.sched_setaffinity(0, CORES[: arguments.cores])
  torch.set_num_threads(arguments.cores)
  print(
    f"{arguments.cores} of {len(CORES)} cores, torch {torch.__version__}, transformers {transformers.__version__}, "
    f"jax {jax.__version__}; batch {arguments.batch}, prompts of up to {arguments.prompt} tokens, "
    f"{arguments.tokens} new ones, {arguments.rounds} rounds"
  )
  for name in arguments.models:
    measure(name, arguments)


if __name__ == "__main__":
  main()
