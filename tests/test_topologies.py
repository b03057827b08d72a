"""Slices by name: sizes, hosts and shapes as published, and as the TPU compiler takes them."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from processes import PATIENCE_SECONDS

from maxbatch.errors import UserError
from maxbatch.hardware.topologies import FAMILIES, slice_named

# Shapes and hosts as on the public pages about each generation (docs.cloud.google.com/tpu/docs).
PUBLISHED = {
  "v4-8": (4, 1, "v4:2x2x1", "megacore", (2, 2, 1)),
  "v4-32": (16, 4, "v4:2x2x4", "megacore", (2, 2, 1)),
  "v4-4096": (2048, 512, "v4:8x16x16", "megacore", (2, 2, 1)),
  "v5p-64": (32, 8, "v5:2x4x4", "megacore", (2, 2, 1)),
  "v5p-256": (128, 32, "v5:4x4x8", "megacore", (2, 2, 1)),
  "v5p-1152": (576, 144, "v5:4x12x12", "megacore", (2, 2, 1)),
  "v5p-4096": (2048, 512, "v5:8x16x16", "megacore", (2, 2, 1)),
  "v5p-12288": (6144, 1536, "v5:16x16x24", "megacore", (2, 2, 1)),
  "v5p-17920": (8960, 2240, "v5:16x20x28", "megacore", (2, 2, 1)),
  "v5e-1": (1, 1, "v5e:1x1", "default", (1, 1, 1)),
  "v5e-4": (4, 1, "v5e:2x2", "default", (2, 2, 1)),
  "v5e-8": (8, 1, "v5e:2x4", "default", (2, 4, 1)),
  "v5litepod-16": (16, 4, "v5e:4x4", "default", (2, 2, 1)),
  "v5e-256": (256, 64, "v5e:16x16", "default", (2, 2, 1)),
  "v6e-8": (8, 1, "v6e:2x4", "default", (2, 4, 1)),
  "v6e-128": (128, 32, "v6e:8x16", "default", (2, 2, 1)),
  "tpu7x-2": (2, 1, "tpu7x:1x1x1", "default", (1, 1, 1)),
  "tpu7x-8": (8, 1, "tpu7x:2x2x1", "default", (2, 2, 1)),
  "tpu7x-256": (256, 32, "tpu7x:4x4x8", "default", (2, 2, 1)),
  "tpu7x-18432": (18432, 2304, "tpu7x:16x24x24", "default", (2, 2, 1)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_slices(name):
  result = slice_named(name)
  assert PUBLISHED[name] == (
    result.num_devices,
    result.num_hosts,
    result.topology_name,
    result.chip_config_name,
    result.chips_per_host_bounds,
  )


def test_every_shape_holds_its_chips_in_whole_hosts():
  slices = {name: family for name, family in FAMILIES.items() if not family.gpus_per_host}
  for generation, family in slices.items():
    for size, chips in zip(family.sizes, family.chips, strict=True):
      result = slice_named(f"{generation}-{size}")
      edges = [int(edge) for edge in result.topology_name.partition(":")[2].split("x")]
      assert len(edges) == family.dimensions
      assert max(edges) <= 256
      product = 1
      for edge, host_edge in zip(edges, result.chips_per_host_bounds, strict=False):
        assert edge % host_edge == 0
        product *= edge
      assert product == chips == result.num_devices // family.devices_per_chip
      assert result.num_devices % result.num_hosts == 0


def test_several_slices_keep_the_topology_of_one():
  two = slice_named("v5p-128").times(2)
  assert (two.num_devices, two.num_hosts, two.topology_name) == (128, 32, "v5:4x4x4")


ERRORS = {
  "v5p-100": (
    "compile_topology=v5p-100: v5p has no slice of this size; nearest: compile_topology=v5p-128. "
    "Known: 8, 16, 32, 64, 128 to 8448 by 128, 8704, 8832, 8960, 9216, 9472 to 9984 by 128, 10240, "
    "10368, 10496, 10752 to 11264 by 128, 11520 to 12288 by 128, 13824, 17920"
  ),
  "v5litepod-512": (
    "compile_topology=v5litepod-512: v5litepod has no slice of this size; "
    "nearest: compile_topology=v5litepod-256. Known: 1, 4, 8, 16, 32, 64, 128, 256"
  ),
  "tpu7x-4": (
    "compile_topology=tpu7x-4: tpu7x has no slice of this size; nearest: compile_topology=tpu7x-2. "
  ),
  "v5e": "compile_topology=v5e: v5e has no slice of this size; nearest: compile_topology=v5e-1. ",
  "tpu7-8": (
    "compile_topology=tpu7-8: unknown slice. Did you mean tpu7x? "
    "Known: v4-4096, v5p-17920, v5e-256, v6e-256, tpu7x-18432, a100-16384, h100-16384, "
    "h200-16384, b200-16384, gb200-16344 and smaller"
  ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_exist_is_refused(name):
  with pytest.raises(UserError) as caught:
    slice_named(name)
  assert str(caught.value).startswith(ERRORS[name])


ASK_THE_COMPILER = """
import json, sys
from jax.experimental import topologies
told = []
for name, chip_config, bounds in json.load(sys.stdin):
  devices = topologies.get_topology_desc(
    platform="tpu", topology_name=name, chip_config_name=chip_config,
    chips_per_host_bounds=tuple(bounds), num_slices=1).devices
  told.append([len(devices), len({device.process_index for device in devices})])
print(json.dumps(told))
"""


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler (extra: tpu)"
)
def test_the_tpu_compiler_takes_the_names_and_counts_the_same():
  names = ["v4-16", "v5p-896", "v5e-1", "v5e-8", "v6e-256", "tpu7x-2", "tpu7x-128"]
  slices = [slice_named(name) for name in names]
  asked = [(s.topology_name, s.chip_config_name, s.chips_per_host_bounds) for s in slices]
  done = subprocess.run(  # libtpu reads its environment once, when a process loads it
    [sys.executable, "-c", ASK_THE_COMPILER],
    input=json.dumps(asked),
    capture_output=True,
    text=True,
    timeout=PATIENCE_SECONDS,
    env=os.environ
    | {
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_ACCELERATOR_TYPE": "v5litepod-4",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
  )
  assert done.returncode == 0, done.stderr
  printed = json.loads(done.stdout.splitlines()[-1])
  assert printed == [[s.num_devices, s.num_hosts] for s in slices]
