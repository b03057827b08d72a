"""The mixture of experts of docs/extending.md, for tests of what a model returns beside hidden states."""

import importlib
import sys
from pathlib import Path

import pytest
from test_extending import SECTIONS, write_files

(SECTION,) = [title for title in SECTIONS if "a loss of the model's own" in title]
KEYS = {
  "decoder_block": "my_experts:Mixture",
  "my_num_experts": 4,
  "my_experts_per_token": 2,
  "my_balance_weight": 0.5,
}
"""With a balance loss that matters beside the cross entropy."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory):
  """The example as a module that is found by its name."""
  folder: Path = tmp_path_factory.mktemp("experts")
  write_files(folder, SECTION)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    sys.modules.pop("my_experts", None)
    importlib.import_module("my_experts")
    yield
