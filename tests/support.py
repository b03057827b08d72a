"""Small models, rows and meshes that many tests share."""

import dataclasses
import functools
import os
import re
import signal
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxbatch.batch.from_config import plan_batches
from maxbatch.config.find import read_argument
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, ModelConfig, fields
from maxbatch.config.value import convert
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.loader import ChainedLoader
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import make_mesh

TINY = {
  "base_emb_dim": 32,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "base_mlp_dim": 64,
  "vocab_size": 264,
  "max_target_length": 16,
}

SMALLEST = {
  "base_emb_dim": 16,
  "base_num_decoder_layers": 1,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "base_mlp_dim": 32,
  "vocab_size": 264,
  "max_target_length": 16,
}
"""A model that whole runs of the command are quick with."""

GPT2 = {
  "base_num_kv_heads": 4,
  "mlp_activation": "gelu",
  "normalization": "layernorm",
  "position_embedding": "learned",
  "logits_via_embedding": "true",
  "attention_qkv_bias": "true",
  "attention_out_bias": "true",
  "mlp_bias": "true",
}
"""Keys of a model like GPT-2, on top of TINY."""


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
  """Sends SIGTERM to this process while `step` is under way."""
  waited, steps = ChainedLoader.waited_seconds, []

  def stopped(loader: ChainedLoader) -> float:
    steps.append(loader)
    if len(steps) == step:
      os.kill(os.getpid(), signal.SIGTERM)
    return waited(loader)

  # A run asks for it once in a step, which has been dispatched and not been waited for.
  monkeypatch.setattr(ChainedLoader, "waited_seconds", stopped)


def config(**keys: object) -> Config:
  """The default configuration with a tiny model, and `keys` on top."""
  return _loaded(*(f"{key}={value}" for key, value in (TINY | keys).items()))


@functools.cache
def _loaded(*keys: str) -> Config:
  """`load_config` of the default configuration and `keys`: the same ones are read once."""
  return load_config(["config=base", *keys])


@functools.cache
def base() -> Config:
  """base.yml as it is."""
  return load_config(["config=base"])


def configured(*keys: str) -> Config:
  """`load_config` of the default configuration and `keys`, without reading base.yml each time."""
  sections = vars(base()).copy()
  for argument in keys:
    key, _, text = argument.partition("=")
    name, field = fields()[key]
    value = convert(read_argument(key, text, False), field.type)
    sections[name] = dataclasses.replace(sections[name], **{key: value})
  return Config(**sections)


def model_config(**keys: object) -> ModelConfig:
  """The model section of `config`."""
  return config(**keys).model


def mesh(
  data: int = 1, fsdp: int = 1, tensor: int = 1, stage: int = 1, expert: int = 1, context: int = 1
) -> Mesh:
  """A mesh of the first simulated devices."""
  sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "stage": stage, "expert": expert}
  topology = Topology(sizes | {"context": context})
  return make_mesh(topology, jax.devices()[: topology.num_devices])


def uneven_rows(count: int, length: int, seed: int = 0) -> Rows:
  """`count` rows [count, T] with very different numbers of tokens, rows 8 to 15 without any."""
  random = np.random.default_rng(seed)
  tokens = random.integers(0, 256, (count, length + 1)).astype(np.int32)
  counts = random.integers(0, length + 1, (count, 1))
  counts[8:16] = 0
  weights = (np.arange(length)[None] < counts).astype(np.float32)
  return Rows(tokens[:, :-1], tokens[:, 1:], weights, np.arange(count, dtype=np.int32))  # pyright: ignore


def in_microbatches(rows: Rows, k: int, capacity: int) -> Rows:
  """(B, T) → (capacity, B/k, T): k microbatches, the rest zeros as the loader leaves them."""

  def cut(x: Any) -> np.ndarray:
    micro = np.asarray(x).reshape(k, x.shape[0] // k, *x.shape[1:])
    return np.concatenate([micro, np.zeros((capacity - k, *micro.shape[1:]), micro.dtype)])

  return jax.tree.map(cut, rows)


def relative_errors(tree: Any, reference: Any) -> dict[str, float]:
  """‖a − b‖ / ‖b‖ of every leaf, by its path."""
  errors = jax.tree.map(
    lambda a, b: float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)),
    jax.tree.map(lambda x: np.asarray(x, np.float64), tree),
    jax.tree.map(lambda x: np.asarray(x, np.float64), reference),
  )
  return {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(errors)}


def error(tree, reference) -> float:
  """‖tree − reference‖ / ‖reference‖ of all leaves together, computed in float64."""
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
  in_float64 = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
  squares = [(np.sum((a - b) ** 2), np.sum(b**2)) for a, b in in_float64]
  off, norm = np.sum(squares, axis=0)
  return float(np.sqrt(off / norm))


def program_text(lowered: jax.stages.Lowered) -> str:
  """The compiled program."""
  text = lowered.compile().as_text()
  assert text is not None
  return text


COLLECTIVE = re.compile(
  r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def collectives(text: str) -> dict[str, list[str]]:
  """Collective operations of a compiled program, by whether they run in a loop or once."""
  results: dict[str, list[str]] = {"loop": [], "once": []}
  bodies = set(re.findall(r"(?:body|condition)=%?([\w.\-]+)", text))
  where = "once"
  for line in text.splitlines():
    head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head:
      where = "loop" if head[1] in bodies else "once"
    if match := COLLECTIVE.search(line):
      results[where].append(match[1])
  return results


def memory(lowered: jax.stages.Lowered) -> Any:
  """The compiled program's memory, by the compiler's account."""
  return lowered.compile().memory_analysis()


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[BatchPlan]:
  """The plans of batches that are made from now on, wherever in the package."""
  plans: list[BatchPlan] = []

  def counted(*arguments: Any, **keys: Any) -> BatchPlan:
    plans.append(plan_batches(*arguments, **keys))
    return plans[-1]

  for name, module in list(sys.modules.items()):
    if name.startswith("maxbatch.") and vars(module).get("plan_batches") is plan_batches:
      monkeypatch.setattr(module, "plan_batches", counted)
  return plans
