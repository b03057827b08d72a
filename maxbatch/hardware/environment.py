"""What jax and XLA take from environment variables, refused in words where they end the process."""

import functools
import os
import re
import subprocess
import sys

import jax

from maxbatch.errors import UserError

_READ_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"
_FAULT = re.compile(r"(Unknown flags? in XLA_FLAGS|Couldn't interpret value).*")


def check_environment() -> None:
  """Checks the variables with which no step can be compiled.

  Raises:
    UserError: XLA_FLAGS has a flag or a value that XLA does not know, or jit is disabled.
  """
  if jax.config.values["jax_disable_jit"]:
    raise UserError(
      "JAX_DISABLE_JIT: a training step is compiled as a whole, which this forbids; unset it, or "
      "JAX_DISABLE_JIT=0"
    )
  _check_flags(os.environ.get("XLA_FLAGS", ""))


@functools.cache
def _check_flags(flags: str) -> None:
  """Lets another process read the flags: XLA ends the one that reads a flag it does not know."""
  if not flags.strip():
    return
  command = [sys.executable, "-c", _READ_FLAGS]
  done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
  if fault := _FAULT.search(done.stderr):
    raise UserError(f"XLA_FLAGS={flags}: {fault[0].rstrip('.')}; correct that, or unset XLA_FLAGS")
