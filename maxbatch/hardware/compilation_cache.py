"""jax's compilation cache, left aside for a while; compile/cache.py says what it is."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

_DIRECTORY = "jax_compilation_cache_dir"


@contextlib.contextmanager
def bypassed() -> Iterator[None]:
  """Compiles programs anew inside this context, neither read from the cache nor written to it.

  For programs that are to be saved to a file: on CPU, XLA leaves the machine code out of what was
  itself loaded, and the copy fails when it runs. And for those of a TPU slice that is not here: jax
  writes them to the cache, and warns at every later start that it cannot read them back.
  """
  before = jax.config.values[_DIRECTORY]
  jax.config.update(_DIRECTORY, None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update(_DIRECTORY, before)
    compilation_cache.reset_cache()
