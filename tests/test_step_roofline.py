"""The estimate of a step without compiling: what it counts, and the split it chooses."""

import dataclasses
from fractions import Fraction

import pytest

from maxbatch.batch.topology import Topology
from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import REMAT_POLICIES, best_split, divisible_batches, splits
from maxbatch.estimate.chips import CHIPS
from maxbatch.estimate.step_roofline import StepRoofline, step_roofline
from maxbatch.estimate.step_work import RematPolicy, StepWork, step_work

V5E = CHIPS["v5e"]


def work_of(model: str, *keys: str) -> StepWork:
  return step_work(load_config(["config=base", f"model_name={model}", *keys]))


LLAMA = work_of("llama2-7b", "max_target_length=2048")


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, slices: int = 1) -> Topology:
  return Topology((data, fsdp, tensor, 1), (slices, 1, 1, 1))


def llama(
  per_device: int = 4, count: int = 1, remat: RematPolicy = "full", slices: int = 1
) -> StepRoofline:
  place = mesh(fsdp=256, slices=slices)
  return step_roofline(LLAMA, V5E, place, Fraction(per_device), count, remat)


def test_parts_and_limits_both_add_up_to_the_step():
  found = llama(count=3)
  assert sum(found.parts.values()) == pytest.approx(found.step_seconds)
  assert found.limits.total == pytest.approx(found.step_seconds)
  assert found.step_seconds == pytest.approx(found.rest_seconds + 3 * found.microbatch_seconds)


def test_utilisation_is_the_models_flops_over_the_peak():
  found = llama()
  # 6 FLOPs for each of 6.6e9 parameters in products, 12 × 4096 × 1024 tokens seen in 32 layers.
  flops = 4 * 2048 * (6 * 6.607e9 + 32 * 12 * 4096 * 1024)
  assert found.utilisation == pytest.approx(flops / found.step_seconds / 197e12, rel=1e-3)


def test_computing_again_takes_time_and_saves_memory():
  policies = [llama(remat=remat) for remat in REMAT_POLICIES]
  seconds = [one.step_seconds for one in policies]
  peaks = [one.peak_bytes for one in policies]
  assert seconds == sorted(seconds)
  assert peaks == sorted(peaks, reverse=True)


def test_few_tokens_on_many_devices_wait_for_the_links():
  assert llama(per_device=16).limited_by == "compute"
  short = dataclasses.replace(LLAMA, length=128)
  found = step_roofline(short, V5E, mesh(fsdp=256), Fraction(1), 1, "full")
  assert found.limited_by == "interconnect"


def test_slices_exchange_gradients_over_their_network():
  one, two = llama(count=4), llama(count=4, slices=2)
  assert two.rest_seconds > 10 * one.rest_seconds
  assert two.tokens_per_second < 2 * one.tokens_per_second


def test_a_width_that_the_devices_do_not_divide_is_held_whole():
  small = work_of("smollm-135m")
  divided = step_roofline(small, V5E, mesh(fsdp=64), Fraction(1), 1, "full")
  whole = step_roofline(small, V5E, mesh(fsdp=256), Fraction(1), 1, "full")
  assert whole.bytes.state == 64 * divided.bytes.state


def test_the_best_split_is_the_fastest_that_fits():
  found = best_split(LLAMA, V5E, 256, 1024)
  every = splits(LLAMA, V5E, 256, 1024)
  faster = every[: every.index(found)]
  assert found.step.fits
  assert all(one.step.peak_bytes > 0.75 * one.step.capacity_bytes for one in faster)
  assert found.num_microbatches * found.per_device * 256 == 1024


def test_a_batch_that_does_not_divide_names_those_that_do():
  assert divisible_batches(LLAMA, 256, 1001) == [992, 1024]
  with pytest.raises(UserError, match="nearest: batch_size=992 or 1024"):
    best_split(LLAMA, V5E, 256, 1001)


def test_what_fits_nowhere_is_refused():
  with pytest.raises(UserError, match="no split fits"):
    best_split(LLAMA, V5E, 1, 8)
