"""Flags of XLA's compilers: published sets by generation of TPUs and GPUs, and what compiler_flags makes of them.

They are options of one compilation, not of the process: no environment variable is needed, and what
LIBTPU_INIT_ARGS says for all programs stays as it is. Likewise jax's compilation cache can be left
aside for a while; compile/cache.py says what it is.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, SingleDeviceSharding

from maxbatch.config.find import did_you_mean
from maxbatch.errors import UserError
from maxbatch.estimate.chips import CHIPS, GPUS, chip_for
from maxbatch.hardware.heap import in_pieces

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


Flags = tuple[tuple[str, str], ...]
"""(name, value), by name: hashable, as what a compiled step is kept by."""

EXPLORE, NONE = "explore", "none"
_UNKNOWN = re.compile(r"No such compile option: '(?P<name>\w+)'")


@dataclasses.dataclass(frozen=True)
class FlagSet:
  """Flags that someone has published for training dense models on a generation."""

  flags: str
  source: str


_ASYNC_ALL_GATHER = (
  "xla_tpu_enable_async_collective_fusion=true "
  "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
  "xla_tpu_enable_async_collective_fusion_multiple_steps=true "
  "xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true"
)
"""All-gathers beside products that do not need them. What is published for v5p and v6e has these, too,
but libtpu 0.0.51 refuses to fuse all-gathers on other chips than v5e: wrong results and hangs."""
_ASYNC_ALL_REDUCE = (
  "xla_tpu_enable_async_collective_fusion=true "
  "xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true "
  "xla_tpu_enable_async_collective_fusion_multiple_steps=true "
  "xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_reduce=true "
  "xla_jf_crs_combiner_threshold_in_bytes=1048576 "
  "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
)
"""All-reduces of gradients beside the next product. The compiler by default joins gradients to messages of up to
120 MiB, and only one that is on its own can run beside a product: those from 1 MiB on stay apart. On small slices
it divides products into windows, between which parts of sums are sent on; then there are no all-reduces."""
_DATA_PARALLEL = (
  "xla_tpu_enable_data_parallel_all_reduce_opt=true "
  "xla_tpu_data_parallel_opt_different_sized_ops=true"
)
"""All-reduces of gradients between slices, pipelined."""
_DENSE_VECTOR_MEMORY = "xla_tpu_scoped_vmem_limit_kib=98304"
"""Vector memory for one operation; what is left prefetches for the next ones."""
_SPARSE_CORE = (
  "xla_tpu_use_tc_device_shape_on_sc=true xla_sc_enable_instruction_fusion=false "
  "xla_sc_disable_megacore_partitioning=true"
)
"""Without xla_sc_disjoint_spmem, which is no option of a single compilation (libtpu 0.0.51)."""

_GPU = (
  "xla_gpu_enable_latency_hiding_scheduler=true xla_gpu_enable_triton_gemm=false "
  "xla_gpu_all_reduce_combine_threshold_bytes=134217728 "
  "xla_gpu_all_gather_combine_threshold_bytes=134217728 "
  "xla_gpu_reduce_scatter_combine_threshold_bytes=67108864 "
  "xla_gpu_enable_pipelined_all_gather=true xla_gpu_enable_pipelined_reduce_scatter=true "
  "xla_gpu_enable_pipelined_all_reduce=true xla_gpu_enable_while_loop_double_buffering=true "
  "xla_gpu_enable_all_gather_combine_by_dim=false "
  "xla_gpu_enable_reduce_scatter_combine_by_dim=false xla_disable_hlo_passes=rematerialization"
)
"""Collectives beside products and in larger messages, products by cuBLAS."""
_ON_HOPPER = FlagSet(
  f"{_GPU} xla_gpu_enable_command_buffer=",
  "MaxText at e591f30c, configs/gpu/a3/llama_2_7b/1vm.sh, with the names of JAX-Toolbox's "
  "llama2-7b-1N8G.env for pipelined collectives, which XLA of jax 0.10.2 knows",
)
_ON_BLACKWELL = FlagSet(
  f"{_GPU} xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
  "as for h100, with JAX-Toolbox's command buffers for B200 (docs/GPU_performance.md)",
)

FLAG_SETS: Mapping[str, Mapping[str, FlagSet]] = {
  "v4": {
    "published": FlagSet("xla_enable_async_all_gather=true", "MaxText 0.2.5, configs/tpu/v4/*.sh")
  },
  "v5e": {
    "published": FlagSet(
      f"{_DATA_PARALLEL} {_ASYNC_ALL_GATHER}", "MaxText 0.2.5, configs/tpu/v5e/*.sh"
    ),
    "all_reduces": FlagSet(
      _ASYNC_ALL_REDUCE,
      "MaxText's benchmarks/xla_flags_library.py, continuation fusion for all-reduces, with gradients that are "
      "not joined to one message: MaxText's and MLPerf's scripts for v5e set their number, this their bytes; "
      "without windows, as in MaxText's recipes",
    ),
  },
  "v5p": {
    "published": FlagSet(
      f"{_DATA_PARALLEL} xla_tpu_megacore_fusion_allow_ags=false "
      "xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true "
      "xla_enable_async_collective_permute=true xla_tpu_enable_ag_backward_pipelining=true",
      "MaxText 0.2.5, configs/tpu/v5p/*.sh, without the fusion of all-gathers",
    )
  },
  "v6e": {
    "published": FlagSet(
      f"{_DENSE_VECTOR_MEMORY} xla_tpu_assign_all_reduce_scatter_layout=true "
      "xla_tpu_enable_data_parallel_all_reduce_opt=true "
      "xla_tpu_enable_sparse_core_collective_offload_all_gather=true "
      "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true "
      "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
      "xla_tpu_aggressive_opt_barrier_removal=ENABLED",
      "the sets for dense models of MaxText's benchmarks/xla_flags_library.py, commit 48445cf: vector "
      "memory, layouts for reduce-scatter, collectives on the SparseCores",
    ),
    "all_gathers": FlagSet(
      f"{_DENSE_VECTOR_MEMORY} xla_tpu_use_minor_sharding_for_major_trivial_input=true "
      "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 "
      f"{_DATA_PARALLEL} xla_tpu_overlap_compute_collective_tc=true xla_enable_async_all_gather=true",
      "MaxText 0.2.5, configs/tpu/v6e/*.sh, without the fusion of all-gathers",
    ),
    "offloading": FlagSet(
      f"{_DENSE_VECTOR_MEMORY} xla_tpu_use_minor_sharding_for_major_trivial_input=true "
      "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 "
      f"xla_tpu_assign_all_reduce_scatter_layout=true {_DATA_PARALLEL} "
      "xla_tpu_enable_async_collective_fusion=false xla_tpu_overlap_compute_collective_tc=true "
      "xla_enable_async_all_gather=true "
      "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
      f"xla_tpu_enable_all_reduce_offload_tracing=true {_SPARSE_CORE} "
      "xla_tpu_enable_all_experimental_scheduler_features=true "
      "xla_tpu_enable_scheduler_memory_pressure_tracking=true "
      "xla_tpu_host_transfer_overlap_limit=24 xla_tpu_aggressive_opt_barrier_removal=ENABLED "
      "xla_lhs_prioritize_async_depth_over_stall=ENABLED "
      "xla_tpu_enable_ag_backward_pipelining=true "
      "xla_should_allow_loop_variant_parameter_in_chain=ENABLED "
      "xla_should_add_loop_invariant_op_in_chain=ENABLED xla_max_concurrent_host_send_recv=100 "
      "xla_tpu_scheduler_percent_shared_memory_limit=100 xla_latency_hiding_scheduler_rerun=2 "
      "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
      "AI-Hypercomputer/tpu-recipes, training/trillium/Mistral-7B-MaxText: as above, with its "
      "scheduling for activations on the host",
    ),
  },
  **{generation: {"published": _ON_HOPPER} for generation in ("a100", "h100", "h200")},
  **{generation: {"published": _ON_BLACKWELL} for generation in ("b200", "gb200")},
}
"""By generation and name."""


class CompilerFlags(NamedTuple):
  """What a step is compiled with."""

  asked: str = NONE
  flags: Flags = ()
  of_platform: Flags = ()
  """Those that nobody has to ask for."""
  left_out: tuple[str, ...] = ()
  """Names in a published set that this version of the compiler does not know."""

  @property
  def options(self) -> dict[str, Any] | None:
    """The options that jax's compile takes; None where there are none."""
    words = {"true": True, "false": False}
    return {name: words.get(value, value) for name, value in self.of_platform + self.flags} or None

  def without(self, name: str) -> "CompilerFlags":
    """Returns the flags but one, which is left out."""
    flags = tuple(flag for flag in self.flags if flag[0] != name)
    return self._replace(flags=flags, left_out=(*self.left_out, name))

  @property
  def note(self) -> str:
    """What to say of flags that are left out, after a statement; empty if there are none."""
    return (
      f", without {', '.join(self.left_out)}, which this compiler does not know"
      if self.left_out
      else ""
    )

  def __str__(self) -> str:
    """Returns the flags as a command line has them."""
    return " ".join(f"--{name}={value}" for name, value in self.flags)


NO_FLAGS = CompilerFlags()

writes_operands = jax.make_user_context(default_value=False)
"""Whether what a step's programs are traced in writes the results of norms that products read, see
`is_short_of_vector_memory`."""
_MANY_FLOPS = 400
"""For each byte of memory traffic: a v6e has 560, other TPUs 166 to 312."""


def is_short_of_vector_memory(flags: CompilerFlags, device: Any) -> bool:
  """Returns whether a chip's products wait for memory, as their tiles share the vector memory that an operation
  has by default with whatever the compiler fuses into them. With published flags it has six times as much."""
  chip = chip_for(device.device_kind)
  given = any("scoped_vmem_limit" in name for name, _ in flags.flags)
  return chip is not None and chip.peak_flops > _MANY_FLOPS * chip.hbm_bandwidth and not given


def quick_flags(platform: str) -> Flags:
  """Returns those with which a platform's programs compile sooner and run as fast: on CPU LLVM's level 1.

  A step spends its time in products, which are compiled already. Where jax is told to optimize even less,
  that stays.
  """
  if platform != "cpu" or jax.config.values["jax_disable_most_optimizations"]:
    return ()
  return (("xla_backend_optimization_level", "1"),)


def flags_of_program(flags: CompilerFlags, traced: jax.stages.Traced, mesh: Mesh) -> CompilerFlags:
  """Returns a trainer's flags with those that follow from a traced program."""
  return flags._replace(
    of_platform=flags.of_platform + in_pieces(traced.jaxpr, list(mesh.devices.flat))
  )


def compiled_with(
  flags: CompilerFlags, traced: jax.stages.Traced, mesh: Mesh
) -> jax.stages.Compiled:
  """Compiles a traced program with a trainer's flags, and those that follow from it."""
  return traced.lower().compile(flags_of_program(flags, traced, mesh).options)


def compiler_flags(asked: str, device: Any) -> CompilerFlags:
  """Returns what compiler_flags says, for a device and its compiler.

  XLA renames and drops options from version to version: what a set has and the compiler does not know
  is left out. Flags that the user names are all checked.

  Raises:
    UserError: it names a set that there is not for the device, or a flag or value that its compiler
      does not know.
  """
  quick = quick_flags(device.platform)
  if asked.strip() in ("", NONE, EXPLORE):
    return CompilerFlags(of_platform=quick)  # with explore none is chosen yet
  known, flags, own = sets_for(device), dict[str, str](), set[str]()
  for word in asked.split():
    name, equals, value = word.removeprefix("--").partition("=")
    if equals or word.startswith("--"):
      flags[name] = value if equals else "true"
      own.add(name)
    elif name in known:
      flags |= dict(word.split("=") for word in known[name].flags.split())
    else:
      raise UserError(_unknown_set(asked, name, device))
  result = CompilerFlags(" ".join(asked.split()), tuple(sorted(flags.items())), quick)
  return _checked(result, own, device)


def sets_for(device: Any) -> Mapping[str, FlagSet]:
  """Returns the published sets for a device; none if nothing is published of it."""
  chip = chip_for(device.device_kind)
  return FLAG_SETS.get(chip.generation, MappingProxyType({})) if chip else MappingProxyType({})


def explored(device: Any) -> Sequence[str]:
  """Returns what compiler_flags=explore tries on a device."""
  return (NONE, *sets_for(device))


def _unknown_set(asked: str, name: str, device: Any) -> str:
  known = [NONE, EXPLORE, *sets_for(device)]
  where = f"of which there are for {device.device_kind}: {', '.join(known)}."
  if name == EXPLORE:
    return f"compiler_flags={asked}: explore cannot be combined; write compiler_flags=explore"
  if any(name in sets for sets in FLAG_SETS.values()):
    have = ", ".join(each for each in (*CHIPS, *GPUS) if name in FLAG_SETS.get(each, {}))
    return (
      f"compiler_flags={asked}: nothing is published as {name!r} for {device.device_kind}, only for "
      f"{have}; use compiler_flags=none, or the flags themselves: compiler_flags='--xla_…=…'"
    )
  return (
    f"compiler_flags={asked}: {name!r} is neither a flag, --name=value, nor the name of a set, {where}"
    f"{did_you_mean(name, known)}"
  )


def _checked(result: CompilerFlags, own: Set[str], device: Any) -> CompilerFlags:
  """Lets the compiler itself say whether it knows the flags, on a program of one addition, and returns
  those that it knows; own are those that the user wrote."""
  while problem := _problem(result, _checking(device)):
    unknown = _UNKNOWN.match(problem)
    if unknown is None or unknown["name"] in own or unknown["name"] not in dict(result.flags):
      raise UserError(
        f"compiler_flags={result.asked}: the compiler for {device.device_kind} refuses: {problem}; leave "
        "that flag out, or use compiler_flags=none"
      )
    result = result.without(unknown["name"])
  return result


def _checking(device: Any) -> Any:
  """Returns a device of this process with the same compiler, which one of another process is
  not."""
  own = jax.local_devices()[0]
  return own if own.device_kind == device.device_kind else device


@functools.lru_cache(16)
def _problem(result: CompilerFlags, device: Any) -> str:
  number = jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(device))
  try:
    with bypassed():
      jax.jit(lambda x: x + x).lower(number).compile(compiler_options=result.options)
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    return str(error).strip().splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
  return ""
