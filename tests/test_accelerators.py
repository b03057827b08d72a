"""A machine's GPUs and TPUs are seen without jax, and a run that leaves them idle says so."""

import pathlib

import jax
import pytest
from support import SMALLEST

from maxbatch import train
from maxbatch.config.load import load_config
from maxbatch.hardware import accelerators
from maxbatch.hardware import devices as hardware
from maxbatch.hardware.accelerators import find_accelerators
from maxbatch.hardware.devices import idle_accelerators


@pytest.fixture
def gpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """An nvidia-smi that lists two GPUs."""
  program = tmp_path / "nvidia-smi"
  program.write_text("#!/bin/sh\nprintf 'NVIDIA H200, 580.65.06\\nNVIDIA H200, 580.65.06\\n'\n")
  program.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def pci(folder: pathlib.Path, *devices: tuple[str, str]) -> pathlib.Path:
  for number, (vendor, device) in enumerate(devices):
    (folder / f"0000:{number}").mkdir(parents=True)
    (folder / f"0000:{number}" / "vendor").write_text(f"{vendor}\n")
    (folder / f"0000:{number}" / "device").write_text(f"{device}\n")
  return folder


def test_tpu_chips_are_found_on_the_bus(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  v5e, network, other = ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x8086", "0x0063")
  found = find_accelerators(pci(tmp_path / "a", v5e, network, v5e, other))
  assert found is not None
  assert (found.name, found.extra) == ("2 × TPU v5e", "tpu")
  assert find_accelerators(pci(tmp_path / "b", network, other)) is None


@pytest.mark.parametrize(
  "program", ["exit 9", "echo No devices were found", "echo NVIDIA-SMI has failed, 1"]
)
def test_a_program_without_gpus_is_no_gpu(tmp_path, monkeypatch, program):
  (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
  (tmp_path / "nvidia-smi").chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  assert find_accelerators(tmp_path) is None


def test_a_plugin_that_did_not_start_is_another_advice(gpus, monkeypatch):
  found = find_accelerators()
  assert found is not None
  monkeypatch.setattr(accelerators.Accelerators, "installed", lambda self: False)
  assert "-m pip install 'maxbatch[gpu]'" in accelerators.advice(found)
  monkeypatch.setattr(accelerators.Accelerators, "installed", lambda self: True)
  assert "jax has a plugin for it and did not start it" in accelerators.advice(found)


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
  """Nothing but the keys says which devices: the tests themselves ask for those of the CPU."""
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  monkeypatch.setattr(hardware, "platforms", lambda: "")


def test_a_run_beside_idle_gpus_says_so_first(gpus, by_default, tmp_path, capsys):
  keys = [f"{key}={value}" for key, value in SMALLEST.items()]
  keys += ["validate_only=true", "dataset_type=synthetic", f"base_output_directory={tmp_path}"]
  assert train.main(["config=base", *keys]) == 0
  assert capsys.readouterr().err.startswith(
    "note: 2 × NVIDIA H200, driver 580.65.06: idle. This is on 8 × CPU, simulated: "
  )


def test_who_asks_for_the_cpu_is_told_nothing(gpus, by_default, monkeypatch):
  devices = jax.devices()
  config = load_config(["config=base"])
  assert idle_accelerators(config, devices)
  assert not idle_accelerators(load_config(["config=base", "num_simulated_devices=8"]), devices)
  monkeypatch.setattr(hardware, "platforms", lambda: "cpu")
  assert not idle_accelerators(config, devices)
