"""The whole configuration: every section, and every key that maxbatch declares.

One frozen dataclass per section; functions take the narrowest section they need. Keys are flat:
each belongs to exactly one section, which declares its type, range, default, help and what a resume
may change (config/declare.py). `configs/base.yml` is written from them (`base_file`).
"""

import dataclasses
import functools
import json
import math
import types
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Literal

from maxbatch.config.declare import Key, PlugIns, Section, declared, helps
from maxbatch.config.keys.batch import BatchConfig, MeshConfig, PipelineConfig
from maxbatch.config.keys.model import ModelConfig, PrecisionConfig
from maxbatch.config.keys.run import (
  CheckpointConfig,
  CompileConfig,
  DistributedConfig,
  ProfilingConfig,
  RunConfig,
)
from maxbatch.config.keys.training import DataConfig, NoiseConfig, OptimizerConfig, RLConfig
from maxbatch.config.value import plain

_NO_PLUGINS: Mapping[str, PlugIns] = {}


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run, by section."""

  run: RunConfig
  batch: BatchConfig
  mesh: MeshConfig
  distributed: DistributedConfig
  pipeline: PipelineConfig
  compile: CompileConfig
  model: ModelConfig
  precision: PrecisionConfig
  noise: NoiseConfig
  profiling: ProfilingConfig
  data: DataConfig
  optimizer: OptimizerConfig
  checkpoint: CheckpointConfig
  rl: RLConfig


def sections() -> dict[str, type[Section]]:
  """Returns each section's class by its name, in the order of `Config`."""
  return {field.name: field.type for field in dataclasses.fields(Config)}  # pyright: ignore


@functools.cache
def fields() -> Mapping[str, tuple[str, Key]]:
  """Returns every key that maxbatch declares, with the name of its section."""
  return types.MappingProxyType(
    {key: (name, one) for name, cls in sections().items() for key, one in declared(cls).items()}
  )


@functools.cache
def old_names() -> Mapping[str, str]:
  """Returns the name that a key has now for each that one had before."""
  return types.MappingProxyType(
    {old: key for key, (_, one) in fields().items() for old in one.old_names}
  )


def keys_of(config: Config) -> dict[str, Key]:
  """Returns the keys of a configuration as they are declared, those of plug-ins included."""
  own = [type(keys) for section in vars(config).values() for _, keys in section.plugins]
  return {key: one for cls in [*sections().values(), *own] for key, one in declared(cls).items()}


def to_flat(config: Config | Section) -> dict[str, object]:
  """Returns every key of a configuration or a section with its value, those of plug-ins last.

  No other place reads keys by computed names.
  """
  parts = [config] if isinstance(config, Section) else list(vars(config).values())
  own = [keys for section in parts for _, keys in section.plugins]
  return {key: vars(part)[key] for part in [*parts, *own] for key in declared(type(part))}


def from_flat(values: Mapping[str, object], plugins: Mapping[str, PlugIns] = _NO_PLUGINS) -> Config:
  """Returns the configuration of which `to_flat` gives `values`, with the plug-ins of each section."""
  built = {
    name: cls(**{key: values[key] for key in declared(cls)}, plugins=plugins.get(name, ()))
    for name, cls in sections().items()
  }
  return Config(**built)  # pyright: ignore[reportArgumentType]


def replaced(config: Config, keys: Mapping[str, object]) -> Config:
  """Returns the configuration with other values of these keys of maxbatch's."""
  parts = vars(config).copy()
  for key, value in keys.items():
    name, _ = fields()[key]
    parts[name] = dataclasses.replace(parts[name], **{key: value})
  return Config(**parts)


_WIDTH = 99
_OPENING = """\
# Every key of a run with its default, what it is and why you would change it.
# Override on the command line as key=value, or in your own file with `base_config: base`.
# Written by scripts/write_base_config.py from maxbatch/config/keys/.
"""


@dataclasses.dataclass(frozen=True)
class Documented:
  """A key as base.yml and --help explain it."""

  key: str
  default: str
  """As it is written in YAML."""
  type: object
  help: str
  heading: str


def documented_keys() -> list[Documented]:
  """Returns every key that maxbatch declares, in the order of base.yml."""
  results: list[Documented] = []
  for section in sections().values():
    results += documented(section, section.heading)
  return results


def documented(cls: type, heading: str) -> Iterator[Documented]:
  """Yields the keys that a dataclass declares."""
  for key, one in declared(cls).items():
    yield Documented(key, _written(one.default), one.type, helps(cls).get(key, ""), heading)


def base_file() -> str:
  """Returns the text of base.yml."""
  text, heading = _OPENING, ""
  for one in documented_keys():
    if one.heading != heading:
      heading = one.heading
      text += f"\n# --- {heading} ".ljust(_WIDTH + 1, "-") + "\n"
    text += f"# {one.help}\n{one.key}: {one.default}\n"
  return text


def _written(value: object) -> str:
  """Returns a default in YAML of one line, which YAML 1.1 reads as of the same type."""
  if isinstance(value, tuple):
    return f"[{', '.join(map(_written, value))}]"
  if isinstance(value, str | bool):
    return json.dumps(value, ensure_ascii=False)
  if isinstance(value, float) and value != -1:
    digits, exponent = f"{value:e}".split("e")
    is_short = 0 < abs(value) < 0.01 and float(digits).is_integer()
    return f"{float(digits)}e{int(exponent)}" if is_short else repr(value)
  return str(plain(value)) if isinstance(value, Fraction) else f"{value:.0f}"


def is_latent(config: ModelConfig) -> bool:
  """Returns whether keys and values of a token are made of one latent vector."""
  return config.attention_type == "mla"


def query_dim(config: ModelConfig) -> int:
  """Returns the numbers of a query, and of a key, of one head."""
  if is_latent(config):
    return config.qk_nope_head_dim + config.qk_rope_head_dim
  return config.head_dim


def value_dim(config: ModelConfig) -> int:
  """Returns the numbers of a value of one head."""
  return config.v_head_dim if is_latent(config) else config.head_dim


def rotated_dim(config: ModelConfig) -> int:
  """Returns how many numbers of a query and of a key have a position."""
  return config.qk_rope_head_dim if is_latent(config) else config.head_dim


def attention_width(config: ModelConfig) -> float:
  """Returns the numbers of all heads that a product of attention contracts or gives, on average of the
  products with keys and with values."""
  return config.base_num_query_heads * (query_dim(config) + value_dim(config)) / 2


def cached_numbers(config: ModelConfig) -> int:
  """Returns the numbers that a layer keeps of a token while a text is written."""
  return config.base_num_kv_heads * (query_dim(config) + value_dim(config))


def attention_matrices(config: ModelConfig) -> tuple[tuple[int, int], ...]:
  """Returns the matrices of a layer's attention, each (in, out)."""
  D, N, K = config.base_emb_dim, config.base_num_query_heads, config.base_num_kv_heads
  queries, values = N * query_dim(config), value_dim(config)
  if not is_latent(config):
    keys = K * config.head_dim
    return ((D, queries), (D, keys), (D, keys), (queries, D))
  rank, latent = config.q_lora_rank, config.kv_lora_rank
  to_queries = ((D, rank), (rank, queries)) if rank else ((D, queries),)
  made = N * (config.qk_nope_head_dim + values)
  to_keys = ((D, latent + config.qk_rope_head_dim), (latent, made))
  return (*to_queries, *to_keys, (N * values, D))


ContextStrategy = Literal["all_gather", "ring", "ulysses"]


def context_strategy(config: ModelConfig, tensor: int, context: int) -> ContextStrategy:
  """Returns context_parallel_strategy for so many devices along either axis, `auto` resolved.

  Ulysses needs heads that devices divide. It computes what one device would, with kernels too, and holds
  no more of a row; so does the ring, by matrix products alone, while its messages are under way. Which
  sends less depends on the heads: an all-to-all a part of queries, keys, values and results, the ring
  all keys and values.
  """
  if config.context_parallel_strategy != "auto":
    return config.context_parallel_strategy
  N, K = config.base_num_query_heads, config.base_num_kv_heads
  ways = tensor * context
  if config.attention == "flash":
    return "all_gather" if N % ways else "ulysses"
  sent = 2 * (N + math.lcm(K, ways)) / context
  return "ring" if N % ways or sent > 2 * math.lcm(K, tensor) else "ulysses"
