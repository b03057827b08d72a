"""The records of steps, with what their rollouts count, and what must hold of them."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.precision.formats import compute_format
from maxbatch.rl.grpo import LARGEST_GAP, MODEL_METRICS
from maxbatch.rl.microbatches import Counts, step_values
from maxbatch.run_folder.metrics import Record
from maxbatch.training.step import StepMetrics


class TrainingClock:
  """Waits for each dispatch of training in a thread; a context manager.

  Devices run their programs in the order of dispatch: a microbatch is trained on from its dispatch on,
  or from the end of the one before, and what is sampled after it begins at its end. (The CPU runs both
  at once, and then both count in full.)
  """

  def __init__(self) -> None:
    """Starts with nothing under way."""
    self._waiting = ThreadPoolExecutor(1, thread_name_prefix="training_clock")
    self._times: list[Future[float]] = []
    self._ended = 0.0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._waiting.shutdown(wait=False, cancel_futures=True)

  def dispatched(self, metrics: StepMetrics) -> None:
    """Takes note of a microbatch whose training is under way from now on."""
    self._times.append(self._waiting.submit(self._until, metrics.loss, time.perf_counter()))

  def last_end(self) -> float:
    """Returns when the last training ended that has, by time.perf_counter."""
    return self._ended

  def seconds(self) -> float:
    """Returns the seconds of the training dispatched since this was last asked; waits for it."""
    times, self._times = self._times, []
    return sum(each.result() for each in times)

  def _until(self, result: jax.Array, dispatched: float) -> float:
    jax.block_until_ready(result)
    began, self._ended = max(dispatched, self._ended), time.perf_counter()
    return self._ended - began


GAP_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625, "cbfloat16": 0.125}
"""By the type of the activations, the most by which two ways to compute a log-probability may differ
by rounding, at temperature 1."""


class StepRecords:
  """Completes the records of steps."""

  def __init__(
    self,
    plan: RLPlan,
    config: Config,
    feed_watchdog: Callable[[], None],
    train_seconds: Callable[[], float],
  ):
    """Knows of no step.

    Args:
      plan: the run's.
      config: the run.
      feed_watchdog: is told that the run goes on.
      train_seconds: how long the devices trained since it was last asked.
    """
    self._plan, self._config, self._feed_watchdog = plan, config, feed_watchdog
    self._train_seconds = train_seconds
    self._counts: dict[int, list[Counts]] = {}

  def note(self, step: int, counts: list[Counts]) -> None:
    """Takes note of what the microbatches of a step count; steps are numbered from 0."""
    self._counts[step] = counts

  def goes_on(self) -> None:
    """Takes note that completions were sampled and rewarded."""
    self._feed_watchdog()

  def completed(self, record: Record) -> Record:
    """Returns the record of a step with the metrics of its rollout.

    Raises:
      UserError: sampler and trainer give other probabilities to what was sampled.
    """
    plan = self._plan
    step = int(record["step"]) - 1
    batch, counts = plan.batch_of_step(step), self._counts.pop(step)
    skipped = [] if plan.has_reference else [each for each in counts if not each.live_G.any()]
    values = step_values(counts, plan.num_generations)
    if len(skipped) == len(counts):  # The model was not run: there is nothing that it says.
      record = {name: value for name, value in record.items() if name not in MODEL_METRICS}
    elif plan.begins_batch(step) and not plan.lag(batch):
      # A skipped step may have none: what is not finite is no record.
      check_gap(self._config, batch, record.get(LARGEST_GAP, 0.0))
    made = values["rl/rollout_seconds"] + values["rl/reward_seconds"]
    if not plan.begins_batch(step):
      made = 0.0  # It was made for the first step on the batch.
    train = self._train_seconds()
    hidden, shorter = made + train - record["step_seconds"], min(made, train)
    own = {
      "rl/train_seconds": train,
      "rl/ideal_seconds": max(made, train) + shorter / plan.num_microbatches,
      "rl/overlap_fraction": min(max(hidden / shorter, 0.0), 1.0) if shorter else 0.0,
      "rl/skipped_microbatches": float(len(skipped)),
      "rl/staleness": float(plan.lag(batch)),
      "rl/dropped_prompts": float(plan.dropped_prompts(batch + 1)),
    }
    return record | values | own


def check_gap(config: Config, batch: int, gap: float) -> None:
  """Checks that training computes the probabilities that the completions were sampled with.

  Args:
    config: the run.
    batch: of completions, sampled by the policy that is trained.
    gap: the largest difference of a token's two log-probabilities.

  Raises:
    UserError: it is more than rounding.
  """
  dtype = compute_format(config.precision).name
  temperature = config.run.decode_sampling_temperature
  bound = GAP_BOUNDS[dtype] / min(temperature, 1.0)
  if gap <= bound:
    return
  raise UserError(
    f"batch {batch}: the log-probability of a sampled token differs by {gap:.3g} between sampling and "
    f"training, where rounding in dtype={dtype} makes {bound:.3g} at most: they compute different "
    "models, and the gradient would be of another policy; for example attention=dot_product, or "
    "precision=float32"
  )
