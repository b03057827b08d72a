"""Who starts again, and from which copy: decisions without a process."""

import json
import socket
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from maxbatch.config.load import load_config
from maxbatch.hardware.copies import Header, MemoryCopies, Order, Piece, Slot, kept_bytes
from maxbatch.hardware.restarts import (
  choose_hosts,
  finish_since,
  how_ended,
  missing_elements,
  newest_copy,
)
from maxbatch.run_folder.events import END, START, EventLog
from maxbatch.run_folder.paths import RunFolder

RECORD = {"step": 7, "leaves": {"w": {"shape": [4, 3], "dtype": "float32"}}}


def config(*keys: str):
  return load_config(["config=base", "batch_size=8", *keys])


@pytest.mark.parametrize(
  ("there", "least", "expected"),
  [
    ([0, 1, 2, 3], 1, [0, 1, 2, 3]),
    # 8 samples do not divide over 3 devices: one host is spare.
    ([0, 2, 3], 1, [0, 2]),
    ([2, 3], 1, [2, 3]),
    ([3], 1, [3]),
    ([3], 2, []),
    ([0, 2, 3], 3, []),
    ([], 1, []),
  ],
)
def test_the_most_hosts_train_over_whose_devices_the_same_batch_divides(there, least, expected):
  keys = config(f"min_devices={least}")
  chosen, reason = choose_hosts(keys, 4, there, 1)
  assert chosen == expected
  assert bool(reason) == (not expected)


def test_a_mesh_with_fixed_axes_has_no_fewer_devices():
  keys = config("ici_data_parallelism=4")
  chosen, reason = choose_hosts(keys, 4, [0, 1], 1)
  assert not chosen
  assert "ici_data_parallelism=4" in reason


def header(generation: int, step: int, process: int, rows: Sequence[int]) -> Header:
  """A copy of some rows of an array of 4 rows."""
  pieces = [Piece((row, 0), (row + 1, 3), 12 * place, 12, True) for place, row in enumerate(rows)]
  return Header((generation, step, process), RECORD | {"step": step}, {"w": pieces})


def about(generation: int, lineage: list[int], *copies: Header) -> dict[str, Any]:
  shown = [json.loads(one.encoded()) for one in copies]
  return {"generation": generation, "lineage": lineage, "copies": shown}


def test_the_newest_copy_is_taken_that_is_whole():
  both = [0, 1], [2, 3]
  old, new = ([header(2, step, number, both[number]) for number in (0, 1)] for step in (5, 9))
  assert newest_copy([about(2, [0, 0], old[0], new[0]), about(2, [0, 0], old[1], new[1])]) == (2, 9)
  assert newest_copy([about(2, [0, 0], old[0], new[0]), about(2, [0, 0], old[1])]) == (2, 5)
  assert newest_copy([about(2, [0, 0], old[0], new[0])]) == (0, 0)
  # The neighbour in the ring has what a host that is gone had.
  assert newest_copy([about(2, [0, 0], old[0], new[0], new[1])]) == (2, 9)


def test_a_copy_of_another_course_of_training_is_not_taken():
  """After start 3 from step 5 a host comes back with step 9 of start 2: its records are gone."""
  back = about(2, [0, 0], header(2, 9, 0, [0, 1, 2, 3]))
  going_on = about(3, [2, 5], header(2, 5, 0, [0, 1, 2, 3]))
  assert newest_copy([back, going_on]) == (2, 5)
  assert newest_copy([back]) == (2, 9)
  assert newest_copy([about(0, [0, 0])]) == (0, 0)


def test_a_slot_holds_a_whole_copy_or_nothing():
  slot, one = Slot(), header(1, 7, 0, [0, 1, 2, 3])
  assert slot.header() is None

  def cut_off():
    yield bytes(24)
    raise KeyboardInterrupt

  data = np.arange(12, dtype=np.float32)
  slot.write(one, [data.tobytes()])
  assert slot.header() == one
  assert not missing_elements([one])
  with pytest.raises(KeyboardInterrupt):
    slot.write(header(1, 9, 0, [0, 1, 2, 3]), cut_off())
  assert slot.header() is None
  slot.clear()
  assert slot.header() is None


def test_any_part_of_an_array_is_put_together_from_the_copies_of_several_processes():
  """Rows 0 and 2 in one slot, rows 1 and 3 in another, which has what the first has too."""
  data = np.arange(12, dtype=np.float32).reshape(4, 3)
  slots = []
  for process, rows in enumerate(([0, 2], [1, 0, 3])):
    slots.append(Slot())
    slots[-1].write(header(1, 7, process, rows), [data[rows].tobytes()])
  sources = [{"slot": slot.descriptor} for slot in slots]
  ours, its = socket.socketpair()
  with ours, its:
    copies = MemoryCopies(order(ours, copy=[1, 7], sources=sources), 1, -1)
  assert copies.record()["step"] == copies.step == 7
  for rows in (slice(None), slice(0, 2), slice(2, 4), slice(1, 3)):
    part = copies.read("w", [rows, slice(1, 3)], [4, 3], np.float32)
    np.testing.assert_array_equal(part, data[rows, 1:3])
  with pytest.raises(OSError, match="12 elements of v are in no copy"):
    copies.read("v", [slice(None), slice(None)], [4, 3], np.float32)


def order(link: socket.socket, **more: Any) -> Order:
  """What a supervisor says to a process without copies."""
  usual: dict[str, Any] = {"domains": [0], "slots": [], "copy": None, "sources": []} | more
  return Order(generation=2, process=0, link=link.fileno(), **usual)


def test_the_interval_of_copies_follows_from_what_they_take():
  ours, its = socket.socketpair()
  with ours, its:
    copies = MemoryCopies(order(ours), 1, -1)
  assert copies.next_step == 1
  copies.plan_next(1, 5.0, 0.1)  # The first compiles.
  assert copies.next_step == 11
  copies.plan_next(11, 0.5, 0.1)
  assert copies.next_step == 11 + 500


def test_an_end_is_named():
  assert how_ended(-9) == "was ended by SIGKILL"
  assert how_ended(4) == "ended with exit code 4"


def test_a_run_that_ends_while_a_host_comes_back_is_told_from_one_that_had_ended_before(tmp_path):
  with EventLog(tmp_path) as events:
    events.note(END, how="finished", step=3, text="")
  has_finished = finish_since(RunFolder(tmp_path).events)
  assert not has_finished()
  with EventLog(tmp_path) as events:
    events.note(START, step=3)
    events.note(END, how="stopped", step=5, text='"how": "finished"')
    assert not has_finished()
    events.note(END, how="finished", step=9, text="")
  assert has_finished()
  assert not finish_since(tmp_path / "no_run" / "events.jsonl")()


def leaf(*rows: slice) -> Any:
  """An array float32[4, 3], of which each of two processes has the rows of two devices."""
  devices = [types.SimpleNamespace(process_index=number // 2, number=number) for number in range(4)]
  sharding = types.SimpleNamespace(
    devices_indices_map=lambda _: {
      _Named(each.process_index, each.number): (part, slice(None))
      for each, part in zip(devices, rows, strict=True)
    },
    shard_shape=lambda shape: (len(range(*rows[0].indices(shape[0]))), shape[1]),
  )
  return types.SimpleNamespace(shape=(4, 3), dtype=np.float32, sharding=sharding)


class _Named(NamedTuple):
  process_index: int
  number: int


def test_the_memory_that_copies_take_is_known_before_the_run():
  """Two of a process's own part, and two of what only its neighbour has."""
  everywhere = leaf(*[slice(None)] * 4)
  divided = leaf(*(slice(row, row + 1) for row in range(4)))
  halves = leaf(slice(0, 2), slice(2, 4), slice(0, 2), slice(2, 4))
  assert kept_bytes([everywhere]) == (2 * 48, 0)
  assert kept_bytes([divided]) == (2 * 24, 2 * 24)
  assert kept_bytes([halves]) == (2 * 48, 0)
  assert kept_bytes([everywhere, divided]) == (2 * 72, 2 * 24)
