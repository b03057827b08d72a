"""The estimate of a step without compiling: what it counts, and the split it chooses."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from maxbatch.config.load import load_config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import (
  REMAT_POLICIES,
  best_split,
  divisible_batches,
  splits,
)
from maxbatch.estimate.chips import CHIPS, GPUS, Chip, calibrated, measured_factor
from maxbatch.estimate.compiled_steps import compiled_steps, read_report, remember
from maxbatch.estimate.links import link_seconds
from maxbatch.estimate.pipeline_roofline import Stages, pipeline_roofline
from maxbatch.estimate.step_roofline import (
  StepRoofline,
  memory_work,
  step_rates,
  step_roofline,
)
from maxbatch.estimate.step_work import RematPolicy, StepWork, microbatch_work, step_work
from maxbatch.training import tiles
from maxbatch.training.tiles import keeps_gradients, num_tiles
from scripts.effective_batch import effective_batch
from scripts.fit_step_rates import chosen_share, chosen_steps, fit_steps, predicted, work_of_step

# What a user has compiled comes before estimates.
pytestmark = pytest.mark.usefixtures("own_cache")

V5E = CHIPS["v5e"]


def work_of(model: str, *keys: str) -> StepWork:
  return step_work(load_config(["config=base", f"model_name={model}", *keys]))


LLAMA = work_of("llama2-7b", "max_target_length=2048")


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, slices: int = 1) -> Topology:
  return Topology({"data": data, "fsdp": fsdp, "tensor": tensor}, {"data": slices})


def llama(
  per_device: int = 4, count: int = 1, remat: RematPolicy = "full", slices: int = 1
) -> StepRoofline:
  place = mesh(fsdp=256, slices=slices)
  return step_roofline(LLAMA, V5E, place, Fraction(per_device), count, remat)


def test_parts_and_limits_both_add_up_to_the_step():
  result = llama(count=3)
  assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
  assert result.limits.total == pytest.approx(result.step_seconds)
  assert result.step_seconds == pytest.approx(result.rest_seconds + 3 * result.microbatch_seconds)


def test_utilisation_is_the_models_flops_over_the_peak():
  result = llama()
  # 6 FLOPs for each of 6.6e9 parameters in products, 12 × 4096 × 1024 tokens seen in 32 layers.
  flops = 4 * 2048 * (6 * 6.607e9 + 32 * 12 * 4096 * 1024)
  assert result.utilisation == pytest.approx(flops / result.step_seconds / 197e12, rel=1e-3)


def test_computing_again_takes_time_and_saves_memory():
  kept, products, again = (llama(remat=remat) for remat in REMAT_POLICIES)
  # What is kept is written and read: `none` may be no faster than `minimal`.
  assert max(kept.step_seconds, products.step_seconds) < again.step_seconds
  assert kept.peak_bytes > products.peak_bytes > again.peak_bytes


@pytest.mark.parametrize(
  ("schedule", "repeats", "stash", "seconds", "gib"),
  [
    ("1f1b", 1, "residuals", 4.315, 11.393),
    ("interleaved_1f1b", 2, "residuals", 4.015, 11.143),
    ("interleaved_1f1b", 2, "input", 4.881, 11.033),
    ("circular", 2, "input", 4.897, 11.033),
    ("1f1b", 1, "input", 5.247, 10.393),
  ],
)
def test_a_pipeline_is_about_as_fast_as_compiled(schedule, repeats, stash, seconds, gib):
  """As the table in docs/pipeline.md."""
  stages, place = Stages(schedule, 4, 1, repeats, 1, stash), Topology.of(fsdp=4, stage=4)
  result = pipeline_roofline(LLAMA, V5E, place, Fraction(1), 4, "full", stages)
  assert result.step_seconds == pytest.approx(seconds, rel=0.06)
  assert result.peak_bytes == pytest.approx(gib * 2**30, rel=0.1)
  assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
  again = pipeline_roofline(LLAMA, V5E, place, Fraction(1), 8, "full", stages)
  assert again.step_seconds < 2 * result.step_seconds
  assert again.utilisation > result.utilisation
  alone = dataclasses.replace(stages, streamed=True)
  streamed = pipeline_roofline(LLAMA, V5E, place, Fraction(1), 8, "full", alone)
  single = pipeline_roofline(LLAMA, V5E, place, Fraction(1), 1, "full", alone)
  assert streamed.microbatch_seconds == pytest.approx(single.microbatch_seconds)
  assert single.microbatch_seconds > again.microbatch_seconds


def test_few_tokens_on_many_devices_wait_for_the_links():
  assert llama(per_device=16).limited_by == "compute"
  short = dataclasses.replace(LLAMA, length=128)
  result = step_roofline(short, V5E, mesh(fsdp=256), Fraction(1), 1, "full")
  assert result.limited_by == "interconnect"


def test_slices_exchange_gradients_over_their_network():
  # A microbatch that was not compiled on one slice, so that both are estimated.
  one, two = llama(8, count=4), llama(8, count=4, slices=2)
  assert two.rest_seconds > 10 * one.rest_seconds
  assert two.tokens_per_second < 2 * one.tokens_per_second


def test_a_width_that_the_devices_do_not_divide_is_held_whole():
  small = work_of("smollm-135m")
  divided = step_roofline(small, V5E, mesh(fsdp=64), Fraction(1), 1, "full")
  whole = step_roofline(small, V5E, mesh(fsdp=256), Fraction(1), 1, "full")
  assert whole.bytes.state == 64 * divided.bytes.state


def test_the_best_split_is_the_fastest_that_fits():
  result = best_split(LLAMA, V5E, 256, 1024)
  every = splits(LLAMA, V5E, 256, 1024)
  assert result.step.fits
  # Faster ones on the same mesh take too much memory; those on others are about as fast.
  faster = every[: every.index(result)]
  same_mesh = [one for one in faster if one.mesh == result.mesh]
  assert all(one.step.peak_bytes > 0.75 * one.step.capacity_bytes for one in same_mesh)
  roomy = [one for one in faster if one.step.peak_bytes < 0.75 * one.step.capacity_bytes]
  enough = result.step.step_seconds / (1 + step_rates().spread["seconds"])
  assert all(one.step.step_seconds >= enough for one in roomy)
  assert result.num_microbatches * result.per_device * 256 == 1024


def test_a_chosen_estimate_is_held_to_what_compiled_choices_reached():
  share = step_rates().chosen
  assert 0.8 < share < 1
  # What scripts/fit_step_rates.py writes after a step was compiled.
  assert share == pytest.approx(chosen_share(step_rates()), abs=0.02)
  short = work_of("llama2-7b", "max_target_length=1024")
  every = splits(short, V5E, 256, 1024)
  assert {one.step.how for one in every} == {"estimated"}
  for one in every[:3]:
    counted = step_roofline(short, V5E, one.mesh, one.per_device, one.num_microbatches, one.remat)
    assert one.step.utilisation == pytest.approx(share * counted.utilisation)
    assert one.step.step_seconds == pytest.approx(counted.step_seconds / share)
    assert one.step.peak_bytes == counted.peak_bytes
    assert sum(one.step.parts.values()) == pytest.approx(one.step.step_seconds)
    assert one.step.limits.total == pytest.approx(one.step.step_seconds)
  # What was compiled took what it took.
  compiled = [one for one in splits(LLAMA, V5E, 256, 1024) if one.step.how == "compiled"]
  assert compiled
  for one in compiled:
    size = one.num_microbatches, one.remat
    assert one.step == step_roofline(LLAMA, V5E, one.mesh, one.per_device, *size)


LONG = work_of("llama3.1-8b", "max_target_length=131072")


def test_long_rows_are_shared_where_that_is_fastest():
  """What fits 32 chips: neither memory nor heads allow as much without the axis."""
  v5p = CHIPS["v5p"]
  found = best_split(LONG, v5p, 32, 8)
  assert found.step.fits
  assert found.mesh.ici["context"] * found.mesh.ici["fsdp"] == 32
  assert found.keys["ici_context_parallelism"] == str(found.mesh.ici["context"])
  every = splits(LONG, v5p, 32, 8)
  alone = [each for each in every if "context" not in each.mesh.ici]
  fitting = min(each.step.step_seconds for each in alone if each.step.fits)
  assert found.step.step_seconds < 0.95 * fitting
  short = splits(dataclasses.replace(LONG, length=8192), v5p, 32, 32)
  assert all("context" not in each.mesh.ici for each in short)


def test_devices_that_share_rows_hold_their_tokens_and_send_heads_or_keys():
  """Of 32 heads and 8 pairs of keys and values: whole rows of 4 heads with a pair, or all pairs' rows."""
  v5p, places = CHIPS["v5p"], [Topology.of(context=ways, fsdp=32 // ways) for ways in (4, 8)]
  four, eight = (
    memory_work(LONG, v5p, place, Fraction(1, place.ici["context"]), "full") for place in places
  )
  for kind in ("residuals", "stream", "hidden", "heads"):
    assert four[kind] == 2 * eight[kind]
  sent = link_seconds(LONG, v5p, places[1], Fraction(1, 8), "full").activations
  numbers = 131072 // 8 * 128 * 2 * 3 * 32
  assert sent == pytest.approx(numbers * (2 * 32 + 2 * 8) * 2 / v5p.ici_bandwidth)
  odd = dataclasses.replace(LONG, model=dataclasses.replace(LONG.model, base_num_query_heads=36))
  gathered = link_seconds(odd, v5p, places[1], Fraction(1, 8), "full").activations
  assert gathered == pytest.approx(8 * numbers * 2 * 8 * 7 / 8 / v5p.ici_bandwidth)


def test_what_was_compiled_is_as_fast_as_it_was_beside_estimates():
  (chosen,) = (one for one in chosen_steps() if one.name.startswith("gpt2-small, 16 × v5e"))
  work = work_of("gpt2-small", f"max_target_length={chosen.length}", "precision=bfloat16")
  result = effective_batch(work, V5E, 16)
  assert result is not None
  assert result.fastest.step.how == "compiled"
  assert result.fastest.step.microbatch_seconds == pytest.approx(chosen.microbatch_seconds)
  assert chosen not in fit_steps()


def test_nothing_is_chosen_far_beyond_what_was_compiled():
  small = work_of("gpt2-small")
  most = 2 * max(int(step.length * Fraction(step.per_device)) for step in fit_steps())
  on_v5p = splits(small, CHIPS["v5p"], 8, 8 * 2048)
  assert max(one.per_device for one in on_v5p) * small.length == most
  # A row that is longer than that is one sample all the same.
  long = dataclasses.replace(small, length=2 * most)
  assert {
    one.per_device
    for one in splits(long, CHIPS["v5p"], 8, 16)
    if one.mesh.ici["tensor"] == 1 and "context" not in one.mesh.ici
  } == {1}
  result = effective_batch(small, CHIPS["v5p"], 8)
  assert result is not None
  assert result.fastest.per_device * small.length <= most


def test_the_smallest_efficient_batch_is_nearly_as_fast():
  result = effective_batch(work_of("gpt2-small"), V5E, 16)
  assert result is not None
  fastest, smallest = result.fastest.step, result.smallest.step
  assert 0.95 * fastest.tokens_per_second <= smallest.tokens_per_second
  assert result.smallest.batch < result.fastest.batch
  fewer = splits(work_of("gpt2-small"), V5E, 16, result.smallest.batch // 2)
  on_its_mesh = [one for one in fewer if one.mesh == result.fastest.mesh]
  assert all(one.step.tokens_per_second < 0.95 * fastest.tokens_per_second for one in on_its_mesh)
  assert effective_batch(LLAMA, V5E, 1) is None


def test_a_batch_that_does_not_divide_names_those_that_do():
  assert divisible_batches(LLAMA, 256, 1001) == [992, 1024]
  with pytest.raises(UserError, match="nearest: batch_size=992 or 1024"):
    best_split(LLAMA, V5E, 256, 1001)


def test_what_fits_nowhere_is_refused():
  with pytest.raises(UserError, match="no split fits"):
    best_split(LLAMA, V5E, 1, 8)


def test_a_step_that_was_compiled_is_given_as_it_was():
  step = next(one for one in compiled_steps() if one.parts and not one.keys)
  place = step.chip, step.mesh, Fraction(step.per_device)
  work = work_of(step.model_name, f"max_target_length={step.length}", "precision=bfloat16")
  result = step_roofline(work, *place, 3, step.remat)
  assert result.how == "compiled"
  assert result.microbatch_seconds == pytest.approx(step.microbatch_seconds)
  assert result.peak_bytes == step.peak_bytes
  assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
  deeper = dataclasses.replace(work.model, base_num_decoder_layers=33)
  other = step_roofline(dataclasses.replace(work, model=deeper), *place, 3, step.remat)
  assert other.how == "estimated"


def test_a_compiled_step_is_given_rather_than_estimated():
  for step in compiled_steps():
    place = step.chip, step.mesh, Fraction(step.per_device)
    work = work_of_step(step)
    assert step_roofline(work, *place, 1, step.remat).how == "compiled", step.name
    estimate = step_roofline(work, *place, 1, step.remat, rates=step_rates(step.chip))
    assert estimate.how == "estimated", step.name


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_step_is_estimated_from_the_steps_of_other_models(on_gpus: bool):
  # The rates that a run uses are fitted to all of them, and would be near these however poor the model.
  steps = fit_steps(on_gpus)
  fresh = {one.name: each for one, each in zip(steps, predicted(steps), strict=True) if each}
  assert len(fresh) > (0.7 if on_gpus else 0.8) * len(steps)
  for name, (seconds, peak) in fresh.items():
    assert seconds == pytest.approx(1, abs=0.2), name
    assert peak == pytest.approx(1, abs=0.4 if on_gpus else 0.15), name
  # What advice calls the spread of its estimates is that of such predictions.
  errors = np.log(list(fresh.values()))
  spread = np.sqrt(np.mean(np.square(errors), axis=0))
  assert spread == pytest.approx(
    [step_rates(steps[0].chip).spread[key] for key in ("seconds", "bytes")], rel=0.1
  )


H100 = GPUS["h100"]


def on_h100s(place: Topology, chip: Chip = H100) -> StepRoofline:
  """Of another length than any step that was compiled."""
  return step_roofline(
    work_of("llama2-7b", "max_target_length=1536"), chip, place, Fraction(4), 2, "full"
  )


def test_gpus_of_several_hosts_exchange_over_their_network():
  within, across = on_h100s(mesh(fsdp=8)), on_h100s(mesh(data=8, fsdp=8))
  assert within.microbatch_seconds == across.microbatch_seconds
  # The gradient of its eighth goes through each GPU's own port, there and back, to 7 others.
  shard = LLAMA.parameters / 8 * 4
  network = H100.dcn_bandwidth * H100.network_share
  longer = across.rest_seconds - within.rest_seconds
  assert longer == pytest.approx(2 * shard * 7 / 8 / network)
  # Weights divided over all hosts come through all ports of a host together.
  wide = on_h100s(mesh(fsdp=64))
  assert wide.bytes.state < across.bytes.state / 7
  assert wide.rest_seconds < within.rest_seconds


def test_a_measured_gpu_takes_as_much_longer_as_was_measured():
  records = [
    {"generation": "h100", "estimated_seconds": 2.0, "measured_seconds": seconds}
    for seconds in (2.2, 2.4, 9.0)
  ]
  records.append({"generation": "a100", "estimated_seconds": 1.0, "measured_seconds": 9.0})
  assert measured_factor("b200", records) == 1.0
  factor = measured_factor("h100", records)
  assert factor == pytest.approx(1.2)
  slower = calibrated(H100, factor)
  before, after = on_h100s(mesh(data=2, fsdp=8)), on_h100s(mesh(data=2, fsdp=8), slower)
  assert after.step_seconds == pytest.approx(1.2 * before.step_seconds)
  assert after.utilisation == pytest.approx(before.utilisation / 1.2)
  assert after.peak_bytes == before.peak_bytes
  # What was compiled before the GPU was measured, too.
  (known, *_) = [step for step in fit_steps(True) if step.generation == "h100"]
  place = known.mesh, Fraction(known.per_device), 1, known.remat
  compiled = [step_roofline(work_of_step(known), chip, *place) for chip in (H100, slower)]
  assert {one.how for one in compiled} == {"compiled"}
  assert compiled[1].step_seconds == pytest.approx(1.2 * compiled[0].step_seconds)


REPORT = """Batch plan …

Compile report: llama2-7b, rows of 2,048 tokens, remat_policy full, on v5e-256
  256 × TPU v5 lite: data 1 × fsdp 256 × tensor 1 × stage 1
  computes in bfloat16, weights in float32
  compiled in 56.3 s

Memory of a device (compiler)
  parameters                     0.098 GiB
  optimizer state                0.196 GiB
  gradient accumulators          0.098 GiB
  rows of the step               0.002 GiB
  activations, temporaries       4.450 GiB
  peak                           4.713 GiB of 15.75: fits

Work of a device in one microbatch of 4 samples per device, of which a step has 2
  model                          337.9 TFLOP
  program                        431.4 TFLOP (1.28 of the model's: what is computed again counts twice)

Time (estimate)
  a step                         6.946 s: 0.002 s + 2 × 3.472 s a microbatch

Where a step's time goes (estimate)
  mlp                            3.666 s  52.7%
  attention                      2.870 s  41.3%
  other                          0.135 s   1.9%
  optimizer                      0.001 s   0.0%

Collectives of a device
  each microbatch    226 × all-reduce              13.48 GB in groups of 256, work waits, 0.134 s on the links (estimate)
  each microbatch    384 × all-gather              23.76 GB in groups of 256, beside the work, 0.118 s on the links (estimate)
  each step            3 × all-reduce           1.64e-05 GB in groups of 256, work waits, 1.63e-07 s on the links (estimate)
"""
EXPLORED = """   micro_batch_size  microbatches        peak memory     step  samples/s  tokens/s  utilisation  suggested
1                16             2  13.8 of 15.75 GiB  27.01 s      303.3   621,198        50.8%      4,096, 8,192
2            4 full             8  4.71 of 15.75 GiB  27.78 s      294.9   603,927        49.4%      7,168, 8,192
                 32             1  does not fit: 25.4 of 15.75 GiB

"""


def test_a_compile_report_is_read_and_what_explore_tried():
  larger, step = read_report(EXPLORED + REPORT, LLAMA)
  assert (step.model_name, step.generation, step.fsdp) == ("llama2-7b", "v5e", 256)
  assert (step.per_device, step.remat, step.compute_bytes) == ("4", "full", 2)
  assert (step.microbatch_seconds, step.waits) == (3.472, 0.134)
  assert step.parts == pytest.approx({"mlp": 1.833, "attention": 1.435, "other": 0.067})
  assert step.state_bytes == pytest.approx(0.392 * 2**30)
  assert (larger.per_device, larger.remat, larger.parts) == ("16", "full", {})
  assert larger.microbatch_seconds == pytest.approx(13.504)


def test_what_a_user_compiled_comes_before_estimates_and_the_table():
  before = llama()
  remember("a pipeline's report", LLAMA)
  remember(REPORT.replace("3.472 s a", "3.000 s a"), LLAMA)
  result = llama()
  assert (result.how, result.microbatch_seconds) == ("compiled", pytest.approx(3.0))
  assert before.microbatch_seconds != 3.0
  other = dataclasses.replace(LLAMA.model, num_vocab_tiling=8)
  tiled = dataclasses.replace(LLAMA, model=other)
  place = V5E, mesh(fsdp=256), Fraction(4)
  assert step_roofline(tiled, *place, 1, "full").how == "estimated"


def test_a_compiled_step_of_devices_that_share_rows_is_of_their_mesh():
  report = REPORT.replace("fsdp 256", "fsdp 64 × context 4").replace("3.472 s a", "3.000 s a")
  remember(report, LLAMA)
  place = Topology.of(fsdp=64, context=4)
  result = step_roofline(LLAMA, V5E, place, Fraction(4), 1, "full")
  assert (result.how, result.microbatch_seconds) == ("compiled", pytest.approx(3.0))
  assert llama().microbatch_seconds != 3.0
  (known,) = read_report(report, LLAMA)
  assert (known.mesh, known.num_chips) == (place, 256)
  assert "256 × v5e, context 4, 4 × 2,048 tokens" in known.name


def test_what_is_no_report_of_a_slice_is_refused():
  with pytest.raises(UserError, match="no compile report"):
    read_report("Compile report: of something else", LLAMA)


@pytest.mark.parametrize(
  ("model", "length", "per_device", "remat", "teraflops"),
  [
    ("llama2-7b", 2048, 4, "full", 433.1),
    ("qwen3-0.6b", 1024, 8, "full", 40.9),
    ("gpt2-small", 1024, 8, "none", 6.768),
  ],
)
def test_the_products_are_those_of_the_compiled_programs(
  model: str, length: int, per_device: int, remat: RematPolicy, teraflops: float
):
  """As compile_only counts them in the program, with a causal half of the attention's."""
  work = work_of(model, f"max_target_length={length}", "precision=bfloat16")
  # Of a chip whose kernels' instructions nobody has counted.
  exact = dataclasses.replace(V5E, matrix_unit=1, generation="")
  parts = microbatch_work(work, exact, mesh(fsdp=16), Fraction(per_device), remat).values()
  blocks = length // 512
  kernels = sum(part.kernels for part in parts) * blocks / (blocks + 1)
  products = sum(part.products for part in parts)
  assert (products + kernels) / 1e12 == pytest.approx(teraflops, rel=5e-4)


@pytest.mark.parametrize("model", ["gpt2-small", "qwen3-0.6b", "llama3-8b", "gemma3-1b"])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_loss_has_as_many_tiles_as_the_step_makes(monkeypatch, model: str, is_gpu: bool):
  monkeypatch.setattr(tiles, "is_for_gpu", lambda: is_gpu)
  work = work_of(model, "max_target_length=1536")
  dtype = {2: "bfloat16", 4: "float32"}[work.compute_bytes]
  for rows in (1, 3, 8):
    is_kept = keeps_gradients(work.model, rows, 1536, dtype)
    assert work.keeps_gradients(rows * 1536) == is_kept
    assert work.tiles(rows * 1536, 1, is_gpu=is_gpu) == num_tiles(
      work.model, rows, 1536, is_kept=is_kept
    )
