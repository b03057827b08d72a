"""The section of configuration keys of reinforcement learning; schema.py has the others."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.allowed import (
  FLOAT32,
  INT32,
  CountOrUnset,
  DevicesOrNone,
  NonNegative,
  NonNegativeFloat,
  Positive,
  Probability,
  Range,
  Seconds,
)


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Reinforcement learning: what is sampled for a prompt, how it is rewarded, and GRPO's loss."""

  # The sizes; batch_size then counts prompts, and micro_batch_size pairs (batch/rl_sizes.py).
  num_generations: Annotated[int, Range(low=2, limit=INT32, also=-1)]
  num_iterations: Positive
  max_prefill_predict_length: Positive
  rollout_devices: DevicesOrNone
  # A snapshot of the parameters for each.
  rollout_staleness: Annotated[int, Range(low=0, high=64)]
  # The prompts.
  rl_task: str
  warm_start_steps: NonNegative
  num_prompts: CountOrUnset
  leftover_prompts: Literal["carry", "drop", "error"]
  # The rewards.
  reward_functions: tuple[str, ...]
  reward_processes: Annotated[int, Range(low=1, high=256)]
  reward_timeout_seconds: Seconds
  reward_failure: Literal["stop", "zero"]
  # The loss.
  loss_type: Literal["dapo", "grpo", "dr_grpo"]
  scale_rewards: Literal["group", "none"]
  grpo_beta: NonNegativeFloat
  grpo_epsilon: Probability
  grpo_epsilon_high: Annotated[float, Range(low=0, limit=FLOAT32, also=-1)]
  importance_sampling_cap: NonNegativeFloat
