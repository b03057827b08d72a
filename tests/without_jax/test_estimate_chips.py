"""Published figures of TPUs, per device, and whether they agree with each other."""

import pytest

from maxbatch.estimate.chips import CHIPS, chip_for

# Matrix units that one device's peak implies, in units of the generation's width.
MATRIX_UNITS = {"v4": 8, "v5e": 4, "v5p": 8, "v6e": 4, "tpu7x": 4}


@pytest.mark.parametrize(
  ("device_kind", "generation"),
  [
    ("TPU v4", "v4"),
    ("TPU v5 lite", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v6 lite", "v6e"),
    ("TPU7x", "tpu7x"),
  ],
)
def test_devices_as_jax_calls_them(device_kind: str, generation: str):
  assert chip_for(device_kind) == CHIPS[generation]


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA V100-SXM2-16GB", "TPU v3"])
def test_devices_about_which_nothing_is_known(device_kind: str):
  assert chip_for(device_kind) is None


@pytest.mark.parametrize("generation", CHIPS)
def test_peak_is_clock_times_multipliers(generation: str):
  chip = CHIPS[generation]
  multipliers = MATRIX_UNITS[generation] * chip.matrix_unit**2
  assert chip.peak_flops == pytest.approx(2 * multipliers * chip.clock, rel=0.003)


# Cycles that the TPU compiler (libtpu 0.0.51) estimates for a bfloat16 product of two 4096x4096
# matrices, on one device.
CYCLES = {"v4": 596_564, "v5e": 1_083_068, "v5p": 544_925, "v6e": 301_616, "tpu7x": 324_772}


@pytest.mark.parametrize("generation", CHIPS)
def test_the_clock_turns_estimates_into_nearly_the_peak(generation: str):
  chip = CHIPS[generation]
  share = 2 * 4096**3 / chip.peak_flops / (CYCLES[generation] / chip.clock)
  assert 0.8 < share < 1.0


def test_half_a_chip_is_a_device():
  """What a tpu7x device has, twice, is what a chip has: 2307 TFLOP/s, 192 GiB, 7380 GB/s."""
  device = CHIPS["tpu7x"]
  assert 2 * device.peak_flops == 2307e12
  assert 2 * device.hbm_bytes == 192 * 2**30
  assert 2 * device.hbm_bandwidth == 7380e9
  assert 2 * 2 * device.ici_bandwidth == 1200e9


def test_networks():
  """The slower, the farther: memory, links, hosts."""
  for chip in CHIPS.values():
    assert chip.hbm_bandwidth > chip.ici_bandwidth > chip.dcn_bandwidth
  assert CHIPS["v5e"].ici_bandwidth == 200e9
  assert CHIPS["v5e"].dcn_bandwidth == pytest.approx(25e9 / 8)
  assert CHIPS["v6e"].dcn_bandwidth == 12.5e9
