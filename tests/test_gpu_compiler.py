"""Compiled for GPUs that are not here, by XLA's own compiler for them, without a GPU or its driver."""

import importlib.util
import json
import pathlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxbatch import train_rl
from maxbatch.compile.program import capacity_bytes
from maxbatch.compile.report_time import why_not_estimated
from maxbatch.errors import UserError
from maxbatch.estimate.chips import GPU_DATA, GPUS
from maxbatch.estimate.step_time import estimate
from maxbatch.hardware import devices
from maxbatch.hardware.compiler_flags import FLAG_SETS, bypassed, compiler_flags
from maxbatch.hardware.devices import topology_devices
from maxbatch.hardware.topologies import slice_named
from maxbatch.train import main

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
COMPILER = pytest.mark.skipif(
  not any(importlib.util.find_spec(plugin) for plugin in PLUGINS),
  reason="needs XLA's compiler for NVIDIA GPUs (extra: gpu-compile)",
)
GPT2 = {
  "model_name": "gpt2-small",
  "base_num_decoder_layers": 2,
  "base_emb_dim": 128,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 512,
  "vocab_size": 2048,
  "max_target_length": 128,
  "per_device_batch_size": 2,
  "packing": "false",
}
FEWER = {"mlp_bias": "false", "attention_qkv_bias": "false", "attention_out_bias": "false"}
FEWER |= {"opt_type": "sgd", "dropout_rate": 0, "base_num_decoder_layers": 1}
"""Kernels, each of which takes the compiler a while."""
SMALLER = {"base_emb_dim": 64, "base_mlp_dim": 128, "vocab_size": 264, "max_target_length": 32}
"""Where tiles are chosen among fewer."""


def command(folder: pathlib.Path, **keys: object) -> list[str]:
  given = {
    "dataset_type": "synthetic",
    "dtype": "bfloat16",
    "base_output_directory": folder,
    "run_name": "run",
  }
  return ["config=base", *(f"{key}={value}" for key, value in (given | GPT2 | keys).items())]


@COMPILER
def test_a_step_is_compiled_for_two_hosts_and_their_network(tmp_path, capsys):
  keys = {
    "base_num_decoder_layers": 1,
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 8,
    "compile_topology_network_gbps": 100,
  }
  assert main(command(tmp_path, compile_only="true", compile_topology="h100-16", **keys)) == 0
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  memory, estimate = report["memory_bytes_per_device"], report["estimate"]
  assert memory["capacity"] == GPUS["h100"].usable_bytes
  assert set(memory["left_out_by_the_compiler"]) == {
    "workspace of attention",
    "workspace of cuBLAS",
    "fragmentation",
  }
  held = memory["parameters"] + memory["optimizer_state"] + memory["accumulators"]
  assert memory["peak"] > held + sum(memory["left_out_by_the_compiler"].values())
  assert 0.97 < estimate["coverage"] < 1.03
  assert estimate["compiler_share"] > 0.9
  gathered = [one for one in report["collectives"] if one["kind"] == "all-gather"]
  assert gathered
  assert not any(one["crosses_slices"] for one in gathered)
  gradients = max(
    (one for one in report["collectives"] if one["kind"] == "all-reduce"),
    key=lambda one: one["bytes"] * one["crosses_slices"],
  )
  assert (gradients["group_size"], gradients["in_microbatch_loop"]) == (2, False)
  port = 100e9 / 8 * GPUS["h100"].network_share
  assert gradients["seconds"] == pytest.approx(gradients["bytes"] / port)
  assert "in groups of 2, across hosts" in capsys.readouterr().out


@COMPILER
def test_what_does_not_fit_is_a_sentence(tmp_path, capsys):
  keys = {"compile_topology": "a100-8", "device_memory_gb": 0.02, **FEWER, **SMALLER}
  assert main(command(tmp_path, compile_only="true", **keys)) == 2
  error = capsys.readouterr().err
  assert re.match(
    r"error: per_device_batch_size=2: the step needs [\d.]+ GiB a device, which", error
  )


@COMPILER
def test_all_is_checked_without_compiling(tmp_path, capsys):
  keys = {"compile_topology": "gb200-4", "validate_only": "true"}
  assert main(command(tmp_path, **keys)) == 0
  assert "4 × NVIDIA GB200" in capsys.readouterr().out


@COMPILER
@pytest.mark.parametrize("name", ["a100-4", "h100-16", "h200-8", "b200-8", "gb200-72"])
def test_the_compiler_takes_the_names_and_counts_the_same(name):
  there, named = topology_devices(name), slice_named(name)
  assert len(there) == named.num_devices
  assert len({getattr(device, "process_index", 0) for device in there}) == named.num_hosts
  assert {device.device_kind for device in there} == {named.device_kind}
  assert {str(getattr(device, "compute_capability", "")) for device in there} == {
    named.compute_capability
  }


@COMPILER
@pytest.mark.parametrize("generation", GPUS)
def test_the_compiler_takes_every_published_set(generation: str):
  device = topology_devices(f"{generation}-1")[0]
  for name, published in FLAG_SETS[generation].items():
    taken = compiler_flags(name, device)
    assert len(taken.flags) + len(taken.left_out) == len(published.flags.split())
    # XLA of jax 0.11 has three of them no more; the one of 0.10 knows all.
    assert len(taken.left_out) == (3 if jax.__version_info__ >= (0, 11) else 0)
    assert all("pipelined" in gone for gone in taken.left_out)
    assert published.source


def written_microseconds(generation: str, left: Any, result: Any) -> float:
  """The compiler's time of a product of two matrices of 4096 by 4096, as it stands in the text."""
  place = jax.sharding.SingleDeviceSharding(topology_devices(f"{generation}-1")[0])
  matrix = jax.ShapeDtypeStruct((4096, 4096), left, sharding=place)
  with bypassed():
    lowered = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=result)).lower(
      matrix, matrix
    )
    text = lowered.compile({"xla_gpu_collect_cost_model_stats": True}).as_text() or ""
  times = re.findall(r'"exec_time_us":([\d.]+)[^{}]*"name":"sol"', text)
  return max(map(float, times))


@COMPILER
@pytest.mark.parametrize(
  ("left", "result", "factor"), [("bfloat16", "float32", 64), ("float16", "float16", 8)]
)
def test_the_compiler_still_charges_too_much_for_types_outside_of_its_table(left, result, factor):
  """If this fails, XLA is repaired: leave these types out of maxbatch/estimate/gpu_corrections.py."""
  right = written_microseconds("h100", "bfloat16", "bfloat16")
  assert 140 < right < 220
  assert written_microseconds("h100", left, result) == pytest.approx(factor * right, rel=0.01)


@COMPILER
def test_the_compiler_still_has_no_tables_of_gpus_before_hopper():
  """If this fails, XLA has them: let program.py ask for them."""
  with pytest.raises(jax.errors.JaxRuntimeError, match="sm_80"):
    written_microseconds("a100", "bfloat16", "bfloat16")


@COMPILER
@pytest.mark.parametrize("policy", ["auto", "{explore: {min: 1, max: 1}}"])
def test_the_microbatch_is_chosen_for_gpus_that_are_not_here(tmp_path, capsys, policy: str):
  keys = {"compile_topology": "a100-8", "micro_batch_size": policy, **FEWER, **SMALLER}
  arguments = [one for one in command(tmp_path, batch_size=8, **keys) if "per_device" not in one]
  assert main([*arguments, "compile_only=true"]) == 0
  assert re.search(
    "micro_batch_size auto: 1 sample" if policy == "auto" else "suggested global batches",
    capsys.readouterr().out,
  )
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert report["memory_bytes_per_device"]["capacity"] == GPUS["a100"].usable_bytes


@COMPILER
def test_a_mixture_multiplies_each_token_by_its_own_experts(tmp_path):
  """One of 4: a product of every token with every expert would be 4 times the work."""
  keys = FEWER | {"num_experts": 4, "num_experts_per_tok": 1}
  keys |= {"norm_topk_prob": "false", "base_moe_mlp_dim": 512}
  keys |= {"compile_topology": "h100-8", "remat_policy": "none", "mlp_activation": "swiglu"}
  assert main(command(tmp_path, compile_only="true", **keys)) == 0
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert 0.97 < report["estimate"]["coverage"] < 1.03
  flops = report["flops_per_device"]
  assert flops["program_microbatch"] < 1.3 * flops["model_microbatch"]


@COMPILER
def test_reinforcement_learning_is_compiled_for_gpus_that_are_not_here(tmp_path):
  keys = [f"base_output_directory={tmp_path}", "run_name=run", "base_num_decoder_layers=1"]
  keys += ["config=configs/post_train/rl.yml", "compile_only=true", "compile_topology=h100-8"]
  assert train_rl.main(keys) == 0
  assert "NVIDIA H100" in (tmp_path / "run" / "compile_report.txt").read_text()


@COMPILER
def test_a_rack_is_compiled_without_the_compilers_own_table_which_fails(tmp_path):
  """XLA fails as it reads its table for GB200; if "has_tables" is set for it and this passes, leave it so."""
  keys = {"compile_topology": "gb200-8", **FEWER}
  assert main(command(tmp_path, compile_only="true", **keys)) == 0
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert 0.97 < report["estimate"]["coverage"] < 1.03


@pytest.mark.parametrize("instead", ["", "compile_only", "validate_only"])
def test_an_unknown_name_lists_the_known_ones(tmp_path, capsys, instead: str):
  keys = {"compile_topology": "h300-8"} | ({instead: "true"} if instead else {})
  assert main(command(tmp_path, **keys)) == 2
  error = capsys.readouterr().err
  assert "compile_topology=h300-8: unknown slice. Did you mean h200? Known: v4-4096, " in error
  assert "h100-16384" in error
  assert not (tmp_path / "run").exists()


def test_without_the_compiler_the_way_to_it_is_named(tmp_path, capsys, monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *_: None if name in PLUGINS else find(name)
  )
  assert main(command(tmp_path, compile_only="true", compile_topology="h100-8")) == 2
  assert capsys.readouterr().err == (
    "error: compile_topology=h100-8 needs XLA's compiler for NVIDIA GPUs, which is not installed; "
    "pip install 'maxbatch[gpu-compile]' installs it, on any Linux machine, without a GPU or driver\n"
  )
  assert not (tmp_path / "run").exists()


def test_a_text_that_is_not_understood_names_the_versions_for_gpus():
  work = estimate([], GPUS["h100"], 1e12)
  versions = {"jax": "0.11.0", "jax-cuda13-plugin": "0.11.0", "libtpu": None}
  assert (
    "This is jax 0.11.0 and jax-cuda13-plugin 0.11.0; estimates are tested with jax 0.10.2 and "
    "jax-cuda13-plugin 0.10.2: pip install jax==0.10.2 jax-cuda13-plugin==0.10.2."
  ) in why_not_estimated(work, [], 1e12, versions)


def gpu(kind: str, **more: Any) -> Any:
  return types.SimpleNamespace(device_kind=kind, platform="gpu", **more)


def test_jax_takes_a_share_of_a_gpu_that_is_not_here(monkeypatch):
  there, total = [gpu("NVIDIA H200")], GPU_DATA["h200"]["device_memory_size"]
  assert capacity_bytes(there, 0) == int(0.75 * total)
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
  assert capacity_bytes(there, 0) == pytest.approx(0.9 * total, abs=2)
  assert capacity_bytes(there, 2) == 2 * 2**30
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
  with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION=most must be a fraction"):
    capacity_bytes(there, 0)


def test_a_gpu_that_is_here_is_asked(monkeypatch):
  local = gpu("NVIDIA H200", memory_stats=lambda: {"bytes_limit": 77})
  monkeypatch.setattr(jax, "local_devices", lambda: [local])
  assert capacity_bytes([gpu("NVIDIA H200")], 0) == 77
  assert capacity_bytes([gpu("NVIDIA B200")], 0) == GPUS["b200"].usable_bytes


def test_cudnn_counts_as_installed_in_the_plugins_version(monkeypatch):
  attention = devices.fused_attention_stablehlo
  versions = types.SimpleNamespace(cudnn_build_version=lambda: 91200)

  def missing() -> int:
    raise RuntimeError("cuDNN not found.")

  monkeypatch.setattr(devices, "cuda_versions", versions)
  monkeypatch.setattr(attention, "check_cudnn_version", missing)
  devices.assume_cudnn()
  assert attention.check_cudnn_version() == 91200
  monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91500)
  devices.assume_cudnn()
  assert attention.check_cudnn_version() == 91500


def test_the_plugin_alone_prints_no_traceback_where_there_is_no_gpu(monkeypatch):
  files = set[str]()
  monkeypatch.setattr(pathlib.Path, "exists", lambda path: str(path) in files)
  monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
  devices.keep_libraries_quiet()
  assert devices.os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
  monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
  files.add("/dev/nvidiactl")
  devices.keep_libraries_quiet()
  assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in devices.os.environ
