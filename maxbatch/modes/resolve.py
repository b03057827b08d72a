"""From what a configuration leaves open to a configuration in which everything is chosen."""

from collections.abc import Sequence

from maxbatch.batch.plan import plan_batches
from maxbatch.batch.topology import Topology
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Device
from maxbatch.noise.requirements import check_noise
from maxbatch.run_folder.cache import remembered_choices
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.microbatch_size import Target, choose
from maxbatch.tuning.pipeline_microbatches import (
  PipelineMicrobatchProber,
  choose_num_pipeline_microbatches,
)
from maxbatch.tuning.prober import Prober


def resolve(
  config: Config, devices: Sequence[Device], layout: Topology, *, forget: bool = False
) -> Config:
  """The configuration with all chosen that was to be chosen on these devices.

  That is the microbatch size, and then into how many pieces a pipeline cuts a pass of it.

  Raises:
    UserError: nothing fits, the model cannot be split as the keys ask, or the noise scale cannot be
      measured so.
  """
  config = resolve_micro_batch_size(config, devices, layout, forget=forget)
  check_noise(config, plan_batches(config.batch, config.run, layout))
  prober = PipelineMicrobatchProber(config, devices, layout)
  place = Target(devices, layout)
  return choose_num_pipeline_microbatches(
    config, place, prober, remembered_choices(), forget=forget
  )


def resolve_micro_batch_size(
  config: Config, devices: Sequence[Device], layout: Topology, *, forget: bool = False
) -> Config:
  """The configuration with its microbatch size chosen, if it was to be, on these devices.

  Raises:
    UserError: nothing fits, or the model cannot be split as the keys ask.
  """
  config = resolve_accumulation(config, layout)
  prober = Prober(config, devices, layout)
  return choose(config, Target(devices, layout), prober, remembered_choices(), forget=forget)
