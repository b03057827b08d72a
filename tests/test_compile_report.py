"""The report of a compiled step: its numbers from where they are known, and what it prints."""

import dataclasses
import json
import os
import types
from fractions import Fraction
from typing import Any, cast

import jax
import numpy as np
import pytest
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.compile_step import write_reports
from maxbatch.compile.measured_time import Timing
from maxbatch.compile.program import (
  CompiledProgram,
  DoesNotFitError,
  ProgramMemory,
  StateBytes,
  capacity_bytes,
  compile_program,
  gib,
  memory_of,
  refuse_if_too_large,
  state_bytes,
)
from maxbatch.compile.report import CompileReport, make_report, memory_figures
from maxbatch.compile.report_time import StepTime
from maxbatch.compile.traced_flops import StepFlops
from maxbatch.core.plan import BatchPlan
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.estimate.chips import CHIPS, UNKNOWN_CHIP
from maxbatch.estimate.step_time import Exchange, Operation, RooflineSeconds, StepEstimate
from maxbatch.hardware.devices import Device
from maxbatch.training.build import build_trainer
from maxbatch.training.step import Trainer

GIB = 2**30
MIB = 2**20


def made(**keys: object) -> tuple[CompiledProgram, BatchPlan, Trainer]:
  """A small step compiled for the 8 simulated devices."""
  of = config(dataset_type="synthetic", base_num_decoder_layers=1, **keys)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  trainer = build_trainer(of, plan, jax.devices())
  source = build_dataset(of.data, of.batch.max_target_length).train
  program = compile_program(of, plan, trainer, source, plan.micro_batch_to_train)
  return program, plan, trainer


def reported(
  program: CompiledProgram, plan: BatchPlan, trainer: Trainer, **more: Any
) -> CompileReport:
  return make_report(
    plan, trainer, program, plan.micro_batch_to_train, GIB, more.get("measured"), "Report"
  )


# --- what a device holds --------------------------------------------------------------------------


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "ici_data_parallelism": 1},
    {"opt_type": "adafactor", "weight_dtype": "bfloat16", "weight_rounding": "nearest"},
    {"opt_type": "adamw", "mu_dtype": "bfloat16", "loss_scale": "dynamic"},
    {"opt_type": "muon", "ici_data_parallelism": 1, "ici_fsdp_parallelism": 8},
  ],
  ids=lambda keys: "-".join(map(str, keys.values())) or "data",
)
def test_state_bytes_are_those_of_the_arrays(keys):
  of = config(**keys)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  trainer = build_trainer(of, plan, jax.devices())
  state = trainer.init(0)
  accumulated = state.opt_state.acc_grads
  others = state.opt_state._replace(acc_grads=())
  first, last = jax.devices()[0], jax.devices()[-1]
  for device in (first, last):
    assert state_bytes(trainer.abstract) == StateBytes(
      on_device(state.params, device), on_device(others, device), on_device(accumulated, device)
    )
  assert state_bytes(trainer.abstract).total == sum(
    on_device(tree, first) for tree in (state.params, state.opt_state)
  )


def on_device(tree: Any, device: Device) -> int:
  """Bytes of all arrays' parts on one device."""
  parts = [part for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards]
  return sum(part.data.nbytes for part in parts if part.device == device)


# --- what it prints -------------------------------------------------------------------------------


def handmade(**changes: Any) -> CompileReport:
  """A report of round numbers: 8 devices, 4 samples of 16 tokens each in a pass, 2 passes."""
  of = config(per_device_batch_size=4, gradient_accumulation_steps=2, steps=3)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  operation = Operation("fusion.1", "mlp", 0.3, "compiler", 2, True, "jit(step)/mlp")
  bound = Operation("sort.2", "embedding", 0.1, "roofline", 1, True, "jit(step)/embedding")
  work = StepEstimate(
    microbatch_parts=RooflineSeconds(compute=0.3, memory=0.1),
    rest_parts=RooflineSeconds(interconnect=0.2),
    microbatch_flops=6 * 10**12,
    rest_flops=0,
    microbatch_bytes=7 * 10**9,
    rest_bytes=10**9,
    coverage=0.985,
    compiler_share=0.75,
    microbatch_scopes={"mlp": 0.3, "embedding": 0.1},
    rest_scopes={"other": 0.2},
    largest=[operation, bound],
    unestimated=[bound],
    collectives=[
      Exchange("all-gather", True, True, 4, False, 3, 2 * 10**9, 0.01),
      Exchange("all-reduce", False, False, 8, True, 1, 10**9, 0.2),
    ],
  )
  program = CompiledProgram(
    step=cast(Any, None),
    rows=cast(Rows, None),
    memory=ProgramMemory(
      arguments=101 * MIB, outputs=0, aliased=0, temporaries=512 * MIB, peak=GIB
    ),
    flops=StepFlops(6e12, 0.0),
    compile_seconds=12.5,
    text="",
  )
  report = CompileReport(
    title="Title",
    plan=plan,
    micro_batch=plan.micro_batch_to_train,
    program=program,
    state=StateBytes(25 * MIB, 50 * MIB, 25 * MIB),
    capacity_bytes=2 * GIB,
    chip=dataclasses.replace(UNKNOWN_CHIP, generation="x", peak_flops=100e12),
    work=work,
    time=StepTime(0.4, 0.2, "estimate"),
    model_flops_per_token=5e12 / 64,
  )
  return dataclasses.replace(report, **changes)


PRINTED = """\
Title
  compiled in 12.5 s

Memory of a device (compiler)
  parameters                     0.024 GiB
  optimizer state                0.049 GiB
  gradient accumulators          0.024 GiB
  rows of the step               0.001 GiB
  activations, temporaries       0.500 GiB
  peak                           1.000 GiB of 2.00: fits

Work of a device in one microbatch of 4 samples per device, of which a step has 2
  model                              5 TFLOP
  program                            6 TFLOP (1.20 of the model's: what is computed again counts \
twice)
  main memory                        7 GB read and written

Time (estimate)
  a step                             1 s: 0.2 s + 2 × 0.4 s a microbatch
  tokens per second              1,024 (128 a device)
  model-FLOP utilisation         10.0% of 100 TFLOP/s
  limited by                   compute
  coverage                       98.5% of the matrix products have a time, 75.0% of these from the \
compiler, the rest from the roofline

Where a step's time goes (estimate)
  mlp                              0.6 s  60.0%
  embedding                        0.2 s  20.0%
  other                            0.2 s  20.0%

Largest operations (estimate; in one microbatch)
         0.3 s  mlp        compiler      2 × fusion.1
         0.1 s  embedding  roofline      1 × sort.2
  roofline: 0.1 s of a microbatch are bounds, from the chip's figures and the instructions of \
attention's kernels, not the compiler's estimates; the \
longest are sort

Collectives of a device
  each microbatch      3 × all-gather                  2 GB in groups of 4, beside the work, 0.01 s on the \
links (estimate)
  each step            1 × all-reduce                  1 GB in groups of 8, across slices, work waits, \
0.2 s on the links (estimate)"""

WRITTEN = {
  "title": "Title",
  "micro_batch_to_train": 32,
  "per_device_batch_size": "4",
  "gradient_accumulation_steps": 2,
  "tokens_per_step": 1024,
  "memory_bytes_per_device": {
    "parameters": 25 * MIB,
    "optimizer_state": 50 * MIB,
    "accumulators": 25 * MIB,
    "frozen_parameters": 0,
    "rows": MIB,
    "activations_and_temporaries": 512 * MIB,
    "peak": GIB,
    "capacity": 2 * GIB,
    "host": 0,
    "fits": True,
  },
  "flops_per_device": {
    "model_microbatch": 5e12,
    "program_microbatch": 6 * 10**12,
    "program_rest": 0,
  },
  "bytes_per_device": {"microbatch": 7 * 10**9, "rest": 10**9},
  "collectives": [
    {
      "kind": "all-gather",
      "in_microbatch_loop": True,
      "overlapped": True,
      "group_size": 4,
      "crosses_slices": False,
      "count": 3,
      "bytes": 2 * 10**9,
      "seconds": 0.01,
    },
    {
      "kind": "all-reduce",
      "in_microbatch_loop": False,
      "overlapped": False,
      "group_size": 8,
      "crosses_slices": True,
      "count": 1,
      "bytes": 10**9,
      "seconds": 0.2,
    },
  ],
  "compile_seconds": 12.5,
  "compiler_flags": "",
  "time": {
    "how": "estimate",
    "step_seconds": 1.0,
    "seconds_per_microbatch": 0.4,
    "seconds_rest": 0.2,
    "tokens_per_second": 1024.0,
    "model_flop_utilisation": 0.1,
  },
  "estimate": {
    "limited_by": "compute",
    "coverage": 0.985,
    "compiler_share": 0.75,
    "seconds_by_scope": {"mlp": 0.6, "embedding": 0.2, "other": 0.2},
    "largest": [
      {
        "name": "fusion.1",
        "scope": "mlp",
        "seconds": 0.3,
        "how": "compiler",
        "count": 2,
        "in_microbatch_loop": True,
        "op_name": "jit(step)/mlp",
      },
      {
        "name": "sort.2",
        "scope": "embedding",
        "seconds": 0.1,
        "how": "roofline",
        "count": 1,
        "in_microbatch_loop": True,
        "op_name": "jit(step)/embedding",
      },
    ],
    "bounded_by_roofline": [
      {
        "name": "sort.2",
        "scope": "embedding",
        "seconds": 0.1,
        "how": "roofline",
        "count": 1,
        "in_microbatch_loop": True,
        "op_name": "jit(step)/embedding",
      },
    ],
  },
}


def test_the_text():
  assert str(handmade()) == PRINTED
  report = handmade()
  frozen = dataclasses.replace(
    report, state=dataclasses.replace(report.state, frozen_parameters=MIB)
  )
  line = "  frozen parameters              0.001 GiB\n"
  assert line in str(frozen)
  assert line not in PRINTED


def test_the_json(tmp_path):
  text, values = write_reports([handmade(), handmade(title="Other")], tmp_path / "run")
  assert text.read_text() == f"{PRINTED}\n\n\n{PRINTED.replace('Title', 'Other')}\n"
  assert json.loads(values.read_text()) == [WRITTEN, WRITTEN | {"title": "Other"}]


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(
    UserError, match=r"file/run/compile_report.txt cannot be written .*base_output_directory=runs"
  ):
    write_reports([handmade()], tmp_path / "file" / "run")


def test_a_measured_time_shows_no_estimate():
  report = handmade(time=StepTime(0.4, 0.2, "measured", spread=0.03))
  text, values = str(report), report.as_dict()
  assert "Time (measured)\n  a step                             1 s ± 3.0%: 0.2 s + 2 × " in text
  for word in ("limited by", "coverage", "Where a step", "Largest"):
    assert word not in text
  assert "estimate" not in values
  assert values["time"]["spread"] == 0.03


def test_without_figures_there_is_no_time():
  report = handmade(time=None, chip=None)
  assert "Time: unknown; the devices are not here" in str(report)
  assert "on the links" not in str(report)
  assert not {"time", "estimate"} & report.as_dict().keys()
  assert (report.step_seconds, report.utilisation) == (None, None)


def test_what_does_not_fit_says_so():
  report = handmade(capacity_bytes=GIB - 1)
  assert not report.fits
  assert "peak                           1.000 GiB of 1.00: DOES NOT FIT" in str(report)
  assert report.as_dict()["memory_bytes_per_device"]["fits"] is False
  assert handmade(capacity_bytes=GIB).fits


def test_a_step_is_the_rest_and_its_passes():
  time = StepTime(seconds_per_microbatch=0.4, rest=0.2, how="estimate")
  assert [time.of(passes) for passes in (1, 2, 5)] == pytest.approx([0.6, 1.0, 2.2])
  report = handmade()
  assert report.step_seconds == pytest.approx(1.0)
  # Twice 5 TFLOP in a second, of 100 TFLOP/s.
  assert report.utilisation == pytest.approx(0.1)
  faster = handmade(time=StepTime(0.1, 0.0, "measured"))
  assert faster.utilisation == pytest.approx(0.5)


# --- from a compiled step -------------------------------------------------------------------------


def test_a_measurement_goes_before_an_estimate():
  program, plan, trainer = made(gradient_accumulation_steps=2)
  report = reported(program, plan, trainer, measured=Timing(0.5, 0.25, 0.01, 3))
  assert report.time == StepTime(0.5, 0.25, "measured", 0.01)
  assert report.step_seconds == 1.25
  assert reported(program, plan, trainer).time is None
  assert report.model_flops_per_token > 0
  assert report.model_microbatch_flops == report.model_flops_per_token * 64


def test_a_streamed_step_is_one_pass():
  keys = {"gradient_accumulation_steps": 4, "per_device_batch_size": 2}
  fused = reported(*made(**keys))
  streamed = reported(*made(**keys, accumulation="streamed"))
  assert streamed.program.streamed
  assert not fused.program.streamed
  assert (streamed.work.rest_flops, streamed.work.rest_bytes) == (0, 0)
  assert streamed.work.microbatch_flops == fused.work.microbatch_flops + fused.work.rest_flops
  assert {one.in_microbatch_loop for one in streamed.work.collectives} == {True}
  assert {one.in_microbatch_loop for one in fused.work.collectives} == {False}
  assert streamed.work.coverage == pytest.approx(1.0, abs=0.03)
  assert streamed.num_microbatches == 4


def test_the_estimate_of_a_streamed_step_is_the_time_of_its_passes(monkeypatch):
  monkeypatch.setattr("maxbatch.compile.report.chip_for", lambda *_: CHIPS["v5e"])
  keys = {"gradient_accumulation_steps": 4, "per_device_batch_size": 2}
  streamed = reported(*made(**keys, accumulation="streamed"))
  assert streamed.time is not None
  assert streamed.time.rest == 0
  assert streamed.step_seconds == pytest.approx(4 * streamed.work.microbatch_seconds)
  fused = reported(*made(**keys))
  assert fused.time is not None
  assert fused.time.rest > 0
  assert fused.time.seconds_per_microbatch > 0


# --- memory ---------------------------------------------------------------------------------------


def test_a_simulated_device_has_its_share_of_the_machine():
  machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  assert capacity_bytes(jax.devices(), 0) == machine // 8
  assert capacity_bytes(jax.devices(), 1.5) == 1.5 * GIB


def device(kind: str, platform: str) -> Any:
  return types.SimpleNamespace(device_kind=kind, platform=platform)


@pytest.mark.parametrize("generation", CHIPS)
def test_a_tpu_has_what_its_compiler_allows(generation):
  chip = CHIPS[generation]
  assert capacity_bytes([device(chip.device_kind, "tpu")], 0) == chip.usable_bytes
  assert 0.94 < chip.usable_bytes / chip.hbm_bytes < 1.01
  assert capacity_bytes([device(chip.device_kind, "tpu")], 3) == 3 * GIB


def test_another_device_is_asked(monkeypatch):
  gpu = device("NVIDIA V100", "gpu")
  local = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 77})
  monkeypatch.setattr(jax, "local_devices", lambda: [local])
  assert capacity_bytes([gpu], 0) == 77
  local.memory_stats = lambda: None
  with pytest.raises(UserError) as error:
    capacity_bytes([gpu], 0)
  assert str(error.value) == (
    "NVIDIA V100 does not say how much memory it has; set device_memory_gb, for example "
    "device_memory_gb=16"
  )


REFUSALS = {
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required "
  "for HLO temporaries (224.00G) exceeds available HBM (15.75G). HLO module: jit_step.": 224 * GIB,
  "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded "
  "hbm capacity by 1.75G.": int(17.5 * GIB),
  "RESOURCE_EXHAUSTED: the total memory required for arguments (1.50T) exceeds": int(1536 * GIB),
  "RESOURCE_EXHAUSTED: Used 900.0M of 512.0M hbm.": 900 * MIB,
  "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.": 0,
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_compiler_says_it_needs(message):
  cause = jax.errors.JaxRuntimeError(message)
  with pytest.raises(DoesNotFitError) as error:
    refuse_if_too_large(cause)
  assert error.value.needed_bytes == REFUSALS[message]
  assert error.value.__cause__ is cause
  assert str(error.value) == f"the step needs {gib(REFUSALS[message])} a device"


def test_another_error_is_not_about_memory(monkeypatch):
  error = jax.errors.JaxRuntimeError("INTERNAL: Used 900.0M of 512.0M hbm.")

  def fail(*_: object, **__: object) -> None:
    raise error

  monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
  with pytest.raises(jax.errors.JaxRuntimeError) as raised:
    made(per_device_batch_size=2)
  assert raised.value is error


def test_rows_of_a_device_are_what_is_not_state():
  program, plan, trainer = made(per_device_batch_size=2)
  report = reported(program, plan, trainer)
  rows = report.as_dict()["memory_bytes_per_device"]["rows"]
  # Newer versions of jax leave out what the step does not use, here the samples' numbers.
  taken = program.step.input_shardings[0][1]
  both = zip(program.rows, taken, strict=True)
  shapes = [x for x, place in both if isinstance(x, jax.ShapeDtypeStruct) and place is not None]
  expected = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes) / 8
  # The loss's sums, the learning rate and the number of trips come on top.
  assert expected <= rows <= expected + 64
  assert report.plan.per_device(report.micro_batch) == Fraction(2)


def test_sizes_of_a_small_model_are_not_zero():
  rows = [("parameters", 35_488 * 4), ("rows of the step", 8_192), ("peak", 3 * 2**20)]
  assert memory_figures(rows, 2**34) == [
    "parameters                     0.135 MiB",
    "rows of the step               0.008 MiB",
    "peak                           3.000 MiB of 16.00 GiB: fits",
  ]
  assert memory_figures([*rows[:2], ("peak", 2**30)], 2**34)[-1].endswith(
    "1.000 GiB of 16.00: fits"
  )


def test_what_hosts_hold_is_not_a_device_s_memory():
  """Though the compiler's peak counts it: 3 bytes of the state, and at some time 4 of temporaries. A device holds
  23 at most."""
  names = ["argument", "output", "alias", "temp", "host_argument", "host_temp"]
  sizes = dict(zip((f"{name}_size_in_bytes" for name in names), (8, 5, 5, 15, 3, 4), strict=True))

  def of(peak: int) -> int:
    known = types.SimpleNamespace(**sizes, peak_memory_in_bytes=peak)
    step: Any = types.SimpleNamespace(memory_analysis=lambda: known)
    return memory_of(step, "tpu").peak

  assert (of(30), of(22)) == (23, 19)
