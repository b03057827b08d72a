"""The hash of a run's step, lowered once for all tests that ask for the same."""

from typing import Any

import pytest

from maxbatch.compile.step_identity import lowered_hash
from maxbatch.config.schema import Config
from maxbatch.training import build
from maxbatch.tuning import microbatch_size

_KNOWN: dict[tuple[Config, str], str] = {}


def forget() -> None:
  """After a change that no key tells of."""
  _KNOWN.clear()
  build._trainer.cache_clear()


def lower_once(monkeypatch: pytest.MonkeyPatch) -> None:
  """Remembered choices depend on real hashes, each of which takes a while."""

  def of(config: Config, plan: Any, trainer: Any, source: Any, micro_batch: int) -> str:
    key = config, f"{plan.topology.ici} {plan.topology.dcn}"
    if key not in _KNOWN:
      _KNOWN[key] = lowered_hash(config, plan, trainer, source, micro_batch)
    return _KNOWN[key]

  monkeypatch.setattr(microbatch_size, "lowered_hash", of)
