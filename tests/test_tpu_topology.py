"""Compiled for TPU slices that are not here, by the real TPU compiler."""

import dataclasses
import importlib.util
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import TINY, config, program_text

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import compile_step
from maxbatch.compile.program import (
  CompiledProgram,
  DoesNotFitError,
  capacity_bytes,
  refuse_if_too_large,
)
from maxbatch.compile.report_time import TESTED_VERSIONS, why_not_estimated
from maxbatch.core.topology import Topology
from maxbatch.estimate.chips import CHIPS
from maxbatch.estimate.costs import program_costs
from maxbatch.estimate.hlo import parse
from maxbatch.estimate.step_time import estimate
from maxbatch.hardware.compiler_flags import bypassed
from maxbatch.hardware.devices import topology_devices
from maxbatch.hardware.sharding import constrain, gathered, make_mesh, read_by
from maxbatch.train import main
from maxbatch.training.build import build_trainer, step_rows, traced_step

pytest.importorskip("libtpu")

DOT = """HloModule step

ENTRY %main {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %c = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
GIB = 2**30
MIB = 2**20
GPT2 = {
  "model_name": "gpt2-small",
  "base_num_decoder_layers": 2,
  "base_emb_dim": 128,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 512,
  "vocab_size": 2048,
  "max_target_length": 128,
  "micro_batch_size": 2,
  "batch_size": 16,
}


def command(folder: pathlib.Path, **keys: object) -> list[str]:
  given = {
    "compile_only": "true",
    "dataset_type": "synthetic",
    "dtype": "bfloat16",
    "base_output_directory": folder,
    "run_name": "run",
  }
  return ["config=base", *(f"{key}={value}" for key, value in (given | keys).items())]


def reported(folder: pathlib.Path, **keys: object) -> dict[str, Any]:
  """The report of the only program of a run, as plain values."""
  assert main(command(folder, **keys)) == 0
  (report,) = json.loads((folder / "run" / "compile_report.json").read_text())
  return report


def refused(capsys: pytest.CaptureFixture[str], folder: pathlib.Path, **keys: object) -> str:
  assert main(command(folder, **keys)) == 2
  assert not (folder / "run").exists()
  return capsys.readouterr().err


def moved(report: dict[str, Any], kind: str, *, inside: bool) -> int:
  """Bytes of the collectives of a kind, inside or outside of the loop over microbatches."""
  return sum(
    one["bytes"]
    for one in report["collectives"]
    if one["kind"].startswith(kind) and one["in_microbatch_loop"] is inside
  )


def check(report: dict[str, Any]) -> None:
  """What every report of a slice must say."""
  memory = report["memory_bytes_per_device"]
  assert 0 < memory["peak"] < memory["capacity"] == CHIPS["v5e"].usable_bytes
  assert memory["fits"]
  held = memory["parameters"] + memory["optimizer_state"] + memory["accumulators"]
  assert memory["peak"] > held
  assert report["time"]["how"] == "estimate"
  assert report["time"]["seconds_per_microbatch"] > 0
  assert 0 < report["time"]["model_flop_utilisation"] < 0.6
  assert 0.97 < report["estimate"]["coverage"] < 1.03


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@pytest.mark.parametrize(
  ("goes_on", "first", "step", "trips"),
  [
    (lambda i: i < 7, 0, 1, 7),
    (lambda i: i > 0, 7, -1, 7),
    (lambda i: i >= 1, 7, -2, 4),
    (lambda i: i != 0, 7, -1, 7),
  ],
)
def test_loops_that_go_up_and_down_are_read(goes_on, first, step, trips, dtype):
  def repeated(matrix):
    def more(counted):
      number, product = counted
      return number + jnp.asarray(step).astype(dtype), jnp.tanh(product @ matrix)

    return jax.lax.while_loop(lambda counted: goes_on(counted[0]), more, (dtype(first), matrix))

  place = jax.sharding.SingleDeviceSharding(topology_devices("v5e-1")[0])
  matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=place)
  with bypassed():
    text = program_text(jax.jit(repeated).lower(matrix))
  products = [cost for cost in program_costs(parse(text)) if cost.flops]
  assert [(cost.count, cost.in_microbatch_loop) for cost in products] == [(trips, False)]


def test_a_text_that_is_not_understood_gives_no_time_but_its_memory(tmp_path, capsys, monkeypatch):
  """As of another compiler: its comparisons have another name, so that no loop can be read."""
  compiled = compile_step.compile_program

  def written_otherwise(*arguments: Any) -> CompiledProgram:
    program = compiled(*arguments)
    return dataclasses.replace(program, text=program.text.replace(" compare(", " compared("))

  monkeypatch.setattr(compile_step, "compile_program", written_otherwise)
  assert main(command(tmp_path, compile_topology="v5e-4", **TINY)) == 2
  printed = capsys.readouterr()
  found = re.search(
    r": ([\d.]+)% of its matrix products.* one iteration of the loops (.*?);", printed.err
  )
  assert found, printed.err
  assert 20 < float(found[1]) < 60
  assert "jit(step)/shard_map/while/body/transpose(jvp())/while" in found[2].split(", ")
  assert "error: the time of the compiled step cannot be estimated: " in printed.err
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  assert report["memory_bytes_per_device"]["fits"]
  assert report["not_estimated"] in printed.err
  assert not {"time", "estimate"} & report.keys()
  for text in (printed.out, (tmp_path / "run" / "compile_report.txt").read_text()):
    assert re.search(r"peak +[\d.]+ \w+ of 15\.75 GiB: fits", text)
    assert "Time: unknown; the time of the compiled step cannot be estimated" in text


def advice(versions: dict[str, object]) -> str:
  """What is said where half of the products are not found."""
  (cost,) = program_costs(parse(DOT))
  work = estimate([cost], CHIPS["v5e"], 2.0 * cost.flops)
  return why_not_estimated(work, [cost], 2.0 * cost.flops, versions)


def test_nobody_is_advised_to_install_what_is_installed():
  for tested in TESTED_VERSIONS:
    said = advice({**tested, "jaxlib": "any"})
    assert "pip install" not in said
    assert "gns" in said
  other = advice({"jax": "0.11.0", "libtpu": "0.0.51"})
  assert "This is jax 0.11.0 and libtpu 0.0.51;" in other
  assert "pip install jax==0.10.2 libtpu==0.0.51" in other


@pytest.mark.parametrize("layout", [{}, {"ici_fsdp_parallelism": 4}], ids=str)
def test_a_step_that_measures_every_rows_gradient_is_estimated(tmp_path, layout):
  check(reported(tmp_path, compile_topology="v5e-4", gns="all", **TINY, **layout))


def test_data_parallel_gradients_are_reduced_once_a_step(tmp_path):
  report = reported(tmp_path, compile_topology="v5e-4", gradient_accumulation_steps=2, **TINY)
  check(report)
  assert [one for one in report["collectives"] if one["in_microbatch_loop"]] == []
  gradients = report["memory_bytes_per_device"]["accumulators"]
  assert moved(report, "all-reduce", inside=False) == pytest.approx(gradients, rel=0.02)
  assert report["gradient_accumulation_steps"] == 2


def test_a_streamed_microbatch_is_computed_once(tmp_path):
  keys = {"accumulation": "streamed", "compile_topology": "v5e-4", "per_device_batch_size": 2}
  check(reported(tmp_path, **TINY, **keys, gradient_accumulation_steps=2))


def test_fsdp_gathers_in_every_pass(tmp_path):
  report = reported(
    tmp_path,
    **TINY | {"base_emb_dim": 128, "head_dim": 32, "base_mlp_dim": 512, "max_target_length": 128},
    compile_topology="v5e-4",
    ici_data_parallelism=1,
    ici_fsdp_parallelism=4,
  )
  check(report)
  # Every layer's bfloat16 matrices are gathered forward and backward.
  matrices = 2 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 512)
  assert moved(report, "all-gather", inside=True) >= 2 * 2 * matrices
  reduced = sum(moved(report, kind, inside=True) for kind in ("reduce-scatter", "all-reduce"))
  assert reduced > 2 * matrices
  for kind in ("all-gather", "reduce-scatter", "all-reduce"):
    assert moved(report, kind, inside=False) < 0.01 * moved(report, "all-gather", inside=True)


@pytest.mark.parametrize(("mlp", "is_there"), [(7168, True), (11008, False)])
def test_a_large_matrix_is_not_gathered_to_vector_memory(mlp, is_there):
  on_mesh = make_mesh(Topology.of(fsdp=4), topology_devices("v5e-4"))
  layers, tokens, emb = 4, 8192, 4096

  def shape(sizes, *names):
    place = jax.sharding.NamedSharding(on_mesh, jax.sharding.PartitionSpec(*names))
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=place)

  def layer(x, matrices):
    up, down = matrices
    y = x @ gathered(up, ("embed", "mlp")) @ gathered(down, ("mlp", "embed"))
    return constrain(y, ("batch", None)), None

  matrices = (
    shape((layers, emb, mlp), None, "fsdp"),
    shape((layers, mlp, emb), None, None, "fsdp"),
  )
  few = read_by(shape((4, tokens // 4), "fsdp"), on_mesh)
  with bypassed(), jax.sharding.use_abstract_mesh(on_mesh.abstract_mesh), few:
    step = jax.jit(lambda x, matrices: jax.lax.scan(layer, x, matrices)[0])
    text = program_text(step.trace(shape((tokens, emb), "fsdp"), matrices).lower())
  layouts = re.findall(rf"bf16\[(?:1,)?(?:{emb},{mlp}|{mlp},{emb})\]{{([^}}]*)}}", text)
  assert layouts
  # What XLA calls memory space 1.
  assert any("S(1)" in layout for layout in layouts) == is_there


@pytest.mark.parametrize(
  ("dtype", "tokens", "is_placed"),
  [("bfloat16", 8192, True), ("float32", 8192, False), ("bfloat16", 16384, False)],
)
def test_a_large_matrix_of_many_bits_or_readers_is_gathered_where_the_compiler_likes(
  dtype, tokens, is_placed
):
  keys = {"base_emb_dim": 4096, "base_mlp_dim": 11008, "base_num_decoder_layers": 1}
  keys |= {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 4, "max_target_length": 2048}
  settings = config(dtype=dtype, per_device_batch_size=tokens // 2048, attention="flash", **keys)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 4))
  trainer = build_trainer(settings, plan, topology_devices("v5e-4"))
  rows = step_rows(
    plan, trainer, compile_step.placeholder_rows(settings), plan.micro_batch_to_train
  )
  text = str(traced_step(trainer, rows).jaxpr)
  assert ("annotate_device_placement" in text) == is_placed


def test_gpt2_small_over_data_and_fsdp(tmp_path):
  report = reported(
    tmp_path,
    **GPT2,
    compile_topology="v5e-4",
    ici_data_parallelism=2,
    ici_fsdp_parallelism=2,
  )
  check(report)
  assert moved(report, "all-gather", inside=True) > 0
  gradients = report["memory_bytes_per_device"]["accumulators"]
  assert moved(report, "all-reduce", inside=False) == pytest.approx(gradients, rel=0.02)
  text = (tmp_path / "run" / "compile_report.txt").read_text()
  assert "on v5e-4\n  4 × TPU v5 lite: data 2 × fsdp 2 × tensor 1 × stage 1" in text
  assert re.search(r"peak +\S+ MiB of 15\.75 GiB: fits", text)


def test_two_slices_are_joined_by_the_network(tmp_path, capsys):
  report = reported(
    tmp_path,
    **TINY,
    compile_topology="v5e-4",
    compile_topology_num_slices=2,
    dcn_data_parallelism=2,
    ici_data_parallelism=1,
    ici_fsdp_parallelism=4,
  )
  check(report)
  crossing = [one for one in report["collectives"] if one["crosses_slices"]]
  assert crossing
  assert {(one["kind"], one["in_microbatch_loop"]) for one in crossing} == {("all-reduce", False)}
  assert "on 2 × v5e-4\n  8 × TPU v5 lite" in capsys.readouterr().out


def test_far_too_large_names_what_is_needed(tmp_path, capsys):
  printed = refused(
    capsys,
    tmp_path,
    **TINY | {"base_emb_dim": 8192, "base_mlp_dim": 65536, "base_num_decoder_layers": 8},
    compile_topology="v5e-1",
    per_device_batch_size=4,
  )
  result = re.match(
    r"error: per_device_batch_size=4: the step needs ([\d.]+) GiB a device, which has 15\.750 GiB; "
    r"micro_batch_size=auto finds the largest that fits; what helps: remat_policy=full",
    printed,
  )
  assert result, printed
  # 13 billion parameters: weights, two moments and sums of gradients in float32.
  assert float(result[1]) > 13 * 16 * 0.9 / 1.074


def test_unknown_slices_list_the_known(tmp_path, capsys):
  assert refused(capsys, tmp_path, compile_topology="v5e-100") == (
    "error: compile_topology=v5e-100: v5e has no slice of this size; nearest: "
    "compile_topology=v5e-128. Known: 1, 4, 8, 16, 32, 64, 128, 256\n"
  )
  printed = refused(capsys, tmp_path, compile_topology="v9-4")
  assert (
    "Known: v4-4096, v5p-17920, v5e-256, v6e-256, tpu7x-18432, a100-16384, h100-16384, h200-16384, "
    "b200-16384, gb200-16344 and smaller" in printed
  )


def test_without_the_compiler_the_way_to_it_is_named(tmp_path, capsys, monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name, *_: None if name == "libtpu" else find(name)
  )
  assert refused(capsys, tmp_path, compile_topology="v5e-4") == (
    "error: compile_topology=v5e-4 needs the TPU compiler, which is not installed; pip install "
    "'maxbatch[tpu]' installs it, on any x86-64 Linux machine\n"
  )


SLICES = {"v4": "v4-8", "v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4", "tpu7x": "tpu7x-2"}


def compiled_doubling(device: Any, size: int) -> int:
  """Peak of a program that doubles `size` bytes on one device, as the compiler says.

  Raises:
    DoesNotFitError: it refuses.
  """
  place = jax.sharding.SingleDeviceSharding(device)
  rows = jax.ShapeDtypeStruct((size // MIB, 512, 512), "float32", sharding=place)
  try:
    with bypassed():
      program = jax.jit(lambda x: x * 2).lower(rows).compile()
  except jax.errors.JaxRuntimeError as error:
    refuse_if_too_large(error)
    raise
  memory = program.memory_analysis()
  assert memory is not None
  return memory.peak_memory_in_bytes


@pytest.mark.parametrize("generation", SLICES)
def test_the_compiler_refuses_what_exceeds_the_usable_memory(generation):
  device = topology_devices(SLICES[generation])[0]
  usable = CHIPS[generation].usable_bytes
  assert capacity_bytes([device], 0) == usable
  # What is read and what is written: half each. Beside them the compiler wants a few MiB.
  assert usable - 32 * MIB < compiled_doubling(device, usable // 2 - 8 * MIB) <= usable
  with pytest.raises(DoesNotFitError) as error:
    compiled_doubling(device, usable // 2 + 4 * MIB)
  assert error.value.needed_bytes == pytest.approx(usable, rel=0.001)
  assert f"exceeds available HBM ({usable / GIB:.2f}G)" in str(error.value.__cause__)
