"""The records of steps, with what their rollouts count, and what must hold of them."""

from collections.abc import Callable

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.precision.formats import compute_format
from maxbatch.rl.grpo import LARGEST_GAP, MEAN_GAP, MODEL_METRICS
from maxbatch.rl.microbatches import Counts, step_values
from maxbatch.run_folder.metrics import Record

GAP_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625, "cbfloat16": 0.125}
"""By the type of the activations, the most by which two ways to compute a log-probability may differ
by rounding, at temperature 1."""


class StepRecords:
  """Completes the records of steps."""

  def __init__(
    self, plan: RLPlan, config: Config, feed_watchdog: Callable[[], None], *, skips: bool
  ):
    """Knows of no step.

    Args:
      plan: the run's.
      config: the run.
      feed_watchdog: is told that the run goes on.
      skips: whether microbatches of which nothing is learned skip the model.
    """
    self._plan, self._config, self._feed_watchdog = plan, config, feed_watchdog
    self._skips = skips
    self._trained: list[Callable[[], float]] = []
    self._counts: dict[int, list[Counts]] = {}

  def note(self, step: int, counts: list[Counts]) -> None:
    """Takes note of what the microbatches of a step count; steps are numbered from 0."""
    self._counts[step] = counts

  def trained(self, seconds: Callable[[], float]) -> None:
    """Takes note of a microbatch whose training is dispatched, for so many seconds."""
    self._trained.append(seconds)

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
    skipped = [each for each in counts if self._skips and not each.live_G.any()]
    values = step_values(counts, plan.num_generations)
    if len(skipped) == len(counts):  # The model was not run: there is nothing that it says.
      record = {name: value for name, value in record.items() if name not in MODEL_METRICS}
    elif plan.begins_batch(step) and not plan.lag(batch):
      # A skipped step may have none: what is not finite is no record.
      check_gap(self._config, batch, record)
    made = values["rl/rollout_seconds"] + values["rl/reward_seconds"]
    if not plan.begins_batch(step):
      made = 0.0  # It was made for the first step on the batch.
    train, self._trained = sum(seconds() for seconds in self._trained), []
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


def check_gap(config: Config, batch: int, record: Record) -> None:
  """Checks that training computes the probabilities that the completions were sampled with.

  Args:
    config: the run.
    batch: of completions, sampled by the policy that is trained.
    record: has the difference of a token's two log-probabilities, if the model was run: the largest, and
      the mean, by which mixtures of experts are judged. (Where rounding flips the expert of one token,
      its own difference may be of any size, unless rollout_routing_replay flips it back.)

  Raises:
    UserError: it is more than rounding.
  """
  dtype = compute_format(config.precision).name
  keys, bounds = f"dtype={dtype}", [dtype]
  if config.precision.quantization != "none":
    # Eight bits are as many as bfloat16 has, and another order of sums rounds some of them the other way.
    keys, bounds = f"{keys} quantization={config.precision.quantization}", [*bounds, "bfloat16"]
  temperature = config.run.decode_sampling_temperature
  bound = max(GAP_BOUNDS[each] for each in bounds) / min(temperature, 1.0)
  mixture = config.model.num_experts > 1 and not config.rl.rollout_routing_replay
  gap = record.get(MEAN_GAP if mixture else LARGEST_GAP, 0.0)
  if gap <= bound:
    return
  raise UserError(
    f"batch {batch}: the log-probability of a sampled token differs by {gap:.3g}"
    f"{' on average' * mixture} between sampling and training, where rounding in {keys} makes "
    f"{bound:.3g} at most: they compute different models, and the gradient would be of another policy; "
    "for example attention=dot_product, or precision=float32"
  )
