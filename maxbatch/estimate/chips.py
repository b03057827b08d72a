"""Published specifications of TPU and GPU generations, per device.

Bandwidths are sums over all links in one direction: half of a published bidirectional figure. Those of
GPUs are in gpus.json, with their sources.

Of a GPU also what XLA's compiler is told where none is here: a GpuTargetConfigProto, as text. Fields and
their meaning: xla/stream_executor/device_description.proto. What differs between generations is in
gpus.json; limits of blocks, threads and registers are those of all generations from Ampere on.
"""

import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.command_line.screen import GIB


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as jax counts them: a chip of v4 to v6e, half a chip of tpu7x, a GPU."""

  generation: str
  device_kind: str
  """As jax reports it."""
  peak_flops: float
  """bfloat16 FLOPs per second."""
  hbm_bytes: int
  """HBM, as published."""
  usable_bytes: int
  """HBM that the compiler (libtpu 0.0.51) leaves to programs: its "available HBM". Of a GPU, the part that
  jax takes for itself when it starts."""
  hbm_bandwidth: float
  """Bytes per second to and from HBM."""
  ici_bandwidth: float
  """Bytes per second over all ICI links to other chips of the slice, in one direction; of a GPU, over
  NVLink to the other GPUs of its domain."""
  ici_links: int
  dcn_bandwidth: float
  """Bytes per second to other slices, or domains: the host's network divided by its devices."""
  clock: float
  """Hz: converts the compiler's estimated cycles to seconds; of GPUs it estimates microseconds."""
  matrix_unit: int
  """Width of the matrix unit (MXU); a narrower product leaves the rest of it idle."""
  eight_bits: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
  """By quantization, the time of a product over bfloat16's; none: it is not known. Of TPUs as libtpu 0.0.51
  compiles the matrices of a layer of Llama-3-8B for 8,192 tokens (docs/precision.md)."""
  tensor_cores: int = 1
  """Cores of the device, each with vector units of its own: 2 where jax counts a whole chip of two."""
  domain: int = 0
  """GPUs that NVLink connects; 0: a TPU, whose links connect a slice."""
  attention: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict, hash=False)
  """Shares of the peak that a GPU's attention kernels reach, by pass and width of a head."""
  product_share: float = 1.0
  """That which large products reach, where the compiler has no table of them."""
  sustained: float = 1.0
  """The part of the rates in the compiler's table that products keep in training, where power limits the
  clocks and collectives take multiprocessors from them."""
  network_share: float = 1.0
  """That of the network which NCCL reaches."""
  launch: float = 0.0
  """The least seconds of an operation."""
  calibration: float = 1.0
  """Seconds of steps as measured over those as estimated, which all rates above have in them; 1: none was
  measured."""

  @property
  def is_gpu(self) -> bool:
    """Whether it is a GPU."""
    return self.domain > 0

  def padded(self, width: float) -> float:
    """Returns the width that a product of this width has in the matrix unit."""
    return -(-width // self.matrix_unit) * self.matrix_unit

  def attention_share(self, backward: bool, width: int) -> float:
    """Returns the share of the peak that attention reaches: that of the nearest width published."""
    rates = self.attention["backward" if backward else "forward"]
    return rates[min(rates, key=lambda known: abs(int(known) - width))]


_BIT = 1 / 8

CHIPS: Mapping[str, Chip] = {
  chip.generation: chip
  for chip in (
    # cloud.google.com/tpu/docs/v4: 275 TFLOPs, 32 GiB, 1200 GBps. Links: Jouppi et al. 2023,
    # arxiv.org/abs/2304.01433, six of 50 GB/s each way, in line with that page's all-reduce
    # bandwidth of 1.1 PB/s for 4096 chips. No figure for the network: v5p's is assumed.
    Chip(
      generation="v4",
      device_kind="TPU v4",
      peak_flops=275e12,
      hbm_bytes=32 * GIB,
      usable_bytes=round(30.75 * GIB),
      hbm_bandwidth=1200e9,
      ici_bandwidth=6 * 50e9,
      ici_links=6,
      dcn_bandwidth=50e9 * _BIT,
      clock=1.05e9,
      matrix_unit=128,
      eight_bits={"fp8": 1.18, "int8": 1.12},
      tensor_cores=2,
    ),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB, 819 GBps (another version: 800 GiBps), ICI
    # 400 GBps bidirectional over 4 ports, 6.4 Tbps of network for 256 chips.
    Chip(
      generation="v5e",
      device_kind="TPU v5 lite",
      peak_flops=197e12,
      hbm_bytes=16 * GIB,
      usable_bytes=round(15.75 * GIB),
      hbm_bandwidth=819e9,
      ici_bandwidth=400e9 / 2,
      ici_links=4,
      dcn_bandwidth=6.4e12 / 256 * _BIT,
      clock=1.5e9,
      matrix_unit=128,
      eight_bits={"fp8": 1.01, "int8": 0.5},
    ),
    # cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GiB, 2765 GBps, ICI 1200 GBps bidirectional in
    # a 3D torus, network 50 Gbps per chip.
    Chip(
      generation="v5p",
      device_kind="TPU v5",
      peak_flops=459e12,
      hbm_bytes=95 * GIB,
      usable_bytes=round(95.73 * GIB),
      hbm_bandwidth=2765e9,
      ici_bandwidth=1200e9 / 2,
      ici_links=6,
      dcn_bandwidth=50e9 * _BIT,
      clock=1.75e9,
      matrix_unit=128,
      eight_bits={"fp8": 0.95, "int8": 0.47},
      tensor_cores=2,
    ),
    # cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB, 1638 GBps, ICI 800 GBps bidirectional over
    # 4 ports, 256x256 matrix units; cloud.google.com/tpu/docs/tpu7x: network 100 Gbps per chip.
    Chip(
      generation="v6e",
      device_kind="TPU v6 lite",
      peak_flops=918e12,
      hbm_bytes=32 * GIB,
      usable_bytes=round(31.24 * GIB),
      hbm_bandwidth=1638e9,
      ici_bandwidth=800e9 / 2,
      ici_links=4,
      dcn_bandwidth=100e9 * _BIT,
      clock=1.75e9,
      matrix_unit=256,
      eight_bits={"fp8": 1.03, "int8": 0.75},
    ),
    # cloud.google.com/tpu/docs/tpu7x, halved, for a chip shows itself as two devices: 2307 TFLOPs,
    # 192 GiB, 7380 GBps, ICI 1200 GBps bidirectional in a 3D torus, network 100 Gbps per chip.
    Chip(
      generation="tpu7x",
      device_kind="TPU7x",
      peak_flops=2307e12 / 2,
      hbm_bytes=192 * GIB // 2,
      usable_bytes=round(94.74 * GIB),
      hbm_bandwidth=7380e9 / 2,
      ici_bandwidth=1200e9 / 2 / 2,
      ici_links=6,
      dcn_bandwidth=100e9 * _BIT / 2,
      clock=2.2e9,
      matrix_unit=256,
      eight_bits={"fp8": 0.54, "int8": 1.22},
    ),
  )
}


GPU_DATA: Mapping[str, Mapping[str, Any]] = json.loads(
  pathlib.Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")
)
"""By generation, what a compiler is told of a GPU and what is published about it."""

PREALLOCATED = 0.75
"""The share of a GPU's memory that jax takes when it starts, unless XLA_PYTHON_CLIENT_MEM_FRACTION says
another. CUDA, NCCL and the libraries need some of the rest."""


_NETWORK_SHARE = 0.85
"""Assumed: no published test of NCCL that could be cited was found."""
_LAUNCH = 2e-6
"""Assumed for a kernel within a CUDA graph; neither cited nor measured."""


CALIBRATION = pathlib.Path(__file__).with_name("gpu_calibration.json")
"""Steps that GPUs have taken beside their estimates: what others published, in short, and what
scripts/accelerator_check.py measured."""


@functools.cache
def gpu_calibration() -> Mapping[str, Any]:
  """Returns the table."""
  return json.loads(CALIBRATION.read_text(encoding="utf-8"))


def measured_factor(generation: str, records: Sequence[Mapping[str, Any]]) -> float:
  """Returns the median of measured over estimated seconds of a generation's records; 1 without any."""
  own = [one for one in records if one["generation"] == generation]
  ratios = [one["measured_seconds"] / one["estimated_seconds"] for one in own]
  return statistics.median(ratios) if ratios else 1.0


def calibrated(chip: Chip, factor: float) -> Chip:
  """Returns a GPU all of whose times are `factor` times as long; its peak stays."""
  shares = {
    way: {width: share / factor for width, share in rates.items()}
    for way, rates in chip.attention.items()
  }
  return dataclasses.replace(
    chip,
    hbm_bandwidth=chip.hbm_bandwidth / factor,
    ici_bandwidth=chip.ici_bandwidth / factor,
    dcn_bandwidth=chip.dcn_bandwidth / factor,
    clock=chip.clock / factor,
    attention=shares,
    product_share=chip.product_share / factor,
    launch=chip.launch * factor,
    calibration=chip.calibration * factor,
  )


def _gpu(generation: str, known: Mapping[str, Any]) -> Chip:
  chip = Chip(
    generation=generation,
    device_kind=known["name"],
    peak_flops=known["peak_flops"],
    hbm_bytes=known["device_memory_size"],
    usable_bytes=int(PREALLOCATED * known["device_memory_size"]),
    hbm_bandwidth=known["memory_bandwidth"],
    ici_bandwidth=known["nvlink_bandwidth"],
    # NVSwitch gives any pair the bandwidth of all links.
    ici_links=1,
    dcn_bandwidth=known["network_bandwidth"],
    clock=1e6,
    matrix_unit=1,
    eight_bits=known.get("eight_bits", {}),
    domain=known["gpus_per_domain"],
    attention=known["attention"],
    product_share=known["product_share"],
    sustained=known["sustained"],
    network_share=_NETWORK_SHARE,
    launch=_LAUNCH,
  )
  return calibrated(chip, measured_factor(generation, gpu_calibration()["measured"]))


GPUS: Mapping[str, Chip] = {name: _gpu(name, known) for name, known in GPU_DATA.items()}
ALL_CHIPS: Mapping[str, Chip] = {**CHIPS, **GPUS}

UNKNOWN_CHIP = Chip(
  generation="",
  device_kind="",
  peak_flops=math.inf,
  hbm_bytes=0,
  usable_bytes=0,
  hbm_bandwidth=math.inf,
  ici_bandwidth=math.inf,
  ici_links=1,
  dcn_bandwidth=math.inf,
  clock=math.inf,
  matrix_unit=1,
)
"""For counting FLOPs and bytes without estimating times: every time is 0."""


def chip_for(device_kind: str, network_gbps: float = 0) -> Chip | None:
  """Returns the chip that jax calls `device_kind`, `on_network`; None if it is not listed."""
  known = next((chip for chip in ALL_CHIPS.values() if chip.device_kind == device_kind), None)
  return on_network(known, network_gbps) if known else None


def on_network(chip: Chip, gbps: float) -> Chip:
  """Returns a chip whose own part of the network between hosts or slices has so many Gb/s; 0: as published."""
  if not gbps:
    return chip
  return dataclasses.replace(chip, dcn_bandwidth=gbps * 1e9 * _BIT / chip.calibration)


def is_network_published(chip: Chip) -> bool:
  """Returns whether its network is that of its generation's data sheet."""
  known = ALL_CHIPS[chip.generation]
  rates = (each.dcn_bandwidth * each.calibration for each in (chip, known))
  return math.isclose(*rates)


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
