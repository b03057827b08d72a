"""The cache is built once, rebuilt when it must be, and safe to build twice at once."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from processes import PATIENCE_SECONDS
from support import config

from maxbatch.data import registry, token_cache, token_shard
from maxbatch.data.formats import text as text_format
from maxbatch.data.sources import Document, resolve
from maxbatch.data.token_cache import TokenCache, open_or_build
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import ByteTokenizer, Ids, Tokenizer
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import compiled_programs, remembered_choices, token_caches

BYTES = ByteTokenizer()
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id
decode = BYTES.decode


@pytest.fixture
def corpus(tmp_path) -> Path:
  folder = tmp_path / "corpus"
  folder.mkdir()
  (folder / "a.txt").write_text("first")
  (folder / "b.txt").write_text("second one")
  return folder


def cached(corpus: Path, folder: Path, tokenizer: Tokenizer = BYTES) -> TokenCache:
  sources = resolve("dataset_path", str(corpus))
  documents = [Document(file) for file in sources.files]
  return open_or_build(documents, folder, "train", Recipe(sources, tokenizer))


def tokens(cache: TokenCache) -> np.ndarray:
  return cache.read(0, cache.num_tokens)


def path_of(cache: TokenCache) -> Path:
  (shard,) = cache.shards
  return Path(shard.path)


def forbid_writing(monkeypatch) -> None:
  def fail(*_):
    raise AssertionError("the cache was built again")

  monkeypatch.setattr(token_shard, "tokenize", fail)


def test_tokenizer_round_trip_and_special_tokens():
  text = "na\u00efve \u20ac"
  ids = BYTES.encode(text.encode())
  assert ids.dtype == np.uint16
  assert decode([BOS, *ids, EOS, PAD, PAD]) == text
  assert decode(ids[:3]) == "na\ufffd"
  assert (BOS, EOS, PAD, BYTES.vocab_size) == (256, 257, 258, 259)


def test_documents_are_wrapped_and_in_order(corpus, tmp_path):
  cache = cached(corpus, tmp_path / "cache")
  expected = [BOS, *b"first", EOS, BOS, *b"second one", EOS]
  assert tokens(cache).tolist() == expected
  assert (cache.num_tokens, cache.num_documents) == (len(expected), 2)


def test_built_once(corpus, tmp_path, monkeypatch):
  first = cached(corpus, tmp_path / "cache")
  forbid_writing(monkeypatch)
  assert cached(corpus, tmp_path / "cache") == first
  assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [
    ".documents",
    ".json",
    ".tokens",
  ]


def test_rebuilt_when_a_source_changes(corpus, tmp_path):
  first = cached(corpus, tmp_path / "cache")
  (corpus / "a.txt").write_text("FIRST")
  status = (corpus / "a.txt").stat()
  os.utime(corpus / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
  second = cached(corpus, tmp_path / "cache")
  assert second.fingerprint != first.fingerprint
  assert decode(tokens(second)).startswith("FIRST")
  assert decode(tokens(first)).startswith("first"), "an open cache must not change"
  (corpus / "c.txt").write_text("third")
  assert cached(corpus, tmp_path / "cache").num_documents == 3


def test_the_fingerprint_knows_the_text_and_not_the_machine(corpus, tmp_path):
  first = cached(corpus, tmp_path / "cache")
  corpus.rename(tmp_path / "elsewhere")
  os.utime(tmp_path / "elsewhere" / "a.txt", ns=(5, 5))
  moved = cached(tmp_path / "elsewhere", tmp_path / "other")
  assert moved.fingerprint == first.fingerprint
  assert path_of(moved) != path_of(first)


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "metadata", "no metadata", "key"])
def test_a_damaged_cache_is_built_again_and_says_so(corpus, tmp_path, damage, caplog):
  first = cached(corpus, tmp_path / "cache")
  good = tokens(first).tolist()
  path, metadata = path_of(first), path_of(first).with_suffix(".json")
  data = path.read_bytes()
  if damage == "no metadata":
    metadata.unlink()
  elif damage in ("metadata", "key"):
    metadata.write_text("{" if damage == "metadata" else json.dumps({"num_tokens": 3}))
  else:
    changed = {"cut": data[:-2], "longer": data + b"xx", "flipped": b"\x07" + data[1:]}
    path.write_bytes(changed[damage])
  again = cached(corpus, tmp_path / "cache")
  assert again == first
  assert tokens(again).tolist() == good
  # Without its metadata it is unfinished: another process may be making it.
  said = f"The token cache {path} is damaged: " in caplog.text
  assert said == (damage != "no metadata")
  caplog.clear()
  cached(corpus, tmp_path / "cache")
  assert caplog.text == ""


def test_of_a_large_cache_no_contents_are_read_when_it_is_opened(corpus, tmp_path, monkeypatch):
  """However many shards it has: their lengths alone are compared."""
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 1)
  first = cached(corpus, tmp_path / "cache")
  assert len(first.shards) > 1
  monkeypatch.setattr(token_cache, "FULL_CHECK_BYTES", 20)
  by_shards = cached(corpus, tmp_path / "cache").fingerprint
  monkeypatch.setattr(token_shard.hashlib, "file_digest", None)
  assert cached(corpus, tmp_path / "cache").fingerprint == by_shards != first.fingerprint


def test_what_has_just_been_made_is_not_read_again(corpus, tmp_path, monkeypatch):
  """Neither here nor in the processes that tokenize, each of which comes by all shards."""
  monkeypatch.setattr(token_cache, "SHARD_BYTES", 1)
  read, digest = [], token_shard.hashlib.file_digest

  def noted(file, new):
    read.append(Path(file.name).suffix)
    return digest(file, new)

  monkeypatch.setattr(token_shard.hashlib, "file_digest", noted)
  assert len(cached(corpus, tmp_path / "cache").shards) > 1
  assert ".tokens" not in read


@pytest.mark.parametrize(
  "content",
  [
    '{"num_tokens": Infinity}',
    '{"num_tokens": true}',
    '{"num_tokens": null}',
    '{"skipped": []}',
    '{"skipped": {"empty": "1e9"}}',
    '{"dtype": 3}',
    '{"dtype": "no type"}',
    '{"fingerprint": {}}',
    "[]",
    "null",
    "[" * 100_000,
    "\udcff",
  ],
)
def test_metadata_of_other_types_is_damaged(corpus, tmp_path, content, caplog):
  first = cached(corpus, tmp_path / "cache")
  path = path_of(first).with_suffix(".json")
  if content.startswith("{"):
    content = json.dumps(json.loads(path.read_text()) | json.loads(content))
  path.write_bytes(content.encode(errors="surrogateescape"))
  assert cached(corpus, tmp_path / "cache") == first
  assert f"The token cache {path_of(first)} is damaged: " in caplog.text


@pytest.mark.parametrize("suffix", [".json", ".tokens"])
def test_a_pipe_or_a_folder_in_place_of_a_cache(corpus, tmp_path, suffix):
  first = cached(corpus, tmp_path / "cache")
  path = path_of(first).with_suffix(suffix)
  path.unlink()
  os.mkfifo(path)
  assert cached(corpus, tmp_path / "cache") == first
  path.unlink()
  path.mkdir()
  with pytest.raises(UserError, match="cannot write the token cache"):
    cached(corpus, tmp_path / "cache")


@pytest.mark.parametrize("shards", [1, 5])
def test_of_two_processes_at_once_one_builds_each_shard(corpus, tmp_path, monkeypatch, shards):
  """The other makes another one, waits for those that it has not made, and finds them."""
  (corpus / "big.txt").write_text("some text to keep the builder busy\n" * 10_000)
  size = (corpus / "big.txt").stat().st_size * 2 // (shards + 1) if shards > 1 else 2**20
  program = f"""
import sys, time
from pathlib import Path
from maxbatch.data import token_cache, token_shard, workers
from maxbatch.data.sources import Document, resolve
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import ByteTokenizer
sources = resolve("dataset_path", {str(corpus)!r})
place = Path({str(tmp_path)!r})
inner, make = token_shard.tokenize, token_cache.make_shards
def ready(*arguments):
  # Both are past looking for a finished cache before either may go on.
  (place / ("ready-" + sys.argv[1])).touch()
  while len(list(place.glob("ready-*"))) < 2:
    time.sleep(0.01)
  return make(*arguments)
def tokenize(*arguments):
  (place / ("built-" + sys.argv[1] + "-" + str(hash(arguments[1])))).touch()
  time.sleep(0.5 / {shards})
  return inner(*arguments)
token_cache.make_shards, token_shard.tokenize = ready, tokenize
token_cache.SHARD_BYTES = {size}
workers.os.cpu_count = lambda: 1
documents = [Document(file) for file in sources.files]
recipe = Recipe(sources, ByteTokenizer())
print(token_cache.open_or_build(documents, place / "cache", "train", recipe))
"""
  runs = [
    subprocess.Popen([sys.executable, "-c", program, number], stdout=-1, stderr=-1, text=True)
    for number in "12"
  ]
  outputs = [run.communicate(timeout=PATIENCE_SECONDS) for run in runs]
  assert [run.returncode for run in runs] == [0, 0], outputs
  last = [output.splitlines()[-1] for output, _ in outputs]
  assert last[0] == last[1]
  monkeypatch.setattr(token_cache, "SHARD_BYTES", size)
  forbid_writing(monkeypatch)
  cache = cached(corpus, tmp_path / "cache")
  assert repr(cache) == last[0]
  assert (len(cache.shards) > 1) == (shards > 1)
  assert len(list(tmp_path.glob("built-*"))) == len(cache.shards)
  assert decode(tokens(cache)).endswith("busy\n")
  assert len(list((tmp_path / "cache").iterdir())) == 3 * len(cache.shards)


def test_disk_full_names_path_and_need_and_leaves_nothing(corpus, tmp_path, monkeypatch):
  def full(_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr("os.fsync", full)
  with pytest.raises(UserError) as caught:
    cached(corpus, tmp_path / "cache")
  message = str(caught.value)
  assert message.startswith(
    f"dataset_cache_directory={tmp_path}/cache: cannot write the token cache"
  )
  assert "No space left on device; it needs about 38 bytes, " in message
  assert list((tmp_path / "cache").iterdir()) == []


def test_a_refused_document_leaves_nothing(corpus, tmp_path):
  (corpus / "b.txt").write_bytes(b"\xff")
  with pytest.raises(UserError, match="not text"):
    cached(corpus, tmp_path / "cache")
  assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_grows_while_it_is_read_is_refused(corpus, tmp_path, monkeypatch):
  inner = text_format.checked_range

  def grow(key, document):
    result = inner(key, document)
    with open(document.file.path, "a") as stream:
      stream.write("more")
    return result

  monkeypatch.setattr(text_format, "checked_range", grow)
  with pytest.raises(UserError, match=r"a\.txt changed from 5 to 9 bytes while it was read"):
    cached(corpus, tmp_path / "cache")


def test_a_folder_that_cannot_be_made(corpus, tmp_path):
  (tmp_path / "file").write_text("in the way")
  with pytest.raises(UserError, match=r"dataset_cache_directory=.*cannot write the token cache"):
    cached(corpus, tmp_path / "file" / "cache")


def test_the_default_folder_is_the_user_s_cache(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert token_caches("") == tmp_path / "maxbatch" / "tokens"
  assert compiled_programs("") == tmp_path / "maxbatch" / "compiled"
  assert remembered_choices() == tmp_path / "maxbatch" / "microbatch"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert token_caches("") == tmp_path / ".cache" / "maxbatch" / "tokens"
  assert token_caches("~/here") == compiled_programs("~/here") == tmp_path / "here"


def test_a_pickled_cache_leaves_the_tokens_on_disk(corpus, tmp_path):
  (corpus / "big.txt").write_text("x" * 100_000)
  cache = cached(corpus, tmp_path / "cache")
  assert tokens(cache).size > 100_000
  pickled = cloudpickle.dumps(cache)
  assert len(pickled) < 2000
  np.testing.assert_array_equal(tokens(cloudpickle.loads(pickled)), tokens(cache))


def test_a_cache_deleted_or_cut_behind_our_back_is_an_error(corpus, tmp_path):
  cache = cached(corpus, tmp_path / "cache")
  path_of(cache).write_bytes(b"1234")
  with pytest.raises(OSError, match="holds 2 tokens instead of"):
    _ = tokens(cache)
  path_of(cache).unlink()
  with pytest.raises(FileNotFoundError):
    _ = tokens(cache)


def test_progress_is_shown_on_a_terminal_only(corpus, tmp_path, monkeypatch, capsys):
  cached(corpus, tmp_path / "one")
  assert capsys.readouterr().err == ""
  monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
  cached(corpus, tmp_path / "two")
  assert "tokenizing train" in capsys.readouterr().err


class Words:
  """A word is a token; as many words as `vocab_size` allows, told apart by their length alone."""

  bos_id, eos_id, pad_id = 0, 1, 2

  def __init__(self, vocab_size: int, version: str = "1"):
    self.vocab_size, self.version = vocab_size, version

  def encode(self, text: bytes) -> np.ndarray:
    return np.array([self.vocab_size - len(word) for word in text.decode().split()], np.int64)

  def decode(self, ids: Ids) -> str:
    return " ".join("x" * (self.vocab_size - int(id_)) for id_ in ids if id_ > 2)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(corpus, tmp_path, vocab_size, dtype):
  cache = cached(corpus, tmp_path / "cache", Words(vocab_size))
  assert tokens(cache).dtype == dtype
  assert tokens(cache).tolist() == [
    *[0, vocab_size - 5, 1],
    *[0, vocab_size - 6, vocab_size - 3, 1],
  ]
  assert cached(corpus, tmp_path / "cache", Words(vocab_size)) == cache


def test_each_tokenizer_and_version_has_a_cache_of_its_own(corpus, tmp_path):
  tokenizers = [BYTES, Words(100), Words(101), Words(100, version="2")]
  paths = {path_of(cached(corpus, tmp_path / "cache", tokenizer)) for tokenizer in tokenizers}
  assert len(paths) == 4


def test_no_line_and_no_character_is_divided(corpus, tmp_path):
  chunk = text_format._CHUNK_BYTES
  first = "a" * (chunk - 3) + "\n"
  text = first + "cdefgh\n" + "\u20ac" * chunk + "x\n" + "y" * (2 * chunk)
  (corpus / "a.txt").write_text(text)
  seen = []

  class Recorded(ByteTokenizer):
    def encode(self, text: bytes) -> np.ndarray:
      seen.append(text.decode())
      return super().encode(text)

  cache = cached(corpus, tmp_path / "cache", Recorded())
  assert decode(tokens(cache)).startswith(text)
  assert seen[0] == first
  assert len(seen) > 4


@pytest.mark.parametrize("special", [(0, -1, 1), (0, 1, 3)])
def test_special_ids_must_be_ids_of_the_vocabulary(monkeypatch, special):
  tokenizer = ByteTokenizer(3, *special)
  monkeypatch.setitem(registry.TOKENIZERS, "odd", lambda data: tokenizer)
  with pytest.raises(UserError) as caught:
    registry.build_tokenizer(config(tokenizer_type="odd").data)
  assert str(caught.value) == (
    f"tokenizer_type=odd: bos_id, eos_id, pad_id = {special} must be ids below vocab_size=3; for "
    "example (3, 4, 5) with vocab_size 6"
  )


def test_synthetic_tokens_are_none_of_the_special_ones(monkeypatch):
  monkeypatch.setitem(registry.TOKENIZERS, "words", lambda data: Words(8))
  data = config(tokenizer_type="words", dataset_type="synthetic").data
  rows = registry.build_dataset(data, 400).train.rows(np.arange(2))
  assert set(rows["inputs"].flat) == {3, 4, 5, 6, 7}
