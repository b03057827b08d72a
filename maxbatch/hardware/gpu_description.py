"""What XLA's compiler is told of a GPU that is not here: a GpuTargetConfigProto, as text.

Fields and their meaning: xla/stream_executor/device_description.proto. What differs between generations
is in estimate/gpus.json; limits of blocks, threads and registers are those of all generations from
Ampere on.
"""

from collections.abc import Mapping
from typing import Any

from maxbatch.estimate.chips import GPU_DATA

_PRIMITIVE_TYPES = {
  "S8": 2,
  "S32": 4,
  "U8": 6,
  "U32": 8,
  "F16": 10,
  "F32": 11,
  "F64": 12,
  "BF16": 16,
  "F8E5M2": 19,
  "F8E4M3FN": 20,
}
"""Numbers of xla_data.proto."""

_SAME_FOR_ALL = (
  "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
  "threads_per_core_limit: 2048 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 "
  "block_dim_limit_z: 65535 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 "
  "registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_address_bits: 64 "
  'ecc_enabled: true device_vendor: "NVIDIA Corporation"'
)
_OWN = (
  "core_count",
  "fpus_per_core",
  "shared_memory_per_core",
  "shared_memory_per_block_optin",
  "memory_bandwidth",
  "l2_cache_size",
  "clock_rate_ghz",
  "device_memory_size",
  "pcie_bandwidth",
)
_CUDA, _CUDNN = (13, 0, 0), (9, 12, 0)
"""Versions that the compiler is to assume: those that the pinned plugin was built with."""

_TENSOR_CORES = 4
"""Of a multiprocessor."""


def described(generation: str) -> str:
  """Returns the description of one GPU of a generation."""
  gpu = GPU_DATA[generation]
  own = " ".join(f"{name}: {gpu[name]}" for name in _OWN)
  cuda, cudnn = (".".join(map(str, version)) for version in (_CUDA, _CUDNN))
  return f"""gpu_device_info {{
  {_SAME_FOR_ALL}
  {own}
  cuda_compute_capability {{ {_capability(gpu)} }}
  scalar_unit_description {{ {_rates(gpu["scalar"])} }}
  matrix_unit_description {{ {_rates(gpu["matrix"])} }}
  name: "{gpu["name"]}"
  driver_version: "{cuda}" runtime_version: "{cuda}" compile_time_toolkit_version: "{cuda}"
  dnn_version: "{cudnn}"
  device_interconnect_info {{ active_links: {gpu["active_links"]} }}
}}
platform_name: "CUDA"
runtime_version {{ {_version(_CUDA)} }}
dnn_version_info {{ {_version(_CUDNN)} }}
device_description_str: "{gpu["name"]}"
"""


def _capability(gpu: Mapping[str, Any]) -> str:
  major, minor = gpu["compute_capability"]
  own = " feature_extension: ACCELERATED_FEATURES" if gpu["accelerated"] else ""
  return f"major: {major} minor: {minor}{own}"


def _version(numbers: tuple[int, int, int]) -> str:
  return "major: {} minor: {} patch: {}".format(*numbers)


def _rates(unit: Mapping[str, Any]) -> str:
  """Returns the operations of a clock by type: [units, operations of each], or of each tensor core."""
  words = []
  for dtype, rate in unit.items():
    if dtype in _PRIMITIVE_TYPES:
      units, operations = rate if isinstance(rate, list) else (_TENSOR_CORES, rate)
      words.append(
        f"rate_infos {{ key: {_PRIMITIVE_TYPES[dtype]} value {{ clock_rate_ghz: {unit['clock_ghz']} "
        f"units_per_core: {units} ops_per_clock: {operations} }} }}"
      )
  return " ".join(words)
