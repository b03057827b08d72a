"""compiler_flags: published sets, flags themselves, what the compiler refuses, and exploring sets."""

import importlib.util
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from lowered_once import lower_once
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.compile_step import placeholder_rows, report_or_refusal
from maxbatch.compile.program import compile_program
from maxbatch.compile.step_identity import header
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import (
  FLAG_SETS,
  NO_FLAGS,
  CompilerFlags,
  FlagSet,
  bypassed,
  compiler_flags,
  is_short_of_vector_memory,
)
from maxbatch.hardware.devices import Target, topology_devices
from maxbatch.training.build import (
  build_trainer,
  compiled_eval,
  compiled_step,
  step_rows,
  traced_step,
)
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.exploration import without_variants
from maxbatch.tuning.microbatch_size import choose, explore_sizes, what_it_depends_on
from maxbatch.tuning.search import ProbeResult

FAST_MATH = "--xla_cpu_enable_fast_math=true xla_llvm_disable_expensive_passes=true"
OPTIONS = {"xla_cpu_enable_fast_math": True, "xla_llvm_disable_expensive_passes": True}
PIECES = {"xla_multiheap_size_constraint_per_heap": str(60 * 2**20)}
"""Nobody has to ask for it on several CPU devices (maxbatch/hardware/heap.py)."""
SLICES = {"v4": "v4-8", "v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4"}
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler")


class StoppedError(Exception):
  """Raised instead of compiling, with the options."""


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
  def stop(self: Any, compiler_options: Any = None) -> None:
    raise StoppedError(compiler_options)

  jax.local_devices()
  compiler_flags(FAST_MATH, jax.devices()[0])  # whether they are known is asked once
  monkeypatch.setattr(jax.stages.Lowered, "compile", stop)


def place(**keys: object) -> Target:
  return Target(jax.devices(), topology(config(**keys).mesh, 8))


@TPU
@pytest.mark.parametrize("generation", SLICES)
def test_the_compiler_takes_every_published_set(generation: str):
  device = topology_devices(SLICES[generation])[0]
  for name, published in FLAG_SETS[generation].items():
    result = compiler_flags(name, device)
    assert len(result.flags) == len(published.flags.split())
    assert published.source
    assert not is_short_of_vector_memory(result, device)
  assert is_short_of_vector_memory(NO_FLAGS, device) == (generation == "v6e")
  more = compiler_flags("published --xla_tpu_scoped_vmem_limit_kib=1024", device)
  assert dict(more.flags)["xla_tpu_scoped_vmem_limit_kib"] == "1024"
  assert len(more.flags) > 1


@TPU
def test_a_wide_mlp_has_its_operands_written_and_on_a_v6e_its_norm_unless_flags_give_it_vector_memory():
  def barriers(flags: str, width: int = 4096) -> int:
    keys = {"base_emb_dim": width, "base_num_decoder_layers": 1, "ici_data_parallelism": 4}
    settings = config(compiler_flags=flags, batch_size=8, **keys)
    plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 4))
    trainer = build_trainer(settings, plan, topology_devices(SLICES["v6e"]))
    rows = step_rows(plan, trainer, placeholder_rows(settings), plan.micro_batch_to_train)
    return str(traced_step(trainer, rows).jaxpr).count("optimization_barrier")

  more = "xla_tpu_scoped_vmem_limit_kib=98304"
  assert barriers("none") > barriers(more) > barriers("none", 2048) == barriers(more, 2048)


@TPU
@pytest.mark.parametrize(
  ("slice_name", "overridden"),
  [
    ("v5e-64", "xla_jf_crs_combiner_threshold_in_bytes=125829120"),
    ("v5e-16", "xla_jf_spmd_threshold_for_windowed_einsum_mib=1"),
  ],
)
def test_all_reduces_run_beside_the_next_product_where_they_are_neither_joined_nor_in_windows(
  slice_name, overridden
):
  devices = topology_devices(slice_name)
  mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
  divided = NamedSharding(mesh, PartitionSpec("fsdp"))

  def gradients(x_BD: jax.Array, dy_3BF: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.with_sharding_constraint(x_BD.T @ dy_BF, divided) for dy_BF in dy_3BF]

  def beside(flags: str) -> int:
    x_BD, dy_BF = (
      jax.ShapeDtypeStruct((len(devices) * 1024, width), jnp.bfloat16, sharding=divided)
      for width in (2048, 4096)
    )
    options = compiler_flags(flags, devices[0]).options
    with bypassed():
      program = jax.jit(gradients).lower(x_BD, [dy_BF] * 3).compile(options)
    return (program.as_text() or "").count('custom_call_target="AsyncCollectiveStart"')

  without = f"all_reduces --{overridden}"
  assert (beside("none"), beside(without), beside("all_reduces")) == (0, 0, 2)


@TPU
@pytest.mark.parametrize(
  ("asked", "words"),
  [
    (
      "--xla_tpu_nonsense=1",
      "the compiler for TPU v5 lite refuses: No such compile option: 'xla_tpu",
    ),
    ("xla_tpu_scoped_vmem_limit_kib=much", "Failed to parse 'much' into flag xla_tpu_scoped_vmem"),
    (
      "publishd",
      "there are for TPU v5 lite: none, explore, published, all_reduces. Did you mean published?",
    ),
    ("offloading", "nothing is published as 'offloading' for TPU v5 lite, only for v6e; use"),
    ("published explore", "explore cannot be combined"),
  ],
)
def test_what_the_compiler_does_not_know_is_refused(asked: str, words: str):
  with pytest.raises(UserError, match=re.escape(words)):
    compiler_flags(asked, topology_devices("v5e-4")[0])


def test_what_is_refused_where_no_tpu_is():
  for asked, words in (
    (
      "published",
      "nothing is published as 'published' for cpu, only for v4, v5e, v5p, v6e, a100, h100, h200, b200, "
      "gb200; use",
    ),
    ("--xla_cpu_enable_fast_math=maybe", "'maybe' is not a valid bool value"),
  ):
    with pytest.raises(UserError, match=re.escape(words)):
      compiler_flags(asked, jax.devices()[0])
  for none in ("", "none", "explore"):
    assert compiler_flags(none, jax.devices()[0]) == CompilerFlags()


def test_what_a_published_set_has_and_the_compiler_no_longer_knows_is_left_out(monkeypatch):
  published = FlagSet("xla_cpu_enable_fast_math=true xla_of_last_year=true", "a page")
  sets = {"published": published}
  monkeypatch.setattr("maxbatch.hardware.compiler_flags.sets_for", lambda _device: sets)
  flags = compiler_flags("published", jax.devices()[0])
  assert str(flags) == "--xla_cpu_enable_fast_math=true"
  assert flags.note == ", without xla_of_last_year, which this compiler does not know"
  for own in ("published --xla_of_last_year=1", "--xla_of_last_year=1"):
    with pytest.raises(
      UserError, match="refuses: No such compile option: 'xla_of_last_year'; leave"
    ):
      compiler_flags(own, jax.devices()[0])


def test_every_way_to_a_step_compiles_with_them(not_compiled: None):
  """Training, evaluation and compile_only; and a step file and a remembered choice know them."""
  settings = config(batch_size=8, compiler_flags=FAST_MATH)
  plan = plan_batches(settings.batch, settings.run, place().layout)
  trainer, rows = build_trainer(settings, plan, jax.devices()), placeholder_rows(settings)
  parts = settings, plan, trainer, rows
  for compiling in (
    lambda: compiled_step(*parts, plan.micro_batch_to_train),
    lambda: compiled_eval(plan, trainer, rows),
    lambda: compile_program(*parts, plan.micro_batch_to_train),
  ):
    with pytest.raises(StoppedError) as caught:
      compiling()
    assert caught.value.args == (OPTIONS | PIECES,)
  without = build_trainer(config(batch_size=8), plan, jax.devices())
  made_from, other = (header(settings, plan, each, rows) for each in (trainer, without))
  assert made_from["lowered"] == other["lowered"]
  assert made_from["environment"]["compiler_flags"] == str(trainer.compiler_flags)
  assert other["environment"]["compiler_flags"] == ""


def test_the_report_names_them(monkeypatch: pytest.MonkeyPatch):
  settings = config(batch_size=8, compiler_flags=FAST_MATH)
  monkeypatch.setattr("maxbatch.compile.compile_step.measure_step", lambda *_, **__: None)
  report = report_or_refusal(settings, jax.devices(), place().layout)
  words = "--xla_cpu_enable_fast_math=true --xla_llvm_disable_expensive_passes=true"
  assert f"\n  compiler flags: {words}\n" in str(report)
  assert report.as_dict()["compiler_flags"] == words


def test_a_remembered_choice_depends_on_them(monkeypatch: pytest.MonkeyPatch):
  lower_once(monkeypatch)
  asking = [config(batch_size=8, compiler_flags=flags) for flags in ("none", FAST_MATH)]
  one, other = (what_it_depends_on(each, place(), ()) for each in asking)
  assert one["devices"].pop("compiler_flags") == ""
  assert other["devices"].pop("compiler_flags").startswith("--xla_cpu_enable_fast_math=true")
  assert one == other


def test_sets_are_explored_beside_the_sizes(monkeypatch: pytest.MonkeyPatch):
  keys = {"batch_size": 256, "compile_only": "true", "compiler_flags": "explore"}
  settings = config(micro_batch_size="{explore: {min: 2, max: 4}}", **keys)
  monkeypatch.setattr(
    "maxbatch.tuning.exploration.explored", lambda device: ("none", "published", "offloading")
  )

  def probe(candidate: Candidate) -> ProbeResult:
    set_name = candidate.applied_to(settings).compile.compiler_flags
    seconds = {"none": 3.0, "published": 1.0, "offloading": 2.0}[set_name]
    return ProbeResult(1, 2, fits=True, seconds_per_microbatch=seconds * candidate.per_device)

  lines: list[str] = []
  result, found = explore_sizes(settings, place(), probe, say=lines.append)
  assert found.total == 6
  assert result.compile.compiler_flags == "published"
  assert "2 flags=published" in str(found)
  assert lines[-2].endswith(", compiler_flags: published")
  assert found.as_dict()["fitting"][0]["compiler_flags"] == "published"
  assert without_variants(settings).compile.compiler_flags == "none"


def test_sets_are_explored_only_with_the_sizes(tmp_path: pathlib.Path):
  with pytest.raises(UserError, match="needs micro_batch_size=explore compile_only=true"):
    choose(
      config(compiler_flags="explore"), place(), lambda _: ProbeResult(1, 2, fits=True), tmp_path
    )
