"""Gradient accumulation by maxbatch, optax.microbatching, optax.MultiSteps and by hand, side by side.

One model, one batch, one run: time, memory of a program as compiled, programs over several numbers of
microbatches, collectives of a step on 8 simulated devices, and the error of the gradient relative to
the same loss's on the whole batch, with rows of very different lengths and with dropout.

B rows of a microbatch, k microbatches, T tokens, D width, H hidden width, V vocabulary.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import maxbatch as mb
from maxbatch.core.microbatch_size import program_bytes

B, T, D, H, V = 8, 64, 256, 1024, 512
COUNTS, MOST = (2, 4, 8), 8
SEED = 3
COLLECTIVE = re.compile(
  r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)

Params = dict[str, jax.Array]
Rows = dict[str, Any]


def parameters() -> Params:
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = {"embedding": (V, D), "up": (D, H), "down": (H, D), "output": (D, V)}
  return {
    name: 0.05 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def batch(size: int) -> Rows:
  """Rows of very different lengths."""
  random = np.random.default_rng(size)
  tokens = random.integers(0, V, (size, T + 1)).astype(np.int32)
  lengths = (T * random.random((size, 1)) ** 3).astype(int)
  weights = (np.arange(T) < lengths).astype(np.float32)
  ids = np.arange(size, dtype=np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "id": ids}


def losses(params: Params, rows: Rows, keep_BTD: jax.Array | float) -> jax.Array:
  x_BTD = params["embedding"][rows["inputs"]]
  x_BTD = (x_BTD + jax.nn.gelu(x_BTD @ params["up"]) @ params["down"]) * keep_BTD
  logits_BTV = x_BTD @ params["output"]
  return rows["weights"] * optax.softmax_cross_entropy_with_integer_labels(
    logits_BTV, rows["targets"]
  )


def keep_by_sample(keys_B: jax.Array) -> jax.Array:
  return jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (T, D)))(keys_B) / 0.9


def loss_sum(params: Params, rows: Rows, dropout: bool) -> jax.Array:
  """Of rows that know their keys."""
  keep = keep_by_sample(mb.sample_keys(jax.random.key(SEED), rows["id"])) if dropout else 1.0
  return losses(params, rows, keep).sum()


def mean_loss(params: Params, rows: Rows, dropout: bool) -> jax.Array:
  """As it is usually written: the mean over the tokens at hand, with one key for all of them."""
  shape = *rows["inputs"].shape, D
  keep = jax.random.bernoulli(jax.random.key(SEED), 0.9, shape) / 0.9 if dropout else 1.0
  return losses(params, rows, keep).sum() / jnp.maximum(rows["weights"].sum(), 1.0)


class Method(NamedTuple):
  """A way to accumulate: from parameters and a batch of k·B rows to the mean gradient."""

  name: str
  prepare: Callable[[Rows, int, Mesh | None], tuple[Any, ...]]
  """The arguments of the program besides the parameters."""
  program: Callable[[bool, Mesh | None], Any]
  """Jitted; with dropout or without, over a mesh or on one device."""
  by_sample: bool
  """Whether dropout belongs to samples."""
  dispatches: bool = False
  """Whether the program is called for each microbatch, with a state."""


def placed(rows: Rows, mesh: Mesh | None, *spec: str | None) -> Rows:
  return rows if mesh is None else jax.device_put(rows, NamedSharding(mesh, PartitionSpec(*spec)))


def in_microbatches(rows: Rows, k: int, mesh: Mesh | None) -> tuple[Any, ...]:
  return mb.microbatches(rows, B, capacity=MOST, mesh=mesh)


def ours(dropout: bool, mesh: Mesh | None) -> Any:
  def loss(params: Params, rows: Rows, keys_B: Any) -> Any:
    keep = keep_by_sample(keys_B) if dropout else 1.0
    return {"loss": mb.Ratio(losses(params, rows, keep).sum(), rows["weights"].sum())}, {}

  @jax.jit
  def gradient(params: Params, rows: Rows, k: jax.Array) -> Params:
    sums = mb.accumulate(loss, mesh)(
      params, rows, k, mb.sample_keys(jax.random.key(SEED), rows["id"])
    )
    return jax.tree.map(lambda g: g / mb.divisor(sums.terms), sums.gradients)

  return gradient


def interleaved(rows: Rows, k: int, mesh: Mesh | None) -> tuple[Any, ...]:
  """optax.microbatching takes every MOST-th row for a microbatch."""
  cut, count = mb.microbatches(rows, B, capacity=MOST)
  flat = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), cut)
  return placed(flat, mesh, "data"), count


def optax_microbatching(of_sums: bool) -> Callable[[bool, Mesh | None], Any]:
  kind = optax.microbatching.AccumulationType
  accumulator = kind.SUM if of_sums else kind.RUNNING_MEAN

  def program(dropout: bool, mesh: Mesh | None) -> Any:
    def one(params: Params, rows: Rows) -> Any:
      if not of_sums:
        return jax.grad(mean_loss)(params, rows, dropout)
      return jax.grad(loss_sum)(params, rows, dropout), rows["weights"].sum()

    @jax.jit
    def gradient(params: Params, rows: Rows, k: jax.Array) -> Params:
      result = optax.microbatching.microbatch(one, 1, B, accumulator, num_real_microbatches=k)(
        params, rows
      )
      return jax.tree.map(lambda g: g / result[1], result[0]) if of_sums else result

    return gradient

  return program


def stacked(rows: Rows, k: int, mesh: Mesh | None) -> tuple[Any, ...]:
  cut = jax.tree.map(lambda x: x.reshape(k, B, *x.shape[1:]), rows)
  return (placed(cut, mesh, None, "data"),)


def scan(dropout: bool, mesh: Mesh | None) -> Any:
  @jax.jit
  def gradient(params: Params, rows: Rows) -> Params:
    def add(total: Params, one: Rows) -> tuple[Params, None]:
      return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, one, dropout)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), rows)
    return jax.tree.map(lambda g: g / len(rows["id"]), total)

  return gradient


MULTI_STEPS = {k: optax.MultiSteps(optax.sgd(1.0), k) for k in COUNTS}


def multi_steps(dropout: bool, mesh: Mesh | None) -> Any:
  def gradient(params: Params, rows: Rows, state: Any, k: int) -> Any:
    result = jax.grad(mean_loss)(params, rows, dropout)
    updates, state = MULTI_STEPS[k].update(result, state, params)
    return jax.tree.map(jnp.negative, updates), state

  return jax.jit(gradient, static_argnums=3)


METHODS = (
  Method("maxbatch", in_microbatches, ours, True),
  Method("optax.microbatching of sums", interleaved, optax_microbatching(True), True),
  Method("optax.microbatching of means", interleaved, optax_microbatching(False), False),
  Method("optax.MultiSteps", stacked, multi_steps, False, dispatches=True),
  Method("lax.scan by hand, of means", stacked, scan, False),
)


def run(method: Method, program: Any, params: Params, prepared: tuple[Any, ...], k: int) -> Params:
  """Returns the mean gradient of a batch."""
  if not method.dispatches:
    return program(params, *prepared)
  state, result = MULTI_STEPS[k].init(params), params
  for at in range(k):
    micro = jax.tree.map(lambda x, at=at: x[at], prepared[0])
    result, state = program(params, micro, state, k)
  return result


def whole(by_sample: bool, dropout: bool, params: Params, rows: Rows) -> Params:
  """Returns the gradient of the same loss in one piece."""
  if not by_sample:
    return jax.jit(jax.grad(mean_loss), static_argnums=2)(params, rows, dropout)
  total = jax.jit(jax.grad(loss_sum), static_argnums=2)(params, rows, dropout)
  return jax.tree.map(lambda g: g / rows["weights"].sum(), total)


def error(method: Method, params: Params, dropout: bool) -> float:
  rows = batch(MOST * B)
  result = run(
    method, method.program(dropout, None), params, method.prepare(rows, MOST, None), MOST
  )
  reference = whole(method.by_sample, dropout, params, rows)
  difference = jax.tree.map(jnp.subtract, result, reference)
  return float(optax.tree.norm(difference) / optax.tree.norm(reference))


def lowered(method: Method, program: Any, params: Params, k: int, mesh: Mesh | None) -> Any:
  prepared = method.prepare(batch(k * B), k, mesh)
  if not method.dispatches:
    return program.lower(params, *prepared)
  micro = jax.tree.map(lambda x: x[0], prepared[0])
  micro = placed(micro, mesh, "data")
  return program.lower(params, micro, MULTI_STEPS[k].init(params), k)


def collectives(text: str, method: Method, k: int) -> int:
  """Returns how many a step of k microbatches runs."""
  bodies = set(re.findall(r"(?:body|condition)=%?([\w.\-]+)", text))
  times, total = 1, 0
  for line in text.splitlines():
    if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
      times = k if head[1] in bodies or method.dispatches else 1
    total += times * bool(COLLECTIVE.search(line))
  return total


def programs(method: Method, params: Params) -> int:
  program = method.program(True, None)
  for k in COUNTS:
    run(method, program, params, method.prepare(batch(k * B), k, None), k)
  return program._cache_size()


def seconds(methods: tuple[Method, ...], params: Params, repeats: int) -> list[float]:
  """Returns the median time of each, run in turns."""
  ready = [(m, m.program(True, None), m.prepare(batch(MOST * B), MOST, None)) for m in methods]
  clocks: list[list[float]] = [[] for _ in methods]
  for turn in range(repeats + 1):
    for at, (method, program, prepared) in enumerate(ready):
      began = time.perf_counter()
      jax.block_until_ready(run(method, program, params, prepared, MOST))
      if turn:
        clocks[at].append(time.perf_counter() - began)
  return [statistics.median(clock) for clock in clocks]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--repeats", type=int, default=9, help="timed runs of each")
  repeats = parser.parse_args().repeats
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
  params = parameters()
  clocks = seconds(METHODS, params, repeats)
  print("| | time | memory | programs | collectives | error, padding | error, and dropout |")
  print("|---|---|---|---|---|---|---|")
  first = program_bytes(lowered(METHODS[0], ours(True, None), params, MOST, None).compile()) or 1
  for method, clock in zip(METHODS, clocks, strict=True):
    needed = program_bytes(
      lowered(method, method.program(True, None), params, MOST, None).compile()
    )
    over = lowered(method, method.program(True, mesh), params, MOST, mesh).compile().as_text()
    cells = (
      f"{clock / clocks[0]:.2f}",
      f"{(needed or 0) / first:.2f}",
      f"{programs(method, params)}",
      f"{collectives(over or '', method, MOST)}",
      *(f"{error(method, params, dropout):.1g}" for dropout in (False, True)),
    )
    print(f"| {method.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
  main()
