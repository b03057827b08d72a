"""maxbatch: a batch-size-first trainer for language models in JAX."""

import gc
import os
import signal
import sys
import types


def _leave(number: int, frame: types.FrameType | None) -> None:
  """Ends the process with a word instead of the traceback of whatever is being imported."""
  del frame
  os.write(2, b"interrupted\n")
  os._exit(128 + number)


# So it stands while Python looks for the module of `python -m maxbatch.train`, whose imports take
# seconds; from then on command_line/signals.py sees to signals. Importing maxbatch changes nothing.
if sys.argv[:1] == ["-m"]:
  # Imports and traces make objects by the million, which stay. Looking through them for garbage as
  # often as Python does took a fifth of the time to import all, and a tenth of that to trace a step.
  gc.set_threshold(100_000, 20, 20)
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
