"""Small products and quotients of batch sizes that other folders need, so that all are in batch/.

The sizes of a run come from batch/plan.py. These functions take them further: to the share of a
data-parallel group, to a multiple of a batch, to the microbatch that divides another batch.
"""

from fractions import Fraction

from maxbatch.batch.solve import divisors, nearest_divisors, nearest_multiples
from maxbatch.batch.topology import Topology


def samples_per_group(
  micro_batch: int, topology: Topology, num_pipeline_microbatches: int = 1
) -> int:
  """Samples of a microbatch in each data-parallel group, or of each pipeline microbatch of it."""
  return micro_batch // topology.num_batch_groups // num_pipeline_microbatches


def per_device_size(samples_per_group: int, topology: Topology) -> Fraction:
  """Samples per device where each data-parallel group gets `samples_per_group`."""
  return Fraction(samples_per_group * topology.num_batch_groups, topology.num_devices)


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


def fitting_micro_batch(micro_batch: int, batch: int, topology: Topology) -> int:
  """`micro_batch` if it divides `batch`, else the largest smaller one that does.

  Args:
    micro_batch: samples per microbatch, a multiple of the data-parallel groups.
    batch: samples per step, likewise.
    topology: the devices.
  """
  if batch % micro_batch == 0:
    return micro_batch
  groups = topology.num_batch_groups
  return groups * nearest_divisors(batch // groups, Fraction(micro_batch, groups))[0]


def prompts_of(completions: int, num_generations: int) -> int:
  """Prompts of whole groups of completions."""
  return completions // num_generations


def completions_of(prompts: float, num_generations: int) -> float:
  """Completions of `prompts` prompts."""
  return prompts * num_generations


def splits_of(batch: int, topology: Topology) -> list[tuple[Fraction, int]]:
  """Every way to divide a batch into equal microbatches, ascending in the samples of one.

  Returns:
    Samples per device, and the number of microbatches; nothing where the data-parallel groups do
    not get whole samples.
  """
  rows, rest = divmod(batch, topology.num_batch_groups)
  if rest or not rows:
    return []
  return [(per_device_size(size, topology), rows // size) for size in divisors(rows)]


def nearest_batches(batch: int, topology: Topology) -> list[int]:
  """The batches next to `batch` of which every data-parallel group gets whole samples; itself
  where it is one."""
  unit = topology.num_batch_groups
  if batch % unit == 0:
    return [batch]
  return [int(size) for size in nearest_multiples(unit, Fraction(batch))]
