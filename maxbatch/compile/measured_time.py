"""How long a compiled step takes on the devices that are here, without touching the training.

The state is made for the purpose and freed afterwards, the rows are synthetic; no sample, no random
key and no array of the run is used.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.data.rows import Rows
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.sharding import replicated
from maxbatch.training.evaluation import EvalStep, eval_shardings
from maxbatch.training.state import TrainState, stop_flags
from maxbatch.training.step import Step, Trainer, rows_shardings

SECONDS = 4.0
"""How long the repeats of one program take together, roughly, unless asked otherwise."""
_FEWEST = 3
_MOST_A_SECOND = 3.75
"""Repeats."""
_LONG_SECONDS = 20.0
"""A program that takes longer is timed once. With all repeats each step of a minute would cost a quarter of
an hour."""
_TOKENS = 251
"""Synthetic token ids are below this; the smallest vocabulary of a real tokenizer has more."""


@dataclasses.dataclass(frozen=True)
class Timing:
  """A step of n microbatches takes seconds_rest + n × seconds_per_microbatch."""

  seconds_per_microbatch: float
  seconds_rest: float
  spread: float
  """Half the range that holds the middle half of the repeats, as a share of their median; 0 where there is
  one."""
  repeats: int
  seconds_without_ticks: float | None = None
  """Seconds of a fused pipeline's step with an empty timetable, which is neither microbatch nor
  filling."""


def measure_step(
  trainer: Trainer,
  step: Step,
  shapes: Rows,
  *,
  streamed: bool,
  num_microbatches: int,
  seconds: float | None = None,
  clock: Callable[[], float] = time.perf_counter,
) -> Timing:
  """Times steps of one microbatch and of more, to separate the time of a microbatch from the rest; a long
  step of one microbatch is timed once, and is all the microbatch's.

  Args:
    shapes: the rows it takes: (capacity, B, …), with capacity 1 when streamed.
    streamed: one dispatch per microbatch, instead of one for all.
    num_microbatches: of the run's step; as many are timed if that is quick, at least 2 where they fit.
    seconds: how long the repeats may take together, roughly; None: SECONDS.

  In several processes all must call it together, and repeat as often as process 0's clock says.
  """
  bench = _Bench(trainer, step, shapes, streamed, clock)
  try:
    most = max(2, num_microbatches)
    if not streamed:
      pipeline, capacity = trainer.pipeline, shapes.inputs.shape[0]
      most = min(most, capacity, pipeline.max_num_microbatches if pipeline else capacity)
    first = bench.run(1)  # The first run of a program loads it.
    if broadcast_one_to_all(first > _LONG_SECONDS):
      return Timing(first, 0.0, 0.0, 1)
    many, repeats = broadcast_one_to_all(_affordable(bench.run(1), most, seconds or SECONDS))
    bench.run(many)
    pairs = [(bench.run(1), bench.run(many)) for _ in range(repeats)]
    empty = [bench.run(0) for _ in range(_FEWEST)] if trainer.pipeline and not streamed else ()
  finally:
    bench.free()
  return _timing([one for one, _ in pairs], [more for _, more in pairs], many, empty)


def measure_evaluation(
  trainer: Trainer, step: EvalStep, shapes: Rows, clock: Callable[[], float] = time.perf_counter
) -> Timing:
  """Times evaluations of one batch, each a microbatch of the timing, beside a state of the run's size.

  Args:
    shapes: the rows it takes: (B, …).

  In several processes all must call it together.
  """
  first = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes)
  places = eval_shardings(shapes, trainer.mesh)
  rows = jax.jit(lambda rows: jax.tree.map(lambda x: x[0], rows), out_shardings=places)(
    synthetic(trainer, first)
  )
  state = trainer.init(0)

  def run() -> float:
    jax.block_until_ready((state, rows))
    began = clock()
    jax.block_until_ready(step(state.parameters, rows))
    return clock() - began

  try:
    first = run()  # The first run of a program loads it.
    if broadcast_one_to_all(first > _LONG_SECONDS):
      return Timing(first, 0.0, 0.0, 1)
    _, repeats = broadcast_one_to_all(_affordable(run(), 1, SECONDS))
    times = [run() for _ in range(repeats)]
  finally:
    _free((state, rows))
  return _timing(times, times, 1)


class _Bench:
  """A state and rows of its own, and a clock."""

  def __init__(
    self, trainer: Trainer, step: Step, shapes: Rows, streamed: bool, clock: Callable[[], float]
  ):
    self._trainer, self._step, self._streamed, self._clock = trainer, step, streamed, clock
    self._rate = np.float32(0.0)  # The parameters stay what they are, however often it runs.
    self._rows = synthetic(trainer, shapes)
    self._state: TrainState = trainer.init(0)

  def run(self, num_microbatches: int) -> float:
    """Returns seconds of a step."""
    self._begin_step(num_microbatches)
    jax.block_until_ready((self._state, self._rows))
    began = self._clock()
    flags = stop_flags(self._trainer.mesh)
    dispatches = num_microbatches if self._streamed else 1
    rows, parameters = [self._rows] * dispatches, self._state.parameters
    denominators = self._trainer.denominators(rows, parameters)
    inputs = self._trainer.microbatches(num_microbatches, denominators), self._rate
    for _ in range(dispatches):
      arguments = self._state, self._rows, *inputs, *(() if flags is None else (flags,))
      self._state, _ = self._step(*arguments)
    jax.block_until_ready(self._state)
    return self._clock() - began

  def _begin_step(self, num_microbatches: int) -> None:
    """Lets a streamed step end after so many dispatches, whatever the plan's has."""
    if not self._streamed:
      return
    trainer, opt_state = self._trainer, self._state.opt_state
    whole_step = int(trainer.optimizer.every_k(np.asarray(opt_state.gradient_step)))  # pyright: ignore[reportArgumentType]
    begun = jax.device_put(np.int32(whole_step - num_microbatches), replicated(trainer.mesh))
    self._state = self._state._replace(opt_state=opt_state._replace(mini_step=begun))

  def free(self) -> None:
    """Gives the devices' memory back at once."""
    _free((self._state, self._rows))


def _free(arrays: Any) -> None:
  for leaf in jax.tree.leaves(arrays):
    if not leaf.is_deleted():
      leaf.delete()


def synthetic(trainer: Trainer, shapes: Rows) -> Any:
  """Makes what the step is fed, where it lies: rows of arbitrary tokens that all count, and ones."""
  values: dict[str, Callable[[Any], jax.Array]] = {
    "inputs": lambda x: (_numbered(x, 2) * 7 + _numbered(x, 1)) % _TOKENS,
    "targets": lambda x: (_numbered(x, 2) * 11 + _numbered(x, 1)) % _TOKENS,
    "weights": lambda x: jnp.ones(x.shape, x.dtype),
    "sample_ids": lambda x: _numbered(x, 1),
    "checksums": lambda x: _numbered(x, 1),
    # One segment as long as the row: the most that a token can see.
    "segment_ids": lambda x: jnp.ones(x.shape, x.dtype),
    "positions": lambda x: _numbered(x, 2),
  }

  batch = trainer.loss.batch_shapes(shapes)

  def made(x: Any) -> Any:
    if not isinstance(x, Rows):
      # No zeros: completions without an advantage are not run through the model.
      ones = jnp.ones(x.shape, x.dtype)
      return ones if jnp.issubdtype(x.dtype, jnp.floating) else ~jnp.zeros_like(ones)
    fields = {name: None if x is None else values[name](x) for name, x in x._asdict().items()}
    return Rows(**fields)  # pyright: ignore[reportArgumentType]

  def make() -> Any:
    return jax.tree.map(made, batch, is_leaf=lambda x: isinstance(x, Rows))

  return jax.jit(make, out_shardings=rows_shardings(batch, trainer.mesh))()


def _numbered(x: Any, dim: int) -> jax.Array:
  """Returns each entry's number along `dim`: microbatches, rows, tokens."""
  return jax.lax.broadcasted_iota(x.dtype, x.shape, dim)


def _affordable(one: float, most: int, seconds: float) -> tuple[int, int]:
  """Returns microbatches of the longer step, and repeats, when a step of one takes `one`
  seconds."""
  one = max(one, 1e-6)
  many = min(most, max(2, int(seconds / (_FEWEST * one))))
  enough = max(_FEWEST, int(_MOST_A_SECOND * seconds))
  repeats = min(enough, max(_FEWEST, int(seconds / ((1 + many) * one))))
  return many, repeats


def _timing(
  ones: Sequence[float], mores: Sequence[float], many: int, empty: Sequence[float] = ()
) -> Timing:
  """Solves one = rest + each, more = rest + many × each, in medians."""
  one, more = statistics.median(ones), statistics.median(mores)
  low, _, high = statistics.quantiles(mores, n=4, method="inclusive")
  each = (more - one) / max(1, many - 1)
  rest = one - each
  if many == 1 or each <= 0 or rest < 0:
    # No difference, or less than the clock's scatter: all belongs to the microbatches.
    each, rest = more / many, 0.0
  without_ticks = statistics.median(empty) if empty else None
  return Timing(each, rest, (high - low) / 2 / more, len(mores), without_ticks)
