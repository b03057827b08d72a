"""Which files a path means, how they are divided, and what is refused, in which words."""

import dataclasses
import gzip
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import base

from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.file_datasets import split
from maxbatch.data.formats import text
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Dataset
from maxbatch.data.sources import STDLIB_BYTES, Document, part_of, rank, resolve
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.errors import UserError


def write(folder: Path, files: dict[str, bytes]) -> None:
  for name, data in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def build(path: Path | str, cache: Path, length: int = 4, **changes) -> Dataset:
  keys = {
    "dataset_path": str(path),
    "eval_fraction": 0.25,
    "dataset_cache_directory": str(cache),
  }
  return build_dataset(dataclasses.replace(base().data, **(keys | changes)), length)


def refusal(*args, **changes) -> str:
  with pytest.raises(UserError) as caught:
    build(*args, **changes)
  return str(caught.value)


def text_of(rows) -> str:
  assert isinstance(rows, TokenWindows)
  return ByteTokenizer().decode(rows.cache.read(0, rows.cache.num_tokens))


def names(path: Path | str) -> list[str]:
  return [file.name for file in resolve("dataset_path", str(path)).files]


def test_a_folder_is_read_recursively_and_says_what_it_passes_over(tmp_path):
  write(
    tmp_path / "in",
    {
      "b.txt": b"bb",
      "sub/a.md": b"aa",
      "LICENSE": b"free",
      "sub/c.txt.gz": gzip.compress(b"cc"),
      "picture.png": b"\x89PNG",
      ".hidden.txt": b"no",
      ".git/config": b"no",
      "empty.txt": b"",
    },
  )
  sources = resolve("dataset_path", str(tmp_path / "in"))
  results = [file.name for file in sources.files]
  assert results == ["LICENSE", "b.txt", "empty.txt", "sub/a.md", "sub/c.txt.gz"]
  assert dict(sources.skipped) == {".png": 1, "hidden": 1}
  dataset = build(tmp_path / "in", tmp_path / "cache")
  assert "files skipped: 1 .png, 1 empty, 1 hidden" in dataset.description
  both = text_of(dataset.train) + text_of(dataset.validation)
  assert sorted(both) == sorted("bbaafreecc")


def test_a_linked_folder_is_not_entered_and_said(tmp_path):
  write(tmp_path, {"in/a.txt": b"some text", "other/b.txt": b"more"})
  (tmp_path / "in" / "linked").symlink_to(tmp_path / "other")
  assert names(tmp_path / "in") == ["a.txt"]
  expected = "files skipped: 1 symbolic link to a folder (name its files with a glob)"
  assert expected in build(tmp_path / "in", tmp_path / "cache").description
  assert names(tmp_path / "in/linked/*.txt") == ["b.txt"]


def test_random_tokens_read_no_path(tmp_path):
  random = build("my.txt", tmp_path, dataset_type="synthetic")
  assert random.description == "random tokens, seed 0"


def test_a_pipe_among_files_is_refused(tmp_path):
  write(tmp_path / "in", {"a.txt": b"some text"})
  os.mkfifo(tmp_path / "in" / "b.txt")
  for path in ("in", "in/*"):
    assert f"{tmp_path}/in/b.txt is not a regular file" in refusal(tmp_path / path, tmp_path)


def test_a_glob_reads_exactly_what_it_matches(tmp_path):
  write(tmp_path, {"x/a.txt": b"1", "x/y/b.txt": b"2", "x/y/c.rst": b"3", "z.txt": b"4"})
  assert names(tmp_path / "x/**/*.txt") == ["a.txt", "y/b.txt"]
  assert names(tmp_path / "x/y/*") == ["b.txt", "c.rst"]


def test_an_existing_name_with_glob_characters_is_a_file(tmp_path):
  write(tmp_path, {"part[1].txt": b"one"})
  assert names(tmp_path / "part[1].txt") == ["part[1].txt"]


def test_gzip_and_plain_files_hold_the_same_tokens(tmp_path):
  write(tmp_path, {"a.txt": b"hello world", "b.txt.gz": gzip.compress(b"hello world")})
  plain = build(tmp_path / "a.txt", tmp_path / "cache")
  packed = build(tmp_path / "b.txt.gz", tmp_path / "cache")
  assert plain.fingerprint == packed.fingerprint
  assert text_of(plain.train) + text_of(plain.validation) == "hello world"


def test_one_file_is_divided_by_position(tmp_path):
  write(tmp_path, {"a.txt": bytes(range(1, 101))})
  dataset = build(tmp_path / "a.txt", tmp_path / "cache", eval_fraction=0.2)
  assert text_of(dataset.train) == bytes(range(1, 81)).decode()
  assert text_of(dataset.validation) == bytes(range(81, 101)).decode()


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.9])
def test_both_sides_of_one_file_get_something(fraction):
  file = resolve("dataset_path", __file__).files
  (train,), (kept,), _ = split(resolve("dataset_path", __file__), fraction)
  size = file[0].size_bytes
  first, second = part_of(train, size), part_of(kept, size)
  assert first[0] == 0
  assert 0 < first[1] == second[0] < second[1] == size


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
def test_files_are_divided_by_name_alone(tmp_path, fraction):
  for copy in ("one", "two"):
    write(tmp_path / copy, {f"{i}.txt": bytes([65 + i % 26]) * (i + 1) for i in range(40)})
  sides = []
  for copy in ("one", "two"):
    train, kept, _ = split(resolve("dataset_path", str(tmp_path / copy)), fraction)
    sides.append(([doc.file.name for doc in train], [doc.file.name for doc in kept]))
  assert sides[0] == sides[1]
  train, kept = sides[0]
  assert train
  assert kept
  assert not set(train) & set(kept)
  assert len(train) + len(kept) == 40
  assert abs(len(kept) - 40 * fraction) <= 8


def names_of(documents: Sequence[Document]) -> list[str]:
  return [document.file.name for document in documents]


@pytest.mark.parametrize("kept", ["valid", "validation", "val", "eval", "dev", "test", "VALID"])
@pytest.mark.parametrize("folders", [False, True])
def test_names_mean_what_they_say(tmp_path, kept, folders):
  between = "/text" if folders else ""
  write(tmp_path / "in", {f"train{between}.txt": b"learn", f"{kept}{between}.txt": b"check"})
  dataset = build(tmp_path / "in", tmp_path / "cache")
  assert (text_of(dataset.train), text_of(dataset.validation)) == ("learn", "check")
  assert f"training: train{between}.txt\nvalidation: {kept}{between}.txt" in dataset.description


def test_beside_validation_files_test_files_are_on_neither_side(tmp_path):
  files = {"wiki.train.tokens": b"1", "wiki.valid.tokens": b"2", "wiki.test.tokens": b"3"}
  write(tmp_path / "in", {**files, "notes.txt": b"4"})
  train, kept, left_out = split(resolve("dataset_path", str(tmp_path / "in/*")), 0.05)
  assert (names_of(train), names_of(kept)) == (
    ["notes.txt", "wiki.train.tokens"],
    ["wiki.valid.tokens"],
  )
  assert names_of(left_out) == ["wiki.test.tokens"]
  dataset = build(tmp_path / "in/*", tmp_path / "cache", length=2, eval_fraction=0.0)
  assert dataset.validation is None
  assert "neither side, by name: wiki.test.tokens, wiki.valid.tokens" in dataset.description


def test_numbered_parts_keep_their_names(tmp_path):
  parts = {f"{side}-{n}-of-2.txt": b"text" for side in ("train", "val") for n in range(2)}
  write(tmp_path, parts)
  train, kept, _ = split(resolve("dataset_path", str(tmp_path)), 0.5)
  assert names_of(train) == ["train-0-of-2.txt", "train-1-of-2.txt"]
  assert names_of(kept) == ["val-0-of-2.txt", "val-1-of-2.txt"]


@pytest.mark.parametrize("only", ["train", "valid"])
def test_names_that_leave_a_side_empty_say_nothing(tmp_path, only):
  write(tmp_path, {f"{only}.{n}.txt": b"0123456789" for n in range(2)})
  train, kept, left_out = split(resolve("dataset_path", str(tmp_path)), 0.1)
  assert len(train) == len(kept) == 2
  assert not left_out


def test_code_with_tests_is_not_divided_by_a_part_of_a_name(tmp_path):
  write(tmp_path, {f"{name}.go": b"package" * 9 for name in ("a", "a_test", "test_b", "train")})
  assert not split(resolve("dataset_path", str(tmp_path)), 0.5).left_out
  assert len(split(resolve("dataset_path", str(tmp_path)), 0.0).train) == 4


def test_what_is_held_out_is_a_share_of_bytes(tmp_path):
  write(tmp_path / "in", {"corpus.txt": b"0123456789" * 1000, "README.md": b"read me"})
  dataset = build(tmp_path / "in", tmp_path / "cache", eval_fraction=0.05)
  assert text_of(dataset.train).count("9") == 950
  assert text_of(dataset.validation) == "0123456789" * 50
  assert "validation: corpus.txt (its last 5%)" in dataset.description
  for sizes in ([1] * 60, [1, 1000], [500, 500, 500], range(1, 200), [10, 1000, 1, 1, 4000]):
    place = tmp_path / f"{len(sizes)}-{sum(sizes)}"
    write(place, {f"{n}.txt": b"x" * 100 * size for n, size in enumerate(sizes)})
    for fraction in (0.05, 0.3):
      kept = split(resolve("dataset_path", str(place)), fraction).validation
      held_out = sum((each.end - each.begin) * each.file.size_bytes for each in kept)
      assert abs(held_out / sum(sizes) / 100 - fraction) < 0.1


def test_the_standard_library_is_divided_by_name_as_ever():
  sources = resolve("dataset_path", "stdlib")
  wanted = {file.name for file in sources.files if rank(file.name, "split") < 0.05}
  train, kept, left_out = split(sources, 0.05)
  assert {file.name for file in sources.files} - wanted == set(names_of(train))
  assert set(names_of(kept)) == wanted
  assert all((each.begin, each.end) == (0, 1) for each in (*train, *kept))
  assert not left_out


def test_a_file_for_validation_is_not_trained_on(tmp_path):
  write(tmp_path / "in", {"a.txt": b"for training", "b.txt": b"for validation"})
  (tmp_path / "link.txt").symlink_to(tmp_path / "in" / "b.txt")
  other = str(tmp_path / "link.txt")
  dataset = build(tmp_path / "in", tmp_path / "cache", eval_dataset_path=other)
  assert text_of(dataset.train) == "for training"
  assert text_of(dataset.validation) == "for validation"
  assert "on neither side" not in dataset.description


@pytest.mark.parametrize("name", ["a.txt", "same.txt"])
def test_validation_text_that_equals_the_training_text_is_refused(tmp_path, name):
  write(tmp_path, {"a.txt": b"for training", "same.txt": b"for training"})
  message = refusal(tmp_path / "a.txt", tmp_path, eval_dataset_path=str(tmp_path / name))
  assert f"eval_dataset_path={tmp_path / name}" in message
  assert "leave" in message


def test_another_file_moves_none_of_the_others(tmp_path):
  write(tmp_path, {f"{i}.txt": b"text" for i in range(40)})
  before = {doc.file.name for doc in split(resolve("dataset_path", str(tmp_path)), 0.3)[1]}
  write(tmp_path, {f"more{i}.txt": b"text" for i in range(10)})
  after = {doc.file.name for doc in split(resolve("dataset_path", str(tmp_path)), 0.3)[1]}
  assert before == {name for name in after if not name.startswith("more")}


def test_eval_fraction_zero_keeps_nothing_back(tmp_path):
  write(tmp_path, {"a.txt": b"all of it"})
  dataset = build(tmp_path / "a.txt", tmp_path / "cache", eval_fraction=0.0)
  assert dataset.validation is None
  assert text_of(dataset.train) == "all of it"


def test_eval_dataset_path_replaces_the_split(tmp_path):
  write(tmp_path, {"a.txt": b"for training", "b.txt": b"for validation"})
  other = str(tmp_path / "b.txt")
  dataset = build(tmp_path / "a.txt", tmp_path / "cache", eval_dataset_path=other)
  assert text_of(dataset.train) == "for training"
  assert text_of(dataset.validation) == "for validation"


def test_stdlib_is_deterministic_small_and_without_tests():
  sources = resolve("dataset_path", "stdlib")
  assert sources == resolve("dataset_path", "stdlib")
  total = sum(file.size_bytes for file in sources.files)
  assert 0.9 * STDLIB_BYTES < total < 1.2 * STDLIB_BYTES
  for file in sources.files:
    assert not {"site-packages", "test", "lib2to3", "__pycache__"} & set(file.name.split("/"))
    assert file.name.endswith((".py", ".txt"))
  train, kept, _ = split(sources, 0.05)
  assert not {doc.file.name for doc in train} & {doc.file.name for doc in kept}
  assert len(train) + len(kept) == len(sources.files)
  assert 0.01 < len(kept) / len(sources.files) < 0.12


def test_stdlib_only_counts_a_file_that_is_not_utf8(tmp_path, monkeypatch):
  write(tmp_path / "lib", {"a.py": b"x = 1\n" * 9, "b.py": b"y = 2\n" * 9, "bad.py": b"\xff\xfe"})
  monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
  dataset = build("stdlib", tmp_path / "cache", eval_fraction=0.0)
  assert "files skipped: 1 not UTF-8" in dataset.description
  assert text_of(dataset.train) == "x = 1\n" * 9 + "y = 2\n" * 9


def test_missing_path(tmp_path):
  message = refusal(tmp_path / "nothing.txt", tmp_path)
  assert message.startswith(f"dataset_path={tmp_path}/nothing.txt: no such file or folder; use")
  assert "stdlib" in message
  assert refusal("", tmp_path).startswith("dataset_path is empty: give a file, a folder")


def test_missing_eval_path_names_its_own_key(tmp_path):
  write(tmp_path, {"a.txt": b"for training"})
  message = refusal(tmp_path / "a.txt", tmp_path, eval_dataset_path=str(tmp_path / "b.txt"))
  assert message.startswith(f"eval_dataset_path={tmp_path}/b.txt: no such file or folder")


def test_glob_without_match(tmp_path):
  assert "the glob matches no file" in refusal(tmp_path / "*.txt", tmp_path)


def test_folder_without_text(tmp_path):
  write(tmp_path / "in", {"a.png": b"\x89PNG\0", "b.parquet": b"PAR1\0\xff"})
  message = refusal(tmp_path / "in", tmp_path)
  assert message.endswith(
    "the folder holds no text files (1 .png, 1 .parquet); what is read is text in UTF-8, for "
    "example dataset_path=stdlib"
  )
  (tmp_path / "bare").mkdir()
  assert "(no files at all)" in refusal(tmp_path / "bare", tmp_path)


@pytest.mark.parametrize("name", ["deep/a.text2", ".hidden"])
def test_the_offer_for_a_folder_of_other_names_works(tmp_path, name):
  write(tmp_path / "in", {name: b"words that are long enough for a few rows", "b.bin": b"\0"})
  message = refusal(tmp_path / "in", tmp_path)
  offered = message.rpartition("for example dataset_path='")[2].rstrip("'")
  assert names(offered) == [Path(name).name]
  build(offered, tmp_path)


def test_the_offer_for_a_folder_of_links_works(tmp_path):
  write(tmp_path / "other", {"a.txt": b"words that are long enough for a few rows"})
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "linked").symlink_to(tmp_path / "other")
  message = refusal(tmp_path / "in", tmp_path)
  build(message.rpartition("for example dataset_path=")[2], tmp_path)


def test_records_that_are_read_as_they_stand_are_said(tmp_path):
  write(tmp_path / "in", {"a.jsonl": b'{"text": "hello"}\n' * 20, "b.txt": b"words " * 60})
  assert (
    "as it is, keys and quotes included: a.jsonl" in build(tmp_path / "in", tmp_path).description
  )


def test_not_a_regular_file(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  assert f"{tmp_path}/pipe is not a regular file" in refusal(tmp_path / "pipe", tmp_path)


def test_dangling_link(tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "gone")
  message = refusal(tmp_path / "in", tmp_path)
  assert message == f"dataset_path: cannot read {tmp_path}/in/link.txt: No such file or directory"


def test_file_without_permission(tmp_path, monkeypatch):
  write(tmp_path, {"a.txt": b"secret"})

  def deny(path, *_):
    raise PermissionError(13, "Permission denied", path)

  # Tests may run as root, who may read everything.
  monkeypatch.setattr(text, "open", deny, raising=False)
  message = refusal(tmp_path / "a.txt", tmp_path / "cache")
  assert message == f"dataset_path: cannot read {tmp_path}/a.txt: Permission denied"


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: b"not gzip" + data])
def test_damaged_gzip(tmp_path, damage):
  write(tmp_path, {"a.txt.gz": damage(gzip.compress(b"text " * 1000))})
  message = refusal(tmp_path / "a.txt.gz", tmp_path / "cache")
  assert f"{tmp_path}/a.txt.gz is not a whole gzip file" in message


@pytest.mark.parametrize(
  ("data", "what"),
  [
    (b"abc\xffdef", "byte 0xff, not UTF-8, at offset 3"),
    (b"abc\0def", "a NUL byte at offset 3"),
    ("caf\u00e9".encode()[:-1], "byte 0xc3, not UTF-8, at offset 3"),
    (b"ab\xc3\0", "byte 0xc3, not UTF-8, at offset 2"),
  ],
)
@pytest.mark.parametrize("where", ["in/a.txt", "in", "in/*.txt"])
def test_not_text(tmp_path, data, what, where):
  write(tmp_path, {"in/a.txt": data})
  message = refusal(tmp_path / where, tmp_path / "cache")
  assert message.startswith(f"dataset_path: {tmp_path}/in/a.txt is not text: {what}")
  assert "glob" in message


@pytest.mark.parametrize("shift", range(12))
def test_bad_byte_is_counted_from_the_file_s_begin_in_later_chunks(tmp_path, shift):
  # Longer than a chunk, which ends in or after each byte of a character.
  good = b"." * shift + "abc\u00e9\u20ac\U0001f600".encode() * (text._CHUNK_BYTES // 10)
  write(tmp_path, {"good.txt": good, "bad.txt": good + b"x\xe2\x82" + good})
  file = resolve("dataset_path", str(tmp_path / "good.txt")).files[0]
  assert text.checked_range("dataset_path", Document(file)) == (0, len(good))
  message = refusal(tmp_path / "bad.txt", tmp_path / "cache")
  assert f"at offset {len(good) + 1};" in message


def test_document_pieces_join_whatever_the_chunks(tmp_path):
  content = b"0123456789" * (text._CHUNK_BYTES // 3)
  write(tmp_path, {"a.txt": content})
  file = resolve("dataset_path", str(tmp_path / "a.txt")).files[0]
  halves = [Document(file, end=0.5), Document(file, begin=0.5)]
  ranges = [text.checked_range("dataset_path", half) for half in halves]
  texts = [
    b"".join(text.text_chunks("dataset_path", half, *range_))
    for half, range_ in zip(halves, ranges, strict=True)
  ]
  assert texts == [content[: len(content) // 2], content[len(content) // 2 :]]


def test_empty_file(tmp_path):
  write(tmp_path, {"a.txt": b""})
  message = refusal(tmp_path / "a.txt", tmp_path / "cache")
  assert message.startswith(f"dataset_path={tmp_path}/a.txt is empty: a run needs text")


def test_empty_validation_file(tmp_path):
  write(tmp_path, {"a.txt": b"for training", "b.txt": b""})
  other = str(tmp_path / "b.txt")
  message = refusal(tmp_path / "a.txt", tmp_path / "cache", eval_dataset_path=other)
  assert message.startswith(f"eval_dataset_path={tmp_path}/b.txt: the text for validation is empty")


def test_too_short_for_one_row_names_a_length_that_works(tmp_path):
  write(tmp_path, {"a.txt": b"0123456789"})
  message = refusal(tmp_path / "a.txt", tmp_path / "cache", length=64, eval_fraction=0.0)
  assert "12 tokens for training, and one row needs max_target_length + 1 = 65" in message
  assert "set max_target_length=11" in message
  dataset = build(tmp_path / "a.txt", tmp_path / "cache", length=11, eval_fraction=0.0)
  assert len(dataset.train) == 1
