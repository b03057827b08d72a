"""What a run needs at the very least of a device's memory, refused before anything is allocated."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from maxbatch.batch.from_config import is_rl
from maxbatch.compile.program import capacity_bytes, gib
from maxbatch.config.experts import hidden_width
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device
from maxbatch.precision.formats import compute_format
from maxbatch.training.build import streams
from maxbatch.training.state import TrainState

_ALWAYS = ("parameters", "optimizer state", "accumulators")
"""What every run has, be it nothing."""
_ROW_BYTES_PER_TOKEN = 12
"""Inputs, targets and weights; packed rows have more."""


def check_memory(
  config: Config,
  plan: BatchPlan,
  state: TrainState,
  devices: Sequence[Device],
  beside: Mapping[str, int] = MappingProxyType({}),
) -> str:
  """Checks that the run fits, and says what every device holds between steps.

  Args:
    devices: those of the run; simulated ones share the memory of the machine.
    beside: bytes that each holds besides, by name.

  Raises:
    UserError: state, rows of a dispatch or activations of a layer are more than a device has.
  """
  accumulators = bytes_per_device(state.opt_state.acc_grads)
  sizes = {
    "parameters": bytes_per_device(state.params),
    "frozen parameters": bytes_per_device(state.frozen),
    "optimizer state": bytes_per_device(state.opt_state) - accumulators,
    "accumulators": accumulators,
    **beside,
  }
  said = {name: size for name, size in sizes.items() if size or name in _ALWAYS}
  parts = ", ".join(f"{name} {gib(size)}" for name, size in said.items())
  total, capacity = sum(sizes.values()), _capacity(config, devices)
  if total > capacity:
    raise UserError(
      f"{_given(config, capacity)} is less than the {gib(total)} that every device holds before it "
      f"computes anything ({parts}); for example {_offer(config, plan, total, capacity)}"
    )
  _check_batch(config, plan, capacity - total, capacity)
  return f"{gib(total)} per device between steps: {parts}"


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes of the abstract arrays' parts on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * item_bytes(x) for x in leaves)


def item_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  """Returns the bytes of one element."""
  return np.dtype(leaf.dtype).itemsize


def _capacity(config: Config, devices: Sequence[Device]) -> float:
  try:
    return capacity_bytes(devices, config.compile.device_memory_gb)
  except UserError:
    return math.inf  # A kind of device that does not say: it will when the step is compiled.


def _given(config: Config, capacity: float) -> str:
  if config.compile.device_memory_gb:
    return f"device_memory_gb={config.compile.device_memory_gb:g}"
  return f"A device's memory of {gib(capacity)}"


def _offer(config: Config, plan: BatchPlan, total: int, capacity: float) -> str:
  shards, there = config.mesh.ici_fsdp_parallelism, plan.topology.num_devices
  ways = [n for n in range(1, there + 1) if there % n == 0 and total * shards / n <= capacity]
  return f"ici_fsdp_parallelism={ways[0]}" if ways else "a smaller model, or more devices"


def _check_batch(config: Config, plan: BatchPlan, free: float, capacity: float) -> None:
  """Checks the rows of a dispatch, and what one layer of one microbatch reads and writes."""
  model = config.model
  widest = max(model.base_emb_dim, hidden_width(model), model.base_num_query_heads * model.head_dim)
  width = widest * compute_format(config.precision).bytes / plan.topology.shape["tensor"]
  chunks = plan.topology.shape["stage"]
  sizes = [
    (max(plan.micro_batches), "per_device_batch_size"),
    (plan.eval_batch, "eval_per_device_batch_size"),
  ]
  # Reinforcement learning evaluates by sampling.
  for micro_batch, key in sizes[:1] if is_rl(config.rl) else sizes:
    tokens = plan.device_tokens(micro_batch)
    rows = tokens if key.startswith("eval") else plan.dispatched_tokens(streams(config))
    needed = float(rows * _ROW_BYTES_PER_TOKEN + tokens * width / chunks)
    if needed > free:
      size = plan.per_device(micro_batch)
      fitting = math.floor(size * Fraction(free) / Fraction(needed))
      smaller = f"at most {fitting} fit" if fitting else "fewer gradient accumulation steps may"
      raise UserError(
        f"{key}={text(size)}: a device needs at least {gib(needed)} for the rows of "
        f"{plan.num_microbatches:,} gradient accumulation steps and for what one layer "
        f"computes, besides the state, and has {gib(capacity)}; {smaller}"
      )
