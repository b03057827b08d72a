"""A record of chosen batches survives a file, and a wrong file is explained."""

import os
import re
import stat

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxbatch.batch.schedule_file import (
  Change,
  changes_until,
  read_changes,
  with_change,
  write_changes,
)
from maxbatch.errors import UserError

CHANGES = (Change(0, 32, "the first batch"), Change(6400, 64, "noise: 83 [69–97], ≥ 2 × 32"))
EXAMPLE = """a file that works:
batch_schedule:
- [0, 32, "the first batch"]
- [6400, 64, "an optional reason"]"""


def written(tmp_path, text: str):
  file = tmp_path / "mine.yml"
  file.write_text(text, encoding="utf-8")
  return file


def message(tmp_path, text: str) -> str:
  """What a wrong file's reader is told, without the file's name and the example."""
  file = written(tmp_path, text)
  with pytest.raises(UserError) as caught:
    read_changes(file)
  said = str(caught.value)
  assert said.startswith(f"{file}: ")
  assert said.endswith(f"; {EXAMPLE}")
  return said.removeprefix(f"{file}: ").removesuffix(f"; {EXAMPLE}")


def test_a_record_is_read_back(tmp_path):
  file = write_changes(tmp_path, CHANGES)
  assert file == tmp_path / "batch_schedule.yml"
  assert read_changes(file) == CHANGES


def test_people_can_read_it(tmp_path):
  lines = write_changes(tmp_path, CHANGES).read_text(encoding="utf-8").splitlines()
  assert [line for line in lines if not line.startswith("#")] == [
    "batch_schedule:",
    '- [0, 32, "the first batch"]',
    '- [6400, 64, "noise: 83 [69–97], ≥ 2 × 32"]',
  ]


reasons = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
  [
    "null",
    "12",
    "yes",
    "a: b",
    "# no comment",
    "- x",
    "'",
    "line\nline",
    "\x85\u2028",
    "\\",
    '"',
    "x" * 300,
  ]
)


@settings(
  max_examples=examples(100),
  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
  st.dictionaries(st.integers(1, 10**12), st.tuples(st.integers(1, 10**7), reasons), max_size=4),
  reasons,
)
def test_any_record_is_read_back(tmp_path, later, first):
  changes = (
    Change(0, 8, first),
    *(Change(at, *rest) for at, rest in sorted(later.items())),
  )
  assert read_changes(write_changes(tmp_path, changes)) == changes


def test_the_example_of_the_messages_works(tmp_path):
  text = EXAMPLE.removeprefix("a file that works:\n")
  expected = (Change(0, 32, "the first batch"), Change(6400, 64, "an optional reason"))
  assert read_changes(written(tmp_path, text)) == expected


def test_reasons_may_be_left_out(tmp_path):
  text = "batch_schedule:\n- [0, 32]\n- [5, 16]\n"
  assert read_changes(written(tmp_path, text)) == (Change(0, 32), Change(5, 16))


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  file = write_changes(tmp_path, CHANGES)

  def full_disk(source: object, target: object) -> None:
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full_disk)
  with pytest.raises(OSError, match="No space"):
    write_changes(tmp_path, CHANGES[:1])
  assert read_changes(file) == CHANGES
  assert list(tmp_path.iterdir()) == [file]


def test_others_may_read_it_as_they_may_other_files(tmp_path):
  usual = written(tmp_path, "")
  file = write_changes(tmp_path, CHANGES)
  assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_a_restored_run_forgets_what_came_after_its_checkpoint():
  assert changes_until(CHANGES, 6399) == CHANGES[:1]
  assert changes_until(CHANGES, 6400) == CHANGES
  again = Change(6400, 128, "decided anew")
  assert with_change(CHANGES, again) == (CHANGES[0], again)
  assert with_change(CHANGES, Change(9000, 128)) == (*CHANGES, Change(9000, 128))
  assert with_change((), CHANGES[0]) == CHANGES[:1]


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "the file must have one key, batch_schedule"),
    ("# only a comment\n", "the file must have one key, batch_schedule"),
    ("[[0, 32]]", "the file must have one key, batch_schedule"),
    ("batch_size: 3", "the file must have one key, batch_schedule"),
    (
      "batch_schedule: [[0, 1]]\nbatch_schedule: [[0, 2]]",
      "the file must have one key, batch_schedule, and has 2",
    ),
    (
      "batch_schedule: [[0, 1]]\nsteps: 3",
      "the file must have one key, batch_schedule, and has 2",
    ),
    ("batch_schedule: 3", "batch_schedule must be a list of entries"),
    ("batch_schedule:", "batch_schedule must be a list of entries"),
    ("batch_schedule: []", "batch_schedule is empty and must have at least one entry"),
    (
      "batch_schedule: [[0, 8], 5]",
      "entry 2, 5, must be [samples, batch] or [samples, batch, reason]",
    ),
    (
      "batch_schedule: [[0]]",
      "entry 1, [0], must be [samples, batch] or [samples, batch, reason]",
    ),
    (
      "batch_schedule: [[0, 8, a, b]]",
      "entry 1, [0, 8, 'a', 'b'], must be [samples, batch] or [samples, batch, reason]",
    ),
    ("batch_schedule: [[100, 8]]", "entry 1 begins at 100 samples and must begin at 0"),
    (
      "batch_schedule: [[0, 8], [-5, 16]]",
      "entry 2, [-5, 16], must begin with a whole number of samples, 0 or more",
    ),
    (
      "batch_schedule: [[0, 8], [1.5, 16]]",
      "entry 2, [1.5, 16], must begin with a whole number of samples, 0 or more",
    ),
    (
      "batch_schedule: [[false, 8]]",
      "entry 1, [False, 8], must begin with a whole number of samples, 0 or more",
    ),
    (
      "batch_schedule: [[0, 0]]",
      "entry 1, [0, 0], must have a whole number of samples as its batch, 1 or more",
    ),
    (
      "batch_schedule: [[0, '8']]",
      "entry 1, [0, '8'], must have a whole number of samples as its batch, 1 or more",
    ),
    (
      "batch_schedule: [[0, true]]",
      "entry 1, [0, True], must have a whole number of samples as its batch, 1 or more",
    ),
    (
      "batch_schedule: [[0, 8, 12]]",
      "entry 1, [0, 8, 12], must have a string as its reason; put it in quotes",
    ),
    (
      "batch_schedule: [[0, 8], [50, 16], [50, 32]]",
      "entry 3, [50, 32], must begin after the 50 samples of the entry before it",
    ),
    (
      "batch_schedule: [[0, 8], [50, 16], [40, 32]]",
      "entry 3, [40, 32], must begin after the 50 samples of the entry before it",
    ),
    (
      "batch_schedule: [[0, 8]",
      "not valid YAML: a list is opened with [ and not closed; write [1, 2, 3]",
    ),
    ("batch_schedule: [[2026-99-99, 8]]", "not valid YAML: month must be in 1..12"),
  ],
)
def test_a_wrong_file_is_explained(tmp_path, text, said):
  assert message(tmp_path, text) == said


@pytest.mark.parametrize(
  "text", ["[" * 1000, "batch_schedule: " + "9" * 5000, "a: &a [*a]", "{[]: 1}"]
)
def test_no_text_is_a_traceback(tmp_path, text):
  assert message(tmp_path, text)


def test_long_entries_are_shortened(tmp_path):
  assert "entry 1, [0, 8, 'aaa" in message(tmp_path, f"batch_schedule: [[0, 8, {'a' * 500}, b]]")
  assert len(message(tmp_path, f"batch_schedule: [[0, 8, {'a' * 500}, b]]")) < 150


def test_bytes_that_are_no_text(tmp_path):
  file = tmp_path / "mine.yml"
  file.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(UserError, match="not valid YAML: 'utf-8' codec"):
    read_changes(file)


def test_a_file_that_is_not_there(tmp_path):
  missing = tmp_path / "none.yml"
  with pytest.raises(UserError, match=f"{re.escape(str(missing))}: cannot be read: No such file"):
    read_changes(missing)
