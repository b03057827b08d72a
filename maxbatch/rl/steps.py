"""The records of steps, with what their rollouts count, and what must hold of them."""

from collections.abc import Callable

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.precision.formats import compute_format
from maxbatch.rl.grpo import LARGEST_GAP
from maxbatch.rl.microbatches import Counts, step_values
from maxbatch.run_folder.metrics import Record

GAP_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625, "cbfloat16": 0.125}
"""By the type of the activations, the most by which two ways to compute a log-probability may differ
by rounding, at temperature 1."""


class StepRecords:
  """Completes the records of steps."""

  def __init__(self, plan: RLPlan, config: Config, feed_watchdog: Callable[[], None]):
    """Args: the run's plan and configuration, and what is told that the run goes on."""
    self._plan, self._config, self._feed_watchdog = plan, config, feed_watchdog
    self._waited = 0.0
    self._counts: dict[int, list[Counts]] = {}

  def note(self, step: int, counts: list[Counts]) -> None:
    """Takes note of what the microbatches of a step count; steps are numbered from 0."""
    self._counts[step] = counts

  def waited(self, seconds: float) -> None:
    """Takes note that training has waited for pairs, which are sampled or rewarded."""
    self._waited += seconds
    self._feed_watchdog()

  def completed(self, record: Record) -> Record:
    """The record of a step with the metrics of its rollout.

    Raises:
      UserError: sampler and trainer give other probabilities to what was sampled.
    """
    plan = self._plan
    step = int(record["step"]) - 1
    batch, counts = plan.batch_of_step(step), self._counts.pop(step)
    values = step_values(counts, plan.num_generations)
    if plan.begins_batch(step) and not plan.lag(batch):
      # A skipped step may have none: what is not finite is no record.
      check_gap(self._config, batch, record.get(LARGEST_GAP, 0.0))
    made = values["rl/rollout_seconds"] + values["rl/reward_seconds"]
    # Within the seconds of this record, which is made when the next step's pairs are there.
    waited, self._waited = self._waited, 0.0
    train = max(record["step_seconds"] - waited, 0.0)
    own = {
      "rl/train_seconds": train,
      "rl/ideal_seconds": max(made, train) + min(made, train) / plan.num_microbatches,
      "rl/overlap_fraction": min(max(1 - record["data_wait_seconds"] / made, 0.0), 1.0),
      "rl/staleness": float(plan.lag(batch)),
      "rl/dropped_prompts": float(plan.dropped_prompts(batch + 1)),
    }
    return record | values | own


def check_gap(config: Config, batch: int, gap: float) -> None:
  """Checks that training computes the probabilities that the completions were sampled with.

  Args:
    config: the run.
    batch: of pairs, sampled by the policy that is trained.
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
