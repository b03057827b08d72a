"""maxbatch: a batch-size-first trainer for language models in JAX."""

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
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, _leave)
