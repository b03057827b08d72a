"""Whether a run trains on text, so that its sizes count samples, or by reinforcement learning, on which devices."""

from maxbatch.config.schema import RLConfig
from maxbatch.errors import UserError


def is_rl(config: RLConfig) -> bool:
  """Returns whether a configuration is one of reinforcement learning."""
  return config.num_generations != -1


def check_supervised(config: RLConfig) -> None:
  """Checks, for commands that train on text, that the sizes count samples and not prompts.

  Raises:
    UserError: the configuration is one of reinforcement learning, or keeps devices for it.
  """
  if is_rl(config):
    raise UserError(
      f"num_generations={config.num_generations} makes this a configuration of reinforcement "
      "learning, whose batch_size counts prompts, and this command trains on text; for example "
      "num_generations=-1, or another config"
    )
  if config.rollout_devices:
    raise UserError(
      f"rollout_devices={config.rollout_devices} only sample, and this command trains on text; for "
      "example rollout_devices=0"
    )


def training_devices(config: RLConfig, num_devices: int, num_slices: int = 1) -> int:
  """Returns how many of all devices train.

  Raises:
    UserError: those that only sample leave none, or slices of different sizes.
  """
  rollout, each = config.rollout_devices, num_devices // num_slices
  if rollout < num_devices and rollout % num_slices == 0:
    return num_devices - rollout
  fitting = min(max(round(rollout / num_slices), 1), each - 1) * num_slices
  offer = f"rollout_devices={fitting}, or " if fitting > 0 else ""
  equally = (
    f", and take equally many from each of the {num_slices} slices" if num_slices > 1 else ""
  )
  raise UserError(
    f"rollout_devices={rollout} must leave some of the {num_devices} devices to train{equally}; "
    f"for example {offer}rollout_devices=0: all devices sample and train in turn"
  )
