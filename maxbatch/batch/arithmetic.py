"""Small products and quotients of batch sizes that other folders need, so that all are in batch/.

The sizes of a run come from core/plan.py. These functions take them further: to the share of a
data-parallel group, to a multiple of a batch, to the microbatch that divides another batch.
"""

from fractions import Fraction

from maxbatch.core.topology import Topology


def tokens_of(samples: int, max_target_length: int) -> int:
  """Tokens of `samples` samples, padding included."""
  return samples * max_target_length


def samples_in(tokens: float, max_target_length: int) -> float:
  """Samples that `tokens` tokens are, rarely a whole number."""
  return tokens / max_target_length


def steps_in(tokens: float, batch_tokens: float) -> float:
  """Steps of `batch_tokens` tokens that `tokens` tokens take, rarely a whole number."""
  return tokens / batch_tokens


def samples_of(num_microbatches: int, samples: int) -> int:
  """Samples of `num_microbatches` microbatches of `samples` samples each."""
  return num_microbatches * samples


def samples_of_groups(num_microbatches: int, rows: int, topology: Topology) -> int:
  """Samples of `num_microbatches` microbatches of `rows` samples for each data-parallel group."""
  return num_microbatches * rows * topology.num_batch_groups


def micro_batch_of(batch: int, num_microbatches: int) -> int:
  """Samples of each of the equal microbatches of a batch."""
  return batch // num_microbatches


def num_steps(samples: int, batch: int) -> int:
  """Whole steps of `batch` samples in `samples`."""
  return samples // batch


def scaled(batch: int, factor: Fraction) -> Fraction:
  """`factor` times the batch."""
  return factor * batch


def divides_over(batch: Fraction, topology: Topology) -> bool:
  """Whether every data-parallel group gets a whole number of samples of the batch."""
  return batch % topology.num_batch_groups == 0


def factor_of(size: Fraction, batch: int) -> Fraction:
  """The factor by which `size` is larger than `batch`."""
  return size / batch


def over_noise_scale(batch: float, noise_scale: float) -> float:
  """The batch in units of the gradient noise scale, which decides what a larger one gains."""
  return batch / noise_scale


def prompts_of(completions: int, num_generations: int) -> int:
  """Prompts of whole groups of completions."""
  return completions // num_generations


def completions_of(prompts: float, num_generations: int) -> float:
  """Completions of `prompts` prompts."""
  return prompts * num_generations
