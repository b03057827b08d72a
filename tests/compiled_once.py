"""Programs of several processes that the first of them compiles for all."""

import jax

from maxbatch.compile.cache import find_those_of_process_0


def compile_once() -> None:
  """Processes of CPUs have one key for a program that all of them run, and one compiles it."""
  find_those_of_process_0()
  jax.config.update("jax_share_binary_between_hosts", True)
