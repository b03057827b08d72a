"""The trainer of a policy: that of a text, with GRPO as its loss and snapshots in its checkpoints."""

from collections.abc import Sequence

import numpy as np

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.config.schema import Config, RLConfig
from maxbatch.hardware.devices import Device
from maxbatch.rl.grpo import objective
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.rl.sampled import has_routes, run_vocabulary
from maxbatch.sampling.choice import num_words
from maxbatch.sampling.text import choice_of
from maxbatch.training.build import build_trainer
from maxbatch.training.step import Trainer


def policy_loss(config: Config, plan: RLPlan) -> PolicyLoss:
  """Returns what a step minimizes."""
  allowed_V = np.asarray(run_vocabulary(config).allowed_V)
  routes = config.model.base_num_decoder_layers, config.model.num_experts_per_tok
  return PolicyLoss(
    objective(config.rl, plan.max_completion_length),
    allowed_V.tobytes(),
    config.run.decode_sampling_temperature,
    has_proximal=_has_proximal(config.rl),
    kept_words=num_words(config.model.vocab_size) if choice_of(config.run).leaves_out else 0,
    halves=config.noise.gns_from_microbatches,
    routes_LK=routes if has_routes(config) else (0, 0),
    replays=config.rl.rollout_routing_replay,
  )


def build_policy_trainer(
  config: Config, plan: RLPlan, devices: Sequence[Device], *, keep: bool = True
) -> Trainer:
  """Builds the trainer, as `build_trainer` does, of a configuration that counts completions (`in_samples`)."""
  return build_trainer(
    config,
    plan.batch_plan,
    devices,
    keep=keep,
    loss=policy_loss(config, plan),
    num_saved_policies=plan.num_saved_policies,
  )


def _has_proximal(config: RLConfig) -> bool:
  """Returns whether the loss compares with the policy of before the first of several steps on a batch."""
  return config.num_iterations > 1 and config.importance_sampling_cap > 0
