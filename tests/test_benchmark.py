"""scripts/benchmark.py: everything that it times inside one process runs."""

import importlib
import sys

import jax
from processes import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

# By name, for type checkers do not look there.
benchmark = importlib.import_module("benchmark")


def test_each_ratio_of_the_table_is_taken(monkeypatch):
  small = {"base_num_decoder_layers": 1, "base_emb_dim": 16, "base_mlp_dim": 32, "head_dim": 8}
  heads = {"base_num_query_heads": 2, "base_num_kv_heads": 2, "max_target_length": 16}
  monkeypatch.setattr(benchmark, "SHAPES", benchmark.SHAPES | small | heads)
  monkeypatch.setattr(benchmark, "LENGTH", 16)
  with jax.numpy_rank_promotion("allow"):
    ratios = benchmark.inside(8, 1, scan=True)
  assert ratios.keys() == {"step / plain", "loop / step", "16 / parts"}
  assert all(ratio > 0 for each in ratios.values() for ratio in each)
