"""Processes of their own that tests start: with what environment, and for how long one waits."""

import os
import pathlib

import jax

REPOSITORY = pathlib.Path(__file__).parents[1]

PATIENCE_SECONDS = 600
"""Who takes longer hangs: a machine that is busy with other things is no failure."""

ONE_DEVICE = "num_simulated_devices=1"
"""Starts and steps in half the time, where it is not the devices that a test is about."""


_OLDER_XLA = jax.__version_info__ < (0, 11)
QUICKLY = " ".join(
  [
    # These emitters go through several of LLVM's dialects, as long as all the rest of a compilation.
    "--xla_cpu_use_fusion_emitters=false",
    # A program in 32 parts compiles faster on idle cores, and takes a fifth more of their time.
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA ends a process whose simulated devices have waited for each other for 40 s, as on a loaded
    # machine they may.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
  ]
  if _OLDER_XLA
  else []
)
"""What makes XLA compile in less processor time, and wait. Later versions have no other emitters."""


def environment(**changes: str) -> dict[str, str]:
  """This package, and the suite's compile cache and options.

  A start is most of what such a test costs: what one process compiled, its programs and its byte
  code, is there for the next, however small it is.
  """
  return os.environ | {
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}".strip(),
    "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPATH": str(REPOSITORY),
    **changes,
  }


def small_run(folder: pathlib.Path, text: pathlib.Path, cache: pathlib.Path) -> list[str]:
  """The arguments of a run that takes seconds, on a text that it writes."""
  text.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  sizes = "base_emb_dim=16 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2"
  sizes += " head_dim=8 base_mlp_dim=32 vocab_size=264 max_target_length=16 generate_length=0"
  sizes += (
    " eval_samples=8 eval_interval=-1 write_report=false batch_size=8 lr_schedule_type=constant"
  )
  paths = [f"base_output_directory={folder}", f"dataset_path={text}"]
  return ["config=base", *sizes.split(), *paths, f"dataset_cache_directory={cache}"]
