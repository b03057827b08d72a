"""Sizes of a mixture of experts, which keys give in several ways."""

from maxbatch.config.schema import ModelConfig


def expert_width(config: ModelConfig) -> int:
  """Returns the width of one expert's hidden layer."""
  return config.base_mlp_dim if config.base_moe_mlp_dim == -1 else config.base_moe_mlp_dim


def hidden_width(config: ModelConfig) -> int:
  """Returns the numbers of a token between the matrices of a feed-forward layer, those of all of its
  experts."""
  if config.num_experts == 1:
    return config.base_mlp_dim
  return expert_width(config) * (config.num_experts_per_tok + config.shared_experts)


def idle_parameters(config: ModelConfig) -> int:
  """Returns the parameters of a layer that a token does not meet: of experts that it is not sent to."""
  if config.num_experts == 1:
    return 0
  matrices = 2 if config.mlp_activation == "gelu" else 3
  idle = config.num_experts - config.num_experts_per_tok
  return idle * matrices * config.base_emb_dim * expert_width(config)
