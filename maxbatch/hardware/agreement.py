"""What process 0 says, in every process: for decisions that rest on clocks or files of one host."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def broadcast_one_to_all(value: Any) -> Any:
  """Process 0's value, in all of them; what the others pass is dropped.

  All processes must call it, in the same order. With one process the value is only passed through
  JSON, so that nothing works alone that would not work together.

  Args:
    value: plain values, as JSON holds them.
  """
  text = json.dumps(value).encode()
  if jax.process_count() == 1:
    return json.loads(text)
  # Every process must bring an array of the same shape: the length goes ahead.
  length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  mine = np.frombuffer(text.ljust(length)[:length], np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(mine).tobytes())
