"""Keys of the optimizer, of the gradient noise scale and of reinforcement learning."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  FIXED,
  FLOAT32,
  INT32,
  PER_START,
  CountOrUnset,
  CountOrZeroOrUnset,
  DevicesOrNone,
  Example,
  Name,
  NonNegative,
  NonNegativeFloat,
  Positive,
  PositiveOrUnset,
  Probability,
  Range,
  Seconds,
  Section,
  key,
)
from maxbatch.config.keys.read_when import (
  ADAM,
  BUILT_IN_TASK,
  CALIBRATED,
  CHANGING_BATCH,
  DECAY,
  EXPERTS,
  FINITE_PROMPTS,
  FIRST_MOMENT,
  MEASURED,
  NOISE_SCHEDULE,
  RL,
  ROLLOUT_DEVICES,
  ROLLOUTS,
  SGD,
  WARMUP_FRACTION,
  WSD,
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section, heading="the optimizer"):
  """The optimizer, its learning rate, and which parameters it changes."""

  opt_type: Name = key("adamw", FIXED)
  """Optimizer: adamw, sgd, adafactor or muon."""
  learning_rate: NonNegativeFloat = key(0.003, CHANGEABLE)
  """Peak learning rate."""
  lr_schedule_type: Name = key("cosine", CHANGEABLE)
  """Learning rate schedule: constant, cosine, linear or wsd (warm-up, stable, decay)."""
  learning_rate_schedule_steps: CountOrUnset = key(-1, CHANGEABLE)
  """Length of the schedule, warm-up included, in schedule_unit; -1: the whole budget."""
  learning_rate_batch_coupling: Literal["auto", "none", "linear", "sqrt"] = key(
    "auto", CHANGEABLE, CHANGING_BATCH
  )
  """Scale the learning rate with batch / final batch (gns, file, seesaw: first batch): none,
  linear (for SGD), sqrt (for Adam); auto: sqrt with those three."""
  warmup_steps: CountOrZeroOrUnset = key(-1, CHANGEABLE)
  """Length of the warm-up in schedule_unit; -1: warmup_steps_fraction of the schedule."""
  warmup_steps_fraction: Probability = key(0.1, CHANGEABLE, WARMUP_FRACTION)
  """Length of the warm-up as a fraction of the schedule."""
  learning_rate_final_fraction: Probability = key(0.1, CHANGEABLE, DECAY)
  """Final learning rate as a fraction of the peak."""
  wsd_decay_steps_fraction: Probability = key(0.1, CHANGEABLE, WSD)
  """Length of the decay in wsd as a fraction of the schedule after the warm-up."""
  gradient_clipping_threshold: NonNegativeFloat = key(1.0, CHANGEABLE)
  """Maximum global norm of the gradient, averaged over the step's tokens; 0: no clipping."""
  adam_b1: Annotated[float, Range(low=0, high=0.99999)] = key(0.9, FIXED, ADAM)
  """adamw, muon: decay rate of the gradient's moving average."""
  adam_b2: Annotated[float, Range(low=0, high=0.999999)] = key(0.95, FIXED, ADAM)
  """adamw, muon: decay rate of the squared gradient's moving average."""
  adam_eps: NonNegativeFloat = key(1e-08, CHANGEABLE, ADAM)
  """adamw, muon: epsilon added to the denominator."""
  adam_weight_decay: NonNegativeFloat = key(0.1, CHANGEABLE, ADAM)
  """adamw, muon: weight decay of matrices; norms and biases are not decayed."""
  sgd_momentum: Annotated[float, Range(low=0, high=0.99999)] = key(0.9, FIXED, SGD)
  """sgd: momentum."""
  mu_dtype: Literal["float32", "bfloat16"] = key("float32", FIXED, FIRST_MOMENT)
  """Data type of the first moment of adamw and muon, or of sgd's momentum; bfloat16 saves 2 bytes a
  parameter."""
  optimizer_memory_host_offload: bool = key(False, CHANGEABLE)
  """Keep the optimizer's state in host memory between updates, for devices whose memory it fills;
  false: on the devices."""
  trainable: Annotated[tuple[str, ...], Example('["layers/attention/*", "head"]')] = key((), FIXED)
  """Patterns of the paths of parameters that train, for example ["layers/attention/*", "head"];
  others are frozen; []: all, or only the adapters with lora_rank."""

  batch_by_group: Annotated[
    tuple[tuple[str, Annotated[int, Range(low=1, high=1024)]], ...], Example("[[embedding, 2]]")
  ] = key((), FIXED)
  """Patterns of paths, each with a number of steps over which gradients accumulate for an update:
  [[embedding, 2]]; []: one for all."""


@dataclasses.dataclass(frozen=True)
class NoiseConfig(Section, heading="the gradient noise scale: which batch size is worth using"):
  """How the gradient noise scale is measured and reported, and how it may steer the batch."""

  gns: Literal["off", "norm", "all"] = key("off", CHANGEABLE)
  """Measure the gradient noise scale per example: off, norm (normalization layers only, cheapest)
  or all (every layer)."""
  gns_from_microbatches: bool = key(False, CHANGEABLE)
  """Also estimate it from the gradients of whole microbatches; in reinforcement learning by
  prompts: whether more prompts or more generations help."""
  gns_window_steps: Annotated[int, Range(low=8, limit=INT32)] = key(64, CHANGEABLE, MEASURED)
  """Steps over which an estimate averages; more: less noise, slower response."""
  gns_calibrate_every: NonNegative = key(10, CHANGEABLE, CALIBRATED)
  """With gns: norm, steps between measurements of all layers, which calibrate the whole model's
  prediction (it takes about 20 of them); 0: never."""
  gns_report_every: NonNegative = key(100, CHANGEABLE, MEASURED)
  """Steps between log lines with the noise scale; 0: one at the end."""
  gns_hold_tokens: CountOrZeroOrUnset = key(
    -1, CHANGEABLE, NOISE_SCHEDULE, old_names=("gns_dwell_tokens",)
  )
  """Least number of tokens that batch_schedule: gns trains with a batch size; -1: 1/50 of the
  run."""
  gns_windows_before_growth: Positive = key(3, CHANGEABLE, NOISE_SCHEDULE)
  """Consecutive windows, half overlapping, that must agree before the batch grows."""
  gns_dry_run: bool = key(False, CHANGEABLE, NOISE_SCHEDULE)
  """Log what batch_schedule: gns would do without changing the batch."""


@dataclasses.dataclass(frozen=True)
class RLConfig(Section, heading="reinforcement learning"):
  """Reinforcement learning: what is sampled for a prompt, how it is rewarded, and GRPO's loss."""

  # The sizes; batch_size then counts prompts, and micro_batch_size completions (batch/rl_sizes.py).
  num_generations: Annotated[int, Range(low=2, limit=INT32, also=-1)] = key(-1, FIXED)
  """Completions per prompt (a group); batch_size then counts prompts, micro_batch_size completions
  on all devices; -1: no reinforcement learning."""
  num_iterations: Positive = key(1, FIXED, RL)
  """Optimizer steps per batch of completions; more: fewer rollouts, further from the policy that
  sampled."""
  max_prefill_predict_length: Positive = key(64, CHANGEABLE, RL)
  """Longest prompt, in tokens; the rest of max_target_length is for the completion."""
  rollout_devices: DevicesOrNone = key(0, CHANGEABLE, ROLLOUTS)
  """Devices that only sample, beside the mesh that trains; 0: all devices alternate."""
  rollout_data_parallelism: PositiveOrUnset = key(-1, CHANGEABLE, ROLLOUT_DEVICES)
  """Copies of the policy on the rollout devices; of this key and the next three one may be -1: all
  devices that the others leave."""
  rollout_fsdp_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES)
  """Rollout devices that store the parts of a copy and gather those of a layer when they use it; each
  samples completions of its own."""
  rollout_expert_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES, EXPERTS)
  """Rollout devices over which a mixture's experts are divided; each samples completions of its own."""
  rollout_tensor_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES)
  """Rollout devices over which each matrix product is sharded; they sample the same completions."""
  # A snapshot of the parameters for each.
  rollout_staleness: Annotated[int, Range(low=0, high=64)] = key(0, CHANGEABLE, RL)
  """Steps by which the sampling policy lags, so that the next batch is sampled meanwhile; 0:
  overlap within a batch only, exactly synchronous training."""
  rollout_routing_replay: bool = key(False, CHANGEABLE, RL, EXPERTS)
  """Send a mixture's tokens in training to the experts that sampling chose for them (R3); their
  weights, and the gradient, stay the router's."""
  # The prompts.
  rl_task: str = key("", FIXED, RL)
  """Built-in task with verifiable answers: mix-sort or format; empty: prompts from the data's first
  column, the others for the reward functions."""
  warm_start_steps: NonNegative = key(0, PER_START, RL, BUILT_IN_TASK)
  """Steps of 64 of the task's demonstrations with which a run begins, in {run_name}/warm_start:
  rewards reinforce only what a model sometimes does; 0: none."""
  num_prompts: CountOrUnset = key(-1, FIXED, RL)
  """Prompts of an epoch: the first num_prompts; -1: all of the data; a built-in task then never
  ends."""
  leftover_prompts: Literal["carry", "drop", "error"] = key("carry", FIXED, RL, FINITE_PROMPTS)
  """Prompts at the end of an epoch that do not fill a batch: carry (into the next epoch), drop
  (counted in the metrics) or error."""
  # The evaluations; MaxText's name, whose standard is a distribution of its own.
  eval_sampling_strategy: Literal["standard", "greedy", "both"] = key("standard", CHANGEABLE, RL)
  """Evaluations of pass@k: standard (num_generations completions of a prompt, sampled as in training),
  greedy (one, of the likeliest tokens: pass@1) or both."""
  # The rewards.
  reward_functions: tuple[Name, ...] = key((), CHANGEABLE, RL)
  """Functions that reward completions, summed: module:function of your own, exact or gsm8k (with
  the column answer); []: exact, for rl_task."""
  reward_processes: Annotated[int, Range(low=1, high=256)] = key(2, CHANGEABLE, RL)
  """Processes that run them, one group at a time each, beside every training process."""
  reward_timeout_seconds: Seconds = key(60, CHANGEABLE, RL)
  """Seconds after which a reward function counts as hung."""
  reward_failure: Literal["stop", "zero"] = key("stop", CHANGEABLE, RL)
  """When a reward function raises, hangs or returns no finite numbers: stop, or zero for all
  completions of the prompt, counted in the metrics."""
  # The loss.
  loss_type: Literal["dapo", "grpo", "dr_grpo"] = key("dapo", CHANGEABLE, RL)
  """Average over: dapo (tokens of the step), grpo (tokens of a completion, then completions) or
  dr_grpo (completions times their longest length)."""
  scale_rewards: Literal["group", "none"] = key("group", CHANGEABLE, RL)
  """Divide a group's advantages by the standard deviation of its rewards: group, or none (Dr.
  GRPO)."""
  grpo_beta: NonNegativeFloat = key(0.0, CHANGEABLE, RL)
  """Weight of the KL divergence from the initial policy (estimator k3); 0: no reference is kept."""
  grpo_epsilon: Probability = key(0.2, CHANGEABLE, RL)
  """How far below 1 the probability ratio may go before it is clipped."""
  grpo_epsilon_high: Annotated[float, Range(low=0, limit=FLOAT32, also=-1)] = key(
    -1.0, CHANGEABLE, RL
  )
  """The same above 1 (DAPO's clip-higher: 0.28); -1: grpo_epsilon."""
  importance_sampling_cap: NonNegativeFloat = key(2.0, CHANGEABLE, RL)
  """Cap of the weights that correct tokens for the sampling policy's lag; 0: no weights, and ratios
  against that policy, clipped."""
