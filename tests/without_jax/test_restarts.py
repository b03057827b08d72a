"""Who starts again, and from which copy: decisions without a process."""

import asyncio
import collections
import itertools
import json
import math
import os
import random
import signal
import socket
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from maxbatch.config.load import load_config
from maxbatch.hardware import supervisor
from maxbatch.hardware.copies import (
  Header,
  MemoryCopies,
  Piece,
  Slot,
  choose_keepers,
  kept_bytes,
)
from maxbatch.hardware.held import HeldCopies
from maxbatch.hardware.leader import Leader
from maxbatch.hardware.messages import Connection, Order, connect
from maxbatch.hardware.restarts import (
  Place,
  choose_hosts,
  has_finished,
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
  keys = config(f"min_devices={least}", "accumulation=streamed")
  choice = choose_hosts(keys, 4, there, 1)
  assert choice.hosts == expected
  assert bool(choice.reason) == (not expected)


def test_a_mesh_with_fixed_axes_has_no_fewer_devices():
  keys = config("ici_data_parallelism=4")
  choice = choose_hosts(keys, 4, [0, 1], 1)
  assert not choice.hosts
  assert "ici_data_parallelism=4" in choice.reason


@pytest.mark.parametrize(
  ("keys", "left", "hosts", "padding"),
  [
    # 17 rows on each, 13 of them padding; on 60 it would be 18, on 63 also 17.
    ("batch_size=1024", 63, 61, 13),
    ("batch_size=1024", 32, 32, 0),
    ("batch_size=1024 per_device_batch_size=16", 63, 32, 0),
    ("batch_size=1024 per_device_batch_size=4", 63, 52, 16),
    ("batch_size=1024 ici_tensor_parallelism=2", 63, 61, 13),
    (
      "batch_size=1024 batch_schedule_type=linear batch_size_start=64 batch_schedule_length=4096",
      *(63, 61, 13),
    ),
    # One row on each of 8 takes as long as on 9, and 2 as on 5: 4 are enough.
    ("", 7, 4, 0),
    ("batch_size=9", 8, 5, 1),
    ("batch_size=1024 accumulation=streamed", 63, 32, 0),
    ("batch_size=1024 batch_schedule=gns gns=norm", 63, 32, 0),
    ("batch_size=1024 pipeline_schedule=gpipe ici_pipeline_parallelism=2", 63, 32, 0),
  ],
)
def test_a_step_is_padded_where_that_takes_less_time(keys, left, hosts, padding):
  devices = 2 if "parallelism" in keys else 1
  choice = choose_hosts(config(*keys.split()), 64, range(left), devices)
  assert (len(choice.hosts), choice.padding_rows) == (hosts, padding)
  assert choice.keys == ({"pad_batch": "true"} if padding else {})


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
  slot.write(one, [data.tobytes()])
  larger = slot.read(0, 1 << 20)
  slot.write(smaller := header(1, 9, 0, [2]), [data[:3].tobytes()])
  assert slot.header() == smaller
  assert len(slot.read(0, 1 << 20)) < len(larger)
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
  whole = len(slots[1].read(0, 1 << 20))
  os.truncate(slots[1].descriptor, whole - 36)  # As of a supervisor that ends meanwhile.
  with pytest.raises(OSError, match="a copy of w is not there any more"):
    copies.read("w", [slice(None), slice(None)], [4, 3], np.float32)


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
  log = RunFolder(tmp_path).events
  (before,) = (json.loads(line)["time"] for line in log.read_text().splitlines())
  assert has_finished(log, before)
  assert not has_finished(log, before + 0.001)
  with EventLog(tmp_path) as events:
    for step in range(900):
      events.note(START, step=step)
    events.note(END, how="stopped", step=5, text='"how": "finished"')
    assert not has_finished(log, before + 0.001)
    events.note(END, how="finished", step=9, text="")
  assert has_finished(log, before + 0.001)
  assert not has_finished(tmp_path / "no_run" / "events.jsonl", 0)


def test_a_host_that_comes_when_a_run_has_just_ended_ends_with_it(tmp_path):
  """Before the leader has gone: here process 0, which has come back itself, and waits for nobody."""

  async def joined() -> list[dict[str, Any]]:
    (tmp_path / "run").mkdir()
    leader = Leader(Place(0, 2), config(f"base_output_directory={tmp_path}", "run_name=run"))
    server = await asyncio.start_server(
      lambda *streams: leader.admit({"process": 1}, Connection(*streams)), "localhost", 0
    )
    with EventLog(tmp_path / "run") as events:
      events.note(END, how="finished", step=9, text="")
    await leader.run()
    address = f"localhost:{server.sockets[0].getsockname()[1]}"
    connection = await connect(address, 60)
    said = [await connection.receive(60) for _ in range(2)]
    connection.close()
    leader.resign()
    server.close()
    return said

  assert asyncio.run(joined()) == [{"kind": "welcome"}, {"kind": "end", "code": 0}]


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
  assert kept_bytes([everywhere], [0, 1]) == (2 * 48, 0)
  assert kept_bytes([divided], [0, 1]) == (2 * 24, 2 * 24)
  assert kept_bytes([halves], [0, 1]) == (2 * 48, 0)
  assert kept_bytes([everywhere, divided], [0, 1]) == (2 * 72, 2 * 24)
  # Both on one host, which has two of each, and no neighbour.
  assert kept_bytes([everywhere, divided], [0, 0]) == (2 * 144, 0)


@pytest.mark.parametrize(
  ("domains", "expected"),
  [
    ([0], [None]),
    ([0, 0], [None, None]),
    ([0, 1, 2], [1, 2, 0]),
    ([0, 0, 1, 1], [2, 3, 0, 1]),
    ([0, 0, 1], [2, 2, 1]),
    ([0, 1, 0, 1], [1, 0, 3, 2]),
    ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
    # The other two copies go to the hosts with one process each: each has four, of six that there are.
    ([0, 0, 0, 0, 1, 2], [4, 4, 5, 5, 5, 4]),
  ],
)
def test_each_process_has_a_keeper_on_another_host(domains, expected):
  keepers = choose_keepers(domains)
  assert [keepers.get(number) for number in range(len(domains))] == expected


def test_no_host_keeps_more_than_must_be():
  for counts in itertools.product(range(1, 6), repeat=4):
    domains = [host for host, count in enumerate(counts) for _ in range(count)]
    random.Random(0).shuffle(domains)
    chosen = choose_keepers(domains)
    keepers = [domains[chosen[number]] for number in range(len(domains))]
    assert all(own != keeper for own, keeper in zip(domains, keepers, strict=True))
    most = max((collections.Counter(domains) + collections.Counter(keepers)).values())
    assert most == max(*counts, math.ceil(2 * sum(counts) / 4))


def test_a_supervisor_keeps_two_copies_of_each_of_several_processes():
  """Which come at the same time; those of the generation before go with the second copy after it."""
  held, every, data = HeldCopies(), [0, 1, 2, 3], np.arange(12, dtype=np.float32).tobytes()

  def keep(generation: int, step: int, processes: Sequence[int]) -> None:
    headers = [header(generation, step, process, every) for process in processes]
    pairs = [(held.slot_for(one), one) for one in headers]
    ends = [(slot.begin(one), slot, one) for slot, one in pairs]
    for offset, slot, one in ends:
      slot.append(data, offset)
      slot.finish(one)

  for step in (5, 9, 13):
    keep(1, step, [0, 1, 2])
  both = [(1, step, process) for process in (0, 1, 2) for step in (9, 13)]
  assert sorted(one["key"] for one in held.about()) == sorted(both)
  held.drop_but([1, 13])
  keep(2, 14, [0])
  found = [key for key in [*both, (2, 14, 0)] if held.find(key)]
  assert found == [(1, 13, 0), (1, 13, 1), (1, 13, 2), (2, 14, 0)]
  held.drop_before(2)
  assert [one["key"] for one in held.about()] == [(2, 14, 0)]


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path, capsys):
  """Before anything is trained; and nohup, which has SIGHUP ignored, stays in force."""
  (tmp_path / "file").touch()
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    code = supervisor.main(
      ["config=base", f"base_output_directory={tmp_path}/file", "batch_size=8"]
    )
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)
  assert code == 2
  said = capsys.readouterr().err
  assert said.startswith(
    f"error: {tmp_path}/file/first_run/generations cannot be written (Not a dir"
  )
