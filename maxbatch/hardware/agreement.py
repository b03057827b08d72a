"""Broadcasts process 0's value, so that all processes decide alike from one host's clock or files."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def broadcast_one_to_all(value: Any) -> Any:
  """Returns process 0's value in all processes; the other processes' values are ignored.

  All processes must call it, in the same order. A single process encodes the value as JSON too, so
  that a value that cannot be sent fails there as well.

  Args:
    value: plain values that JSON can represent.
  """
  text = json.dumps(value).encode()
  if jax.process_count() == 1:
    return json.loads(text)
  # All processes must pass arrays of the same shape, so the length is broadcast first.
  length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  mine = np.frombuffer(text.ljust(length)[:length], np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(mine).tobytes())
