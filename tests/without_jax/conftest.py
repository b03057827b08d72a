"""Tests of what needs no jax: they pass where none is installed, and all of them take seconds.

Beside tests with jax, as in `pytest tests`, it is there already; alone nobody can import it.
"""

import gc
import sys
from collections.abc import Sequence

import hypothesis
from examples import examples

NOT_HERE = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "torch", "transformers"}


class _NotInstalled:
  """Raises what Python does where these packages are not installed."""

  def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
    if name.partition(".")[0] in NOT_HERE:
      raise ModuleNotFoundError(f"tests/without_jax imports no {name}", name=name)


if "jax" not in sys.modules:
  sys.meta_path.insert(0, _NotInstalled())

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("suite")


def pytest_collection_finish() -> None:
  """Leaves modules and collected tests out of garbage collections, which go over them all each time."""
  gc.freeze()
