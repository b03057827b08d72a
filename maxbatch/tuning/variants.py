"""What is explored beside the size of a microbatch: policies of rematerialization, compiler flags."""

import dataclasses
import itertools
from collections.abc import Sequence

from maxbatch.config.schema import Config
from maxbatch.hardware.compiler_flags import EXPLORE, NONE, explored
from maxbatch.hardware.devices import Device
from maxbatch.models.remat import POLICIES, offload_obstacle
from maxbatch.tuning.candidates import Candidate, with_policy

REMAT_POLICIES = ("none", *POLICIES)
"""What remat_policy=explore tries, the fastest where it fits first."""


def with_variants(
  sizes: Sequence[Candidate], config: Config, device: Device
) -> tuple[Candidate, ...]:
  """Every size with every remat_policy and set of compiler flags that is to be explored, one variant
  after the other."""
  policies = _policies(config, device) if config.model.remat_policy == "explore" else (None,)
  sets = explored(device) if config.compile.compiler_flags == EXPLORE else (None,)
  return tuple(
    dataclasses.replace(size, remat_policy=policy, compiler_flags=flags)
    for policy, flags in itertools.product(policies, sets)
    for size in sizes
  )


def _policies(config: Config, device: Device) -> list[str]:
  """The policies that can be had on a device."""
  is_pipeline = config.pipeline.pipeline_schedule != "none"
  models = {each: with_policy(config.model, each) for each in REMAT_POLICIES}
  return [
    each
    for each, model in models.items()
    if not offload_obstacle(model, device.platform, is_pipeline=is_pipeline)
  ]


def without_variants(config: Config) -> Config:
  """The configuration with what is to be explored beside the size as it is by default."""
  model, keys = config.model, config.compile
  if model.remat_policy == "explore":
    model = dataclasses.replace(model, remat_policy="none")
  if keys.compiler_flags == EXPLORE:
    keys = dataclasses.replace(keys, compiler_flags=NONE)
  return dataclasses.replace(config, model=model, compile=keys)
