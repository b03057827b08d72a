"""scripts/accelerator_check.py in its smallest form: what it measures, says is broken, and keeps."""

import importlib
import json
import pathlib
import sys
import types
import zipfile

import numpy as np
import pytest
from processes import REPOSITORY

from maxbatch.config.load import load_config
from maxbatch.estimate.chips import GPUS, measured_factor

sys.path.insert(0, str(REPOSITORY / "scripts"))

# By name, for type checkers do not look there.
accelerator_check = importlib.import_module("accelerator_check")
sections = importlib.import_module("accelerator_sections")

TINY = sections.Setting(
  "tiny", ("num_simulated_devices=8", "jax_cache_dir=none", "base_num_decoder_layers=1")
)


def test_a_gradient_is_the_same_on_a_mesh_and_in_microbatches(monkeypatch):
  # Random numbers are half of a compilation; tests/test_step.py has dropout on meshes.
  still = tuple(key for key in sections.GRADIENT if "dropout" not in key)
  monkeypatch.setattr(sections, "GRADIENT", still)
  monkeypatch.setattr(
    sections,
    "splits_of",
    lambda heads, count, batch: {
      "4 microbatches on one device": ("gradient_accumulation_steps=4",),
      "a mesh": ("ici_fsdp_parallelism=4", "gradient_accumulation_steps=2"),
    },
  )
  rows = sections.splits(TINY)
  assert [row.kept for row in rows] == [None, True, True]
  assert rows[2].name == "gradient of a mesh"


def test_devices_are_divided_in_every_way_that_they_allow():
  result = sections.splits_of(num_heads=12, count=8, batch=16)
  assert list(result) == [
    "4 microbatches on one device",
    "16 microbatches on one device",
    "data 8",
    "fsdp 8",
    "data 2, tensor 4",
    "data 4, 2 pipeline stages",
  ]
  assert len(sections.splits_of(num_heads=12, count=1, batch=16)) == 2
  assert list(sections.splits_of(num_heads=4, count=3, batch=48))[2:] == ["data 3", "fsdp 3"]


def test_another_gradient_is_seen(monkeypatch):
  # What the order of rows changes loosens no limit.
  another = np.array([1, 1, 1, 1.00001])
  ends = iter([np.ones(4), another, np.ones(4), another])
  monkeypatch.setattr(sections, "after_a_step", lambda config, target, **_: [next(ends)])
  monkeypatch.setattr(
    sections,
    "splits_of",
    lambda heads, count, batch: {"one device, the same": (), "one device, another": ()},
  )
  assert [row.kept for row in sections.splits(TINY)] == [None, True, False]


def test_the_kernels_stand_in_is_close_and_a_wrong_one_is_not(monkeypatch):
  assert [row.kept for row in sections.attention(TINY)] == [True] * 3
  right = sections.flash.gpu_attention
  # It sees one key too many.
  monkeypatch.setattr(
    sections.flash,
    "gpu_attention",
    lambda q, k, v, ids, window, **keys: right(q, k, v, ids, window and window + 1, **keys),
  )
  assert [row.kept for row in sections.attention(TINY)] == [True, True, False]


@pytest.mark.parametrize(
  ("kind", "tera"),
  [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA A100-SXM4-40GB", 312), ("TPU v5 lite", 197)],
)
def test_peaks_that_are_published_are_known(kind, tera):
  assert sections.peak_flops(kind) == tera * 1e12
  assert sections.peak_flops("cpu") is None


def test_the_command_runs_a_section_keeps_it_and_writes_the_table(tmp_path, capsys):
  keys = ["size=tiny", "sections=device", f"out={tmp_path}", "num_simulated_devices=2"]
  assert accelerator_check.main(keys) == 0
  table = (tmp_path / "accelerator_check.md").read_text()
  assert "| devices | 2 × cpu (cpu) |  |" in table
  assert table in capsys.readouterr().out
  # What is kept is not measured again: it now says that a promise was broken.
  rows = [{"name": "gradient", "figure": "0.1 off", "kept": False}]
  (tmp_path / "device.json").write_text(json.dumps({"rows": rows}))
  assert accelerator_check.main(keys) == 1
  assert "| gradient | 0.1 off | **broken** |" in capsys.readouterr().out


def test_a_measured_gpu_scales_the_estimates_of_its_generation(tmp_path, monkeypatch):
  """With stand-ins for the GPU, its clock and the compiler: what the section keeps is what estimates read."""
  file = tmp_path / "gpu_calibration.json"
  file.write_text(json.dumps({"published": {}, "measured": []}))
  monkeypatch.setattr(sections, "CALIBRATION", file)
  kind = types.SimpleNamespace(device_kind=GPUS["h100"].device_kind)
  monkeypatch.setattr(sections.jax, "devices", lambda: [kind] * 8)
  took = iter((1.0, 1.2, 1.4, 5.0))
  report = types.SimpleNamespace
  monkeypatch.setattr(sections, "timed", lambda *_: report(step_seconds=next(took)))
  asked = list[str]()

  def estimated(keys: list[str], topology: str, out: pathlib.Path) -> float:
    load_config(keys)
    asked.append(topology)
    return 1.0

  monkeypatch.setattr(sections.gpu_calibration, "estimated_seconds", estimated)
  rows = sections.calibrate(sections.Setting("small", ()))
  assert asked == ["h100-8"] * len(sections.gpu_calibration.FORMS)
  assert rows[-1].figure.startswith("1.3 times the estimates")
  records = json.loads(file.read_text())["measured"]
  assert measured_factor("h100", records) == pytest.approx(1.3)
  assert measured_factor("h200", records) == 1.0
  # The same steps again replace what was measured before.
  took = iter((2.0, 2.0, 2.0, 2.0))
  sections.calibrate(sections.Setting("small", ()))
  records = json.loads(file.read_text())["measured"]
  assert measured_factor("h100", records) == pytest.approx(2.0)
  assert len(records) == len(sections.gpu_calibration.FORMS)


def test_a_cpu_calibrates_nothing():
  (row,) = sections.calibrate(sections.Setting("tiny", ()))
  assert "not calibrated" in row.figure


def test_an_unknown_section_is_refused_and_a_failed_one_is_said(tmp_path, capsys, monkeypatch):
  assert accelerator_check.main(["sections=device,spede"]) == 2
  assert "sections=spede: there are device, splits" in capsys.readouterr().err
  monkeypatch.setattr(accelerator_check, "ROOT", tmp_path)
  monkeypatch.setattr(accelerator_check, "missing_packages", list)
  assert accelerator_check.main(["sections=memory", f"out={tmp_path}"]) == 1
  out = capsys.readouterr().out
  assert "| **memory** | exit code 2:" in out
  assert "**failed**" in out
  assert not (tmp_path / "memory.json").exists()


def test_missing_packages_are_named_with_the_wheels_to_bring(tmp_path, monkeypatch):
  assert accelerator_check.missing_packages() == []
  project = 'dependencies = ["numpy>=1", "absl-py>=99.1", "no_such_package_77>=2.1", "other_77; extra == \'x\'"]'
  (tmp_path / "pyproject.toml").write_text(f"[project]\n{project}\n")
  monkeypatch.setattr(accelerator_check, "ROOT", tmp_path)
  assert accelerator_check.missing_packages() == ["absl-py>=99.1", "no_such_package_77>=2.1"]
  words = accelerator_check.how_to_bring(["no_such_package_77>=2.1"])
  assert "pip download -d wheels" in words
  assert "'no_such_package_77>=2.1'" in words


def test_wheels_are_unpacked_where_their_packages_are_not_here(tmp_path, monkeypatch):
  for name in ("no_such_package_77", "numpy"):
    info = f"{name}-2.1.dist-info"
    with zipfile.ZipFile(tmp_path / f"{name}-2.1-py3-none-any.whl", "w") as wheel:
      wheel.writestr(f"{name}_marker.py", "")
      wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1\n")
      wheel.writestr(
        f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
      )
      wheel.writestr(f"{info}/RECORD", "")
  monkeypatch.setattr(sys, "path", list(sys.path))
  place = tmp_path / "packages"
  accelerator_check.unpack(tmp_path, place)
  assert (place / "no_such_package_77_marker.py").exists()
  assert not (place / "numpy_marker.py").exists()
  assert sys.path[0] == str(place)
  assert pathlib.Path(np.__file__).parts[-2] == "numpy"
