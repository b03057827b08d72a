"""metrics.jsonl and TensorBoard hold every step once, whatever happened to the run."""

import importlib
import json
import os
import pathlib
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maxbatch.errors import UserError
from maxbatch.run_folder.metrics import MetricsLog, Record, read_metrics

# Generated at import, so that no type checker knows what is in it.
event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")


def record(step: int, loss: float = 1.5) -> Record:
  return {"step": step, "samples": 4 * step, "tokens": 64 * step, "loss": loss}


def write(folder: pathlib.Path, start: int, *records: Record) -> None:
  with MetricsLog(folder, start) as log:
    for one in records:
      log.write(one)


def events(folder: pathlib.Path) -> Iterator[Any]:
  """Every TensorBoard event: records of length (8 bytes), checksum (4), data, checksum (4)."""
  for path in sorted((folder / "tensorboard").rglob("events.*")):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack_from("<Q", data)
      event = event_pb2.Event()
      event.ParseFromString(data[12 : 12 + length])
      yield event
      data = data[16 + length :]


def curve(folder: pathlib.Path, part: str, tag: str) -> list[tuple[int, float]]:
  """What TensorBoard itself shows of a part of the folder, as (step, value)."""
  board = EventAccumulator(str(folder / "tensorboard" / part)).Reload()
  return [(event.step, event.value) for event in board.Scalars(tag)]


def steps(folder: pathlib.Path) -> list[int | float]:
  return [one["step"] for one in read_metrics(folder)]


def test_records_are_one_json_object_per_line(tmp_path):
  records = [record(0) | {"eval/loss": 5.25}, record(1, loss=1e-7)]
  write(tmp_path / "new" / "run", 0, *records)
  lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line) for line in lines] == records
  assert read_metrics(tmp_path / "new" / "run") == records


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
  with MetricsLog(tmp_path, 0) as log:
    log.write(record(1))
    assert steps(tmp_path) == [1]


def test_tensorboard_gets_what_is_measured(tmp_path):
  write(tmp_path, 0, record(1) | {"eval/loss": 5.25}, record(2, loss=0.5))
  plotted = {
    (value.tag, event.step): value.simple_value
    for event in events(tmp_path)
    for value in event.summary.value
  }
  over_steps = {key: value for key, value in plotted.items() if "over_" not in key[0]}
  assert over_steps == {("loss", 1): 1.5, ("eval/loss", 1): 5.25, ("loss", 2): 0.5}
  assert {key: plotted[key] for key in plotted.keys() - over_steps.keys()} == {
    ("over_samples/loss", 4): 1.5,
    ("over_samples/eval/loss", 4): 5.25,
    ("over_samples/loss", 8): 0.5,
    ("over_tokens/loss", 64): 1.5,
    ("over_tokens/eval/loss", 64): 5.25,
    ("over_tokens/loss", 128): 0.5,
  }


def test_a_resumed_run_goes_on_after_its_step(tmp_path):
  write(tmp_path, 0, *map(record, range(6)))
  write(tmp_path, 3, record(4, loss=9.0))
  assert steps(tmp_path) == [0, 1, 2, 3, 4]
  assert read_metrics(tmp_path)[-1]["loss"] == 9.0
  assert curve(tmp_path, "", "loss") == [(0, 1.5), (1, 1.5), (2, 1.5), (3, 1.5), (4, 9.0)]
  over_samples = [(0, 1.5), (4, 1.5), (8, 1.5), (12, 1.5), (16, 9.0)]
  assert curve(tmp_path, "over_samples", "over_samples/loss") == over_samples
  over_tokens = [(16 * samples, loss) for samples, loss in over_samples]
  assert curve(tmp_path, "over_tokens", "over_tokens/loss") == over_tokens


def test_a_run_that_starts_anew_writes_step_0_once(tmp_path):
  write(tmp_path, 0, record(0), record(1))
  write(tmp_path, 0, record(0), record(1))
  assert steps(tmp_path) == [0, 1]


def test_a_line_cut_off_by_a_crash_is_left_out_and_cut(tmp_path):
  write(tmp_path, 0, record(1), record(2))
  path = tmp_path / "metrics.jsonl"
  for length in range(1, len(json.dumps(record(3))) + 1):
    whole = path.read_text()
    path.write_text(whole + json.dumps(record(3))[:length])
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, 2)
    assert path.read_text() == whole


def test_a_damaged_line_is_named(tmp_path):
  write(tmp_path, 0, record(1), record(2))
  path = tmp_path / "metrics.jsonl"
  path.write_text("{oops}\n" + path.read_text())
  expected = f"{path}:1: not a record of a step; remove the line, or choose another run_name"
  for read in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path, 1)):
    with pytest.raises(UserError) as caught:
      read()
    assert str(caught.value) == expected
  assert path.read_text().startswith("{oops}\n")


@pytest.mark.parametrize(
  "line",
  [
    b"\xff\xfe\x00\x01",
    b"null",
    b"[1]",
    b'{"step": null}',
    b'{"step": "1"}',
    b'{"step": 1.5}',
    b'{"step": true}',
    b'{"step": 1, "loss": null}',
    b'{"step": 1, "eval/loss": "low"}',
    b'{"step": 1, "eval/loss": [1]}',
    b"[" * 100_000,
  ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(line + b"\n")
  for read in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path, 1)):
    with pytest.raises(UserError, match=re.escape(f"{path}:1: not a record of a step;")):
      read()
  assert path.read_bytes() == line + b"\n"


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path):
  os.mkfifo(tmp_path / "metrics.jsonl")
  for read in (lambda: read_metrics(tmp_path), lambda: MetricsLog(tmp_path, 1)):
    with pytest.raises(UserError, match=r"metrics\.jsonl is a pipe, not a file; remove it"):
      read()


def test_a_run_without_records_has_none(tmp_path):
  assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("taken", ["run", "run/tensorboard", "run/metrics.jsonl"])
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, taken):
  blocked = tmp_path / taken
  blocked.parent.mkdir(exist_ok=True)
  if taken.endswith(".jsonl"):
    blocked.mkdir()
  else:
    blocked.write_text("a file where a folder should be")
  with pytest.raises(UserError) as caught:
    MetricsLog(tmp_path / "run", 0)
  text = str(caught.value)
  assert text.startswith(f"base_output_directory={tmp_path} run_name=run: {blocked}")
  assert text.endswith("choose a folder that can, for example base_output_directory=runs")
