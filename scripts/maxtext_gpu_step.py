"""MaxText's training step, compiled for GPUs that are not here and priced by our estimator.

    PYTHONPATH=. PEER/bin/python scripts/maxtext_gpu_step.py h100-64 model_name=llama2-7b ici_fsdp_parallelism=64 …

PEER is an environment with MaxText 0.2.5, its jax (0.12.0.1) and the jax-cuda13-plugin and jax-cuda13-pjrt of
that version, without CUDA's libraries. Our step compiled there by `-m maxbatch.train compile_only=true` is of
the same compiler. Prints seconds of a step by kind of work, and GB at a device's peak, with what the compiler
leaves out.

MaxText's own compile command wants a GPU of the generation to be present. Here it is given the devices as it
is given those of a TPU slice; nothing else of it is changed. Its published runs on GPUs have
attention=cudnn_flash_te, which needs TransformerEngine; cudnn_flash_jax is jax's own call of cuDNN.
"""

import importlib
import pathlib
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any

from step_breakdown import Breakdown, breakdown, peers

from maxbatch.estimate import hlo
from maxbatch.estimate.chips import ALL_CHIPS, GPU_DATA
from maxbatch.estimate.costs import program_costs
from maxbatch.estimate.gpu_corrections import left_out
from maxbatch.hardware.devices import topology_devices
from maxbatch.hardware.topologies import slice_named

KEYS = (
  "run_name=step",
  "base_output_directory=/tmp",
  "dataset_type=synthetic",
  "hardware=gpu",
  "attention=cudnn_flash_jax",
  "packing=false",
  "enable_goodput_recording=false",
  "skip_jax_distributed_system=true",
  "compile_topology_num_slices=1",
)


def step_of(place: str, keys: Sequence[str]) -> Breakdown:
  """Returns MaxText's step for GPUs of this name, part by part."""
  generation = slice_named(place).gpu
  with tempfile.TemporaryDirectory() as folder:
    options = {
      "xla_dump_to": folder,
      "xla_dump_hlo_as_text": True,
      "xla_syntax_sugar_async_ops": False,
      # XLA of jax 0.12.0.1 aborts over its own kernel for an all-reduce of one integer over 64 GPUs.
      "xla_gpu_experimental_use_collective_kernels": "",
    }
    if GPU_DATA[generation]["has_tables"]:
      options["xla_gpu_collect_cost_model_stats"] = True
    memory = compiled(place, keys, options).memory_analysis()
    files = pathlib.Path(folder).glob("*gpu_after_optimizations.txt")
    text = max((file.read_text() for file in files), key=len)
  program, chip = hlo.parse(text), ALL_CHIPS[generation]
  peak = memory.peak_memory_in_bytes
  return breakdown(
    place,
    program_costs(program, peers(text)),
    chip,
    devices_per_slice=chip.domain if slice_named(place).num_devices > chip.domain else None,
    peak_bytes=peak + sum(left_out(program, peak).values()),
  )


def compiled(place: str, keys: Sequence[str], options: Mapping[str, Any]) -> Any:
  """Returns MaxText's step as its compile command compiles it, with these options of the compiler."""
  command: Any = importlib.import_module("maxtext.trainers.pre_train.train_compile")
  known: Any = importlib.import_module("maxtext.utils.accelerator_to_spec_map")
  described = known.SystemCharacteristics(
    "cuda", place, None, None, slice_named(place).num_devices, None
  )
  known.UserFacingNameToSystemCharacteristics[place] = described
  devices = topology_devices(place)
  command.get_topology_desc = lambda **_: types.SimpleNamespace(devices=devices)
  # In MaxText's key for flags true and false stay words, which XLA refuses.
  command.max_utils.parse_libtpu_flags_to_dict = lambda _: dict(options)
  results: list[Any] = []
  compile_step = command.jit_and_compile

  def keep(*given: Any, **named: Any) -> Any:
    results.append(compile_step(*given, **named))
    return results[-1]

  command.jit_and_compile = keep
  base = pathlib.Path(command.__file__).parents[2] / "configs" / "base.yml"
  command.main(["train_compile", str(base), f"compile_topology={place}", *KEYS, *keys])
  return results[-1]


def main(arguments: Sequence[str]) -> int:
  """Prints a step's time and memory."""
  place, *keys = arguments
  step = step_of(place, keys)
  work = ", ".join(f"{name} {seconds:.4f}" for name, seconds in step.by_work().items() if seconds)
  print(f"{step.seconds:.4f} s ({work}; {step.hidden_seconds:.4f} s of collectives hidden)")
  flops = [step.flops() / 1e12, step.flops(["recomputed"]) / 1e12]
  print(f"{flops[0]:.2f} TFLOP, {flops[1]:.2f} of them recomputed")
  print(f"{(step.peak_bytes or 0) / 1e9:.2f} GB at the peak")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
