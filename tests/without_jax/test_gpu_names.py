"""GPUs by name: numbers, hosts, what a compiler is told of one, and published figures."""

import math
import re

import pytest

from maxbatch.errors import UserError
from maxbatch.estimate.chips import GPU_DATA, GPUS, PREALLOCATED, chip_for, described
from maxbatch.hardware.topologies import slice_named

HOSTS = {
  "h100-1": (1, 1, "1x1x1"),
  "h100-4": (4, 1, "1x1x4"),
  "h100-8": (8, 1, "1x1x8"),
  "h100-64": (64, 8, "1x8x8"),
  "a100-1024": (1024, 128, "1x128x8"),
  "h200-24": (24, 3, "1x3x8"),
  "b200-16384": (16384, 2048, "1x2048x8"),
  "gb200-4": (4, 1, "1x1x4"),
  "gb200-72": (72, 18, "1x18x4"),
  "gb200-144": (144, 36, "1x36x4"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_gpus_stand_in_whole_hosts(name: str):
  result = slice_named(name)
  assert HOSTS[name] == (result.num_devices, result.num_hosts, result.topology_name)
  assert (result.compiler, result.platform) == ("cuda", "gpu")


REFUSED = {
  "h100-12": "h100s come in other numbers; nearest: compile_topology=h100-8. "
  "Known: 1, 2, 4, 8 to 16384 by 8",
  "gb200-80": "gb200s come in other numbers; nearest: compile_topology=gb200-72. "
  "Known: 1, 2, 4 to 72 by 4, 144 to 16344 by 72",
  "h100": "h100s come in other numbers; nearest: compile_topology=h100-1. ",
  "h300-8": "unknown slice. Did you mean h200? Known: v4-4096, v5p-17920, v5e-256, v6e-256, "
  "tpu7x-18432, a100-16384, h100-16384, h200-16384, b200-16384, gb200-16344 and smaller",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_numbers_are_refused_with_the_nearest(name: str):
  with pytest.raises(UserError) as caught:
    slice_named(name)
  assert str(caught.value).startswith(f"compile_topology={name}: {REFUSED[name]}")


def test_several_slices_of_gpus_are_one_number():
  with pytest.raises(UserError) as caught:
    slice_named("h100-8", 2)
  assert "compile_topology=h100-16; leave out compile_topology_num_slices" in str(caught.value)


@pytest.mark.parametrize(
  ("name", "more"),
  [
    ("h100-8", "compile_topology=h100-16"),
    ("gb200-72", "compile_topology=gb200-144"),
    ("v5e-16", "compile_topology_num_slices=2"),
  ],
)
def test_a_network_that_nothing_uses_is_refused(name: str, more: str):
  with pytest.raises(UserError) as caught:
    slice_named(name, 1, 100)
  assert str(caught.value) == (
    f"compile_topology_network_gbps=100: the devices of compile_topology={name} are all on fast links, and "
    f"nothing goes over the network; leave it out, or name more, for example {more}"
  )
  assert slice_named("h100-16", 1, 100) == slice_named("h100-16")
  assert slice_named("v5e-16", 2, 100) == slice_named("v5e-16", 2)


@pytest.mark.parametrize("generation", GPUS)
def test_the_peak_is_what_the_description_multiplies(generation: str):
  known, chip = GPU_DATA[generation], GPUS[generation]
  matrix = known["matrix"]
  rate = 2 * known["core_count"] * 4 * matrix["BF16"] * matrix["clock_ghz"] * 1e9
  assert chip.peak_flops == pytest.approx(rate, rel=0.06)
  assert known["sources"]
  assert all(len(source) > 20 for source in known["sources"])
  assert chip.hbm_bandwidth > chip.ici_bandwidth > chip.dcn_bandwidth
  assert chip.usable_bytes == int(PREALLOCATED * known["device_memory_size"])
  assert chip_for(known["name"]) == chip


@pytest.mark.parametrize("generation", GPUS)
def test_shares_of_the_peak_are_shares(generation: str):
  chip = GPUS[generation]
  for backward in (False, True):
    for width in (32, 64, 128, 192):
      assert 0.2 < chip.attention_share(backward, width) < 0.8
  assert chip.attention_share(True, 128) < chip.attention_share(False, 128)
  assert 0.5 < chip.product_share < 1


@pytest.mark.parametrize("generation", GPUS)
def test_a_description_closes_its_braces_and_names_the_gpu(generation: str):
  text, known = described(generation), GPU_DATA[generation]
  assert text.count("{") == text.count("}")
  assert f'name: "{known["name"]}"' in text
  assert f"core_count: {known['core_count']} " in text
  major, minor = known["compute_capability"]
  assert f"major: {major} minor: {minor}" in text
  clocks = {float(each) for each in re.findall(r"clock_rate_ghz: ([\d.]+)", text)}
  assert all(math.isfinite(each) and 1 < each < 3 for each in clocks)
