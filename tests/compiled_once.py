"""Programs of several processes that the first of them compiles for all."""

from typing import Any

import jax
import numpy as np
from jax._src import cache_key


def compile_once() -> None:
  """Processes of CPUs have one key for a program that all of them run, and one compiles it.

  The key has what jax calls a topology in it, which says on CPU whose process it is.
  """
  of_one_process = cache_key._hash_accelerator_config

  def hashed(hash_object: Any, devices: np.ndarray) -> None:
    if len({device.process_index for device in devices.flat}) > 1:
      cache_key._hash_devices(hash_object, devices)
    else:
      of_one_process(hash_object, devices)

  cache_key._hash_accelerator_config = hashed
  jax.config.update("jax_share_binary_between_hosts", True)
