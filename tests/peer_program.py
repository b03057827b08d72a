"""A tiny training step as other trainers write it, for tests of the comparison of compiled programs.

    python tests/peer_program.py    # with jax and libtpu; writes tests/data/peer_step.hlo.gz

Its parts are named twice, by the functions that compute them and by jax.named_scope, as in our own
programs: a test takes the scopes out of the text and must find the same parts.
"""

import functools
import gzip
import os
import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

L, B, T, D, F, V = 2, 8, 128, 128, 512, 1024
"""Layers, rows, tokens, widths of stream and feed-forward layer, vocabulary."""


class RMSNorm:
  def __call__(self, x: jax.Array) -> jax.Array:
    with jax.named_scope("norm"):
      high = x.astype(jnp.float32)
      return (high * jax.lax.rsqrt(jnp.mean(high**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


class Attention:
  def __call__(self, x: jax.Array, weights: Any) -> jax.Array:
    with jax.named_scope("attention"):
      q, k, v = (x @ weights[name] for name in "qkv")
      logits = jnp.einsum("btd,bsd->bts", q, k) / D**0.5
      return jnp.einsum("bts,bsd->btd", jax.nn.softmax(logits), v) @ weights["o"]


class MlpBlock:
  def __call__(self, x: jax.Array, weights: Any) -> jax.Array:
    with jax.named_scope("mlp"):
      return jax.nn.relu(x @ weights["up"]) @ weights["down"]


def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
  x = x + Attention()(RMSNorm()(x), weights)
  return x + MlpBlock()(RMSNorm()(x), weights), None


def cross_entropy(x: jax.Array, table: jax.Array, ids: jax.Array) -> jax.Array:
  with jax.named_scope("head"):
    logits = (x @ table.T).astype(jnp.float32)
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0] * ids)


class Embed:
  def __call__(self, table: jax.Array, ids: jax.Array, rows: NamedSharding) -> jax.Array:
    with jax.named_scope("embedding"):
      return jax.lax.with_sharding_constraint(table[ids], rows)


def loss(weights: Any, ids: jax.Array, rows: NamedSharding) -> jax.Array:
  weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
  body = jax.checkpoint(layer)
  x, _ = jax.lax.scan(body, Embed()(weights["table"], ids, rows), weights["layers"])
  return cross_entropy(x, weights["table"], ids)


def apply_updates(weights: Any, gradients: Any) -> Any:
  with jax.named_scope("optimizer"):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def step(weights: Any, ids: jax.Array, rows: NamedSharding) -> Any:
  return apply_updates(weights, jax.grad(loss)(weights, ids, rows))


def main() -> None:
  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
  os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
  mesh = Mesh(np.array(chips), ("fsdp",))

  def placed(shape: tuple[int, ...], spec: tuple[Any, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  shapes = dict.fromkeys("qkvo", (L, D, D)) | {"up": (L, D, F), "down": (L, F, D)}
  weights = {
    "layers": {name: placed(s, (None, "fsdp"), jnp.float32) for name, s in shapes.items()},
    "table": placed((V, D), (None, "fsdp"), jnp.float32),
  }
  ids = placed((B, T), ("fsdp",), jnp.int32)
  rows = NamedSharding(mesh, PartitionSpec("fsdp"))
  lowered = jax.jit(functools.partial(step, rows=rows)).lower(weights, ids)
  with tempfile.TemporaryDirectory() as folder:
    lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
    text = max((f.read_text() for f in pathlib.Path(folder).glob("*after_codegen.txt")), key=len)
  # Not where files lie.
  text = re.sub(r'^(\d+) "/.*/', r'\1 "', text, flags=re.M)
  to = pathlib.Path(__file__).parent / "data" / "peer_step.hlo.gz"
  to.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
  main()
