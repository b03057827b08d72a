"""Another format of checkpoints: kept, verified and replaced as Orbax's own."""

import dataclasses
import pathlib
import zipfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_checkpoint import (
  CONFIG,
  IDENTITY,
  PLAN,
  abstract_state,
  assert_same,
  make_state,
  mesh_of,
  position,
)

from maxbatch.checkpoints import formats
from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.checkpoints.formats import Format
from maxbatch.errors import UserError


class Npz(ocp.CheckpointHandler):
  """Every array in one file that numpy reads anywhere."""

  def save(self, directory, args):
    arrays: dict[str, Any] = {name: np.asarray(x) for name, x in args.arrays.items()}
    np.savez(directory / "arrays.npz", **arrays)

  def restore(self, directory, args):
    try:
      with open(directory / "arrays.npz", "rb") as stream, np.load(stream) as file:
        stored = {name: file[name] for name in args.arrays}
    except zipfile.BadZipFile as error:
      raise ValueError(error) from None
    # numpy has no bfloat16: it writes the bits, and reads them back as bytes without a name.
    return {
      name: jax.device_put(stored[name].view(leaf.dtype), leaf.sharding)
      for name, leaf in args.arrays.items()
    }


@ocp.args.register_with_handler(Npz, for_save=True)
@dataclasses.dataclass
class NpzSave(ocp.args.CheckpointArgs):
  arrays: dict


@ocp.args.register_with_handler(Npz, for_restore=True)
@dataclasses.dataclass
class NpzRestore(ocp.args.CheckpointArgs):
  arrays: dict


@pytest.fixture(autouse=True)
def _npz(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(formats.FORMATS, "npz", Format(NpzSave, NpzRestore))


def opened(folder: pathlib.Path, lines: list[str], name: str = "npz") -> Checkpointer:
  config = dataclasses.replace(CONFIG, checkpoint_format=name)
  return Checkpointer(folder, config, IDENTITY, lines.append)


def save(folder: pathlib.Path, *steps: int, name: str = "npz") -> None:
  lines: list[str] = []
  with opened(folder, lines, name) as checkpointer:
    for step in steps:
      checkpointer.save(make_state(step), position(step), PLAN)
  assert lines == []


def test_another_format_comes_back_bit_for_bit_and_only_the_newest_stay(tmp_path):
  save(tmp_path, 1, 2, 3, 4)
  files = sorted(tmp_path.glob("*/state/arrays.npz"))
  assert [file.parent.parent.name for file in files] == ["2", "3", "4"]
  with opened(tmp_path, []) as checkpointer:
    restored = checkpointer.restore(abstract_state(mesh_of(2, 4)))
  assert restored is not None
  assert restored.position == position(4)
  assert_same(restored.state, make_state(4))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_found_in_any_format(tmp_path, damage):
  save(tmp_path, 1, 2)
  file = tmp_path / "2" / "state" / "arrays.npz"
  data = file.read_bytes()
  file.unlink()
  if damage != "missing":
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    file.write_bytes(flipped if damage == "flipped" else data[:middle])
  lines: list[str] = []
  with opened(tmp_path, lines) as checkpointer:
    restored = checkpointer.restore(abstract_state(mesh_of(4, 2)))
  assert restored is not None
  assert restored.position == position(1)
  assert lines[0].startswith("checkpoint step 2 is damaged (its state cannot be read: ")


def test_every_checkpoint_is_read_as_it_was_written(tmp_path):
  save(tmp_path, 1, name="orbax")
  save(tmp_path, 2)
  lines: list[str] = []
  with opened(tmp_path, lines, "orbax") as checkpointer:
    restored = checkpointer.restore(abstract_state(mesh_of(4, 2)))
    assert restored is not None
    assert restored.position == position(2)
    checkpointer.save(make_state(3), position(3), PLAN)
  (tmp_path / "3" / "state").rename(tmp_path / "3" / "gone")
  with opened(tmp_path, lines) as checkpointer:
    restored = checkpointer.restore(abstract_state(mesh_of(4, 2)))
  assert restored is not None
  assert_same(restored.state, make_state(2))
  (tmp_path / "2" / "state").rename(tmp_path / "2" / "gone")
  with opened(tmp_path, lines) as checkpointer:
    restored = checkpointer.restore(abstract_state(mesh_of(4, 2)))
  assert restored is not None
  assert_same(restored.state, make_state(1))


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(UserError) as caught:
    opened(tmp_path, [], "orbx")
  assert str(caught.value) == (
    "checkpoint_format=orbx: there is no such checkpoint_format. Did you mean orbax? "
    "Known: orbax, safetensors, npz."
  )
