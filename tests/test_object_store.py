"""Files in an object store: read as those of this machine are, with patience, and each once."""

import dataclasses
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import object_stores
import pytest
from grain_datasets import build, refusal
from object_stores import BUCKET, GoogleServer, Proxy, s3_behind_proxy
from record_files import WRITERS, array_record, jsonl, parquet
from small_disk import small

from maxbatch import train
from maxbatch.data import corpus, object_copies, token_cache
from maxbatch.data.file_datasets import Split
from maxbatch.data.object_store import TRIES
from maxbatch.data.rows import Dataset
from maxbatch.data.sources import Document, SourceFile, Sources
from maxbatch.data.tokenize import Recipe
from maxbatch.data.tokenizer import ByteTokenizer

TEXTS = [f"document {number} of an object, about nothing" for number in range(40)]
ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[Proxy, Any]]:
  with s3_behind_proxy() as both:
    yield both


@pytest.fixture
def proxy(s3) -> Iterator[Proxy]:
  proxy, _ = s3
  proxy.contents_read()
  yield proxy
  proxy.faults.clear()
  proxy.faulty = "contents"


@pytest.fixture
def put(s3, request):
  """Puts local files into the bucket, in a folder of the test's own; returns its URL."""
  _, system = s3
  folder = "".join(char if char.isalnum() else "-" for char in request.node.name)

  def put_files(*paths: Path) -> str:
    for path in paths:
      key = f"{folder}/{path.name}"
      system.call_s3("put_object", Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return f"{ROOT}/{folder}"

  return put_files


def same(one: Dataset, other: Dataset) -> bool:
  every = np.arange(len(one.train))
  first, second = (dataset.train.rows(every)["inputs"] for dataset in (one, other))
  return one.fingerprint == other.fingerprint and np.array_equal(first, second)


FORMATS = {**WRITERS, "a.array_record": array_record}


@pytest.mark.parametrize("name", FORMATS)
def test_an_object_is_read_as_a_file_is_and_once(tmp_path, proxy, put, name):
  FORMATS[name](tmp_path / name, TEXTS)
  url = put(tmp_path / name)
  local = build(tmp_path, tmp_path / name, eval_fraction=0.3)
  # Divided into training and validation, and copied once for both.
  stored = build(tmp_path, f"{url}/{name}", eval_fraction=0.3)
  assert same(local, stored)
  assert local.validation_fingerprint == stored.validation_fingerprint
  assert proxy.contents_read() == 1
  assert not list((tmp_path / "cache").glob("objects*"))
  assert same(local, build(tmp_path, f"{url}/{name}", eval_fraction=0.3))
  assert proxy.contents_read() == 0


def test_folders_globs_texts_mixtures_and_evaluation_by_url(tmp_path, proxy, put):
  (tmp_path / "local").mkdir()
  files = [tmp_path / "local" / name for name in ("train-0.jsonl", "train-1.jsonl", "dev-0.jsonl")]
  for number, file in enumerate(files):
    jsonl(file, TEXTS[number * 10 : number * 10 + 10])
  url = put(*files)
  (tmp_path / "a.txt").write_text("text " * 50)
  (tmp_path / "b.txt").write_text("more " * 50)
  local = build(tmp_path, tmp_path / "local")
  assert same(local, build(tmp_path, url))
  assert same(local, build(tmp_path, f"{url}/train-*.jsonl"))
  assert same(build(tmp_path, files[0]), build(tmp_path, f"{url}/train-0.jsonl"))
  hf: dict[str, object] = {"dataset_type": "hf", "grain_train_files": ""}
  assert same(local, build(tmp_path, "", **hf, hf_path=url))
  of_files = hf | {"hf_path": "json", "hf_train_files": f"{url}/train-*.jsonl"}
  assert same(local, build(tmp_path, "", **of_files, hf_eval_files=f"{url}/dev-0.jsonl"))
  # Within a folder's dataset, or by a URL of its own.
  for file in ("train-*.jsonl", f"{url}/train-*.jsonl"):
    assert same(local, build(tmp_path, "", **hf, hf_path=url, hf_train_files=file))
  message = refusal(tmp_path, "", **hf, hf_path=url, hf_train_files="none.jsonl")
  assert message.startswith(f"hf_train_files={url}/none.jsonl: no such object")
  mixed = [
    build(
      tmp_path, "", dataset_mixture=((f"{place}/train-0.jsonl", 1), (f"{place}/dev-0.jsonl", 2))
    )
    for place in (tmp_path / "local", url)
  ]
  assert same(*mixed)
  evaluated = build(tmp_path, f"{url}/train-0.jsonl", grain_eval_files=f"{url}/dev-*")
  assert evaluated.validation is not None
  texts = put(tmp_path / "a.txt", tmp_path / "b.txt") + "/*.txt"
  text_keys = {"dataset_type": "text", "grain_train_files": ""}
  stored = build(tmp_path, "", **text_keys, dataset_path=texts)
  assert same(build(tmp_path, "", **text_keys, dataset_path=f"{tmp_path}/*.txt"), stored)
  # Six objects, none of them twice in one form.
  assert proxy.contents_read() < 12


def test_only_what_has_changed_is_read_again(tmp_path, proxy, put):
  local = tmp_path / "local"
  local.mkdir()
  jsonl(local / "a.jsonl", TEXTS[:20])
  jsonl(local / "b.jsonl", TEXTS[20:])
  url = put(local / "a.jsonl", local / "b.jsonl")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(token_cache, "SHARD_BYTES", 100)
    patch.setattr(token_cache.text, "can_be_divided", lambda file: False)
    patch.setattr(token_cache, "make_shards_in_processes", lambda *_: None)
    build(tmp_path, url)
    assert proxy.contents_read() == 2
    jsonl(local / "b.jsonl", [text.upper() for text in TEXTS[20:]])  # Of the same size.
    put(local / "b.jsonl")
    assert same(build(tmp_path, local), build(tmp_path, url))
  assert proxy.contents_read() == 1


FAULTS = {
  "slow": ("ReadTimeout", object_stores.slow),
  "503": ("Please reduce your request rate", object_stores.too_busy),
  "reset": ("", object_stores.reset),
  "truncated": ("", object_stores.truncated),
  "shorter": ("bytes instead of", object_stores.shorter),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_retried_and_then_named(tmp_path, proxy, put, kind, capsys, monkeypatch):
  jsonl(tmp_path / "a.jsonl", TEXTS)
  url = put(tmp_path / "a.jsonl")
  said, fault = FAULTS[kind]
  if kind == "slow":
    monkeypatch.setattr("maxbatch.data.object_store.READ_SECONDS", 1)
  proxy.faults.extend([fault] * 2)
  assert same(build(tmp_path, tmp_path / "a.jsonl"), build(tmp_path, url))
  # A machine under load may be slow by itself.
  assert (count := proxy.contents_read()) == 3 or (kind == "slow" and count > 3)

  cache = tmp_path / "other"
  tries = 2 if kind == "slow" else TRIES
  monkeypatch.setattr("maxbatch.data.object_store.TRIES", tries)
  proxy.faults.extend([fault] * tries)
  keys = [f"grain_train_files={url}", f"dataset_cache_directory={cache}", "dataset_type=grain"]
  assert train.main(["config=base", "validate_only=true", *keys]) == 2
  message = capsys.readouterr().err
  assert f"grain_train_files: {url}/a.jsonl: {proxy.url} failed: " in message
  assert said in message
  assert f"; {tries} tries were made" in message
  assert proxy.contents_read() == tries
  assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_listing_is_retried_too(tmp_path, proxy, put):
  jsonl(tmp_path / "a.jsonl", TEXTS)
  url = put(tmp_path / "a.jsonl")
  proxy.faulty = "GET"
  proxy.faults.extend([object_stores.too_busy, object_stores.reset, object_stores.truncated])
  assert same(build(tmp_path, tmp_path / "a.jsonl"), build(tmp_path, url))
  assert not proxy.faults


def test_a_run_goes_on_with_what_an_earlier_one_has_copied(tmp_path, proxy, put):
  names = ["a b+c%20ä.jsonl", ".hidden.jsonl", "empty.jsonl"]
  jsonl(tmp_path / names[0], [*TEXTS, None])
  jsonl(tmp_path / names[1], TEXTS)
  (tmp_path / names[2]).touch()
  url = put(*(tmp_path / name for name in names))
  assert f"{url}/{names[0]}, line 41: null instead of text" in refusal(tmp_path, url)
  assert proxy.contents_read() == 1
  stored = build(tmp_path, url, max_bad_records=1)
  assert "skipped: 1 bad, 1 hidden" in stored.description
  assert same(build(tmp_path, tmp_path / names[0], max_bad_records=1), stored)
  assert proxy.contents_read() == 0
  assert not list((tmp_path / "cache").glob("objects*"))


def test_a_disk_without_room_for_a_copy_is_named(tmp_path, proxy, put):
  jsonl(tmp_path / "a.jsonl", TEXTS * 40)
  url, size = put(tmp_path / "a.jsonl"), (tmp_path / "a.jsonl").stat().st_size
  with small(tmp_path / "disk", 64) as disk:
    message = refusal(tmp_path, url, dataset_cache_directory=str(disk))
    assert f"of {url}/a.jsonl: No space left on device; it needs {size} bytes" in message
    assert [path for path in disk.rglob("*") if path.is_file()] == []
  assert proxy.contents_read() == 1


def test_other_contents_than_the_store_says_are_not_taken(tmp_path, proxy, put):
  jsonl(tmp_path / "a.jsonl", TEXTS)
  url = put(tmp_path / "a.jsonl")
  proxy.faults.append(object_stores.altered)
  assert same(build(tmp_path, tmp_path / "a.jsonl"), build(tmp_path, url))
  proxy.faults.extend([object_stores.altered] * 3)
  message = refusal(tmp_path / "other", url)
  assert f"{url}/a.jsonl arrives with the MD5 " in message
  assert "3 times; write the object again" in message
  assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []


def test_an_object_written_in_parts_has_no_md5(tmp_path, s3, proxy, monkeypatch):
  _, system = s3
  content = b"".join(json.dumps({"text": "x" * 900}).encode() + b"\n" for _ in range(60))
  (tmp_path / "a.jsonl").write_bytes(content)
  put_in_parts(system, "parts/a.jsonl", content)
  monkeypatch.setattr(object_copies, "_RANGE_BYTES", 10_000)
  monkeypatch.setattr(object_copies, "_BYTES_AT_ONCE", 20_000)
  url = f"{ROOT}/parts/a.jsonl"
  assert same(build(tmp_path, tmp_path / "a.jsonl"), build(tmp_path, url))
  assert proxy.contents_read() == 6

  def overwritten(handler: Any, answer: Any, part: bytes) -> None:
    put_in_parts(system, "parts/a.jsonl", content.replace(b"x", b"y"))
    object_stores.whole(handler, answer, part)

  proxy.faults.append(overwritten)
  message = refusal(tmp_path / "other", url)
  assert f"grain_train_files: {url} is not what it was when its bucket was listed" in message
  assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []


def put_in_parts(system: Any, key: str, content: bytes) -> None:
  """As S3 has objects of more than one part: with an ETag that is no MD5."""
  place = {"Bucket": BUCKET, "Key": key}
  upload = place | {"UploadId": system.call_s3("create_multipart_upload", **place)["UploadId"]}
  parts = []
  for number, part in enumerate((content[:30_000], content[30_000:]), start=1):
    made = system.call_s3("upload_part", **upload, PartNumber=number, Body=part)
    parts.append({"PartNumber": number, "ETag": made["ETag"]})
  done = system.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
  assert "-" in done["ETag"]


def test_processes_that_share_an_object_copy_it_once(tmp_path, proxy, put, monkeypatch):
  parquet(tmp_path / "a.parquet", TEXTS * 40)
  url = put(tmp_path / "a.parquet")
  local = build(tmp_path, tmp_path / "a.parquet")
  monkeypatch.setattr(token_cache, "SHARD_BYTES", (tmp_path / "a.parquet").stat().st_size // 3)
  monkeypatch.setattr("os.cpu_count", lambda: 2)
  stored = build(tmp_path, url)
  assert same(local, stored)
  assert len(list((tmp_path / "cache").glob("*.tokens"))) == 1 + 3
  assert proxy.contents_read() == 1
  assert not list((tmp_path / "cache").glob("objects*"))


def test_runs_that_read_other_columns_for_validation_share_no_copies(tmp_path):
  """The one that ends first would remove those of the other."""
  file = SourceFile("a.jsonl", f"{ROOT}/a.jsonl", 10, 0, "1")
  sources = Sources("grain_train_files", file.path, "file", (file,), format="jsonl", column="text")
  recipe = Recipe(sources, ByteTokenizer())
  other = dataclasses.replace(recipe, sources=dataclasses.replace(sources, column="answer"))
  parts = Split((Document(file, end=0.5),), (Document(file, begin=0.5),), ())
  with (
    corpus._copied(parts, recipe, recipe, tmp_path) as one,
    corpus._copied(parts, recipe, other, tmp_path) as another,
  ):
    assert Path(one.train[0].file.copy).parent != Path(another.train[0].file.copy).parent


def test_what_is_not_there_or_not_allowed_is_named_at_once(tmp_path, proxy, put):
  jsonl(tmp_path / "a.jsonl", TEXTS)
  url = put(tmp_path / "a.jsonl")
  proxy.faults.append(object_stores.denied)
  message = refusal(tmp_path, url)
  assert f"{url}/a.jsonl: {proxy.url} denies access (PermissionError: Access Denied)" in message
  assert proxy.contents_read() == 1
  proxy.requests.clear()
  assert "no such bucket or object; give one that exists" in refusal(tmp_path, "s3://nobody/a")
  assert "no such object, and none below it" in refusal(tmp_path, f"{ROOT}/none/a.jsonl")
  assert "the glob matches no object" in refusal(tmp_path, f"{ROOT}/none-*.jsonl")
  for without in ("s3://", "s3:///a.jsonl", "s3://buck*/a.jsonl"):
    message = refusal(tmp_path, without)
    assert message == f"grain_train_files={without}: give a bucket, for example s3://bucket/data"
  hf: dict[str, object] = {"dataset_type": "hf", "grain_train_files": ""}
  message = refusal(tmp_path, "", **hf, hf_path="s3://")
  assert message == "hf_path=s3://: give a bucket, for example s3://bucket/data"
  # One request for each of a listing, the object and the bucket.
  assert proxy.requests.total() <= 10
  message = refusal(tmp_path, "hf://datasets/a")
  assert message.startswith("grain_train_files=hf://datasets/a: hf:// is not read here")
  assert "Known: s3://, gs://, and files and folders of this machine" in message
  assert "tokens are mapped into memory from a file system" in (
    refusal(tmp_path, tmp_path / "a.jsonl", dataset_cache_directory="s3://bucket/tokens")
  )


def test_without_credentials_or_the_package(tmp_path, proxy, monkeypatch):
  del proxy
  system: Any = pkgutil.resolve_name("s3fs:S3FileSystem")
  system.clear_instance_cache()
  monkeypatch.delenv("AWS_ACCESS_KEY_ID")
  monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
  message = refusal(tmp_path, f"{ROOT}/a.jsonl")
  assert "NoCredentialsError" in message
  assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in message
  monkeypatch.setenv("AWS_PROFILE", "nobody")
  system.clear_instance_cache()
  assert "ProfileNotFound" in refusal(tmp_path, f"{ROOT}/a.jsonl")
  monkeypatch.delenv("AWS_PROFILE")
  monkeypatch.setenv("AWS_ENDPOINT_URL", "no address")
  system.clear_instance_cache()
  assert f"{ROOT}/a.jsonl: no address: ValueError: Invalid endpoint" in (
    refusal(tmp_path, f"{ROOT}/a.jsonl")
  )
  system.clear_instance_cache()
  monkeypatch.setitem(sys.modules, "s3fs", None)
  message = refusal(tmp_path, f"{ROOT}/a.jsonl")
  assert f"grain_train_files={ROOT}/a.jsonl needs the package s3fs" in message
  assert "pip install 'maxbatch[s3]'" in message


def test_google_s_protocol_with_a_server_that_speaks_enough_of_it(tmp_path, monkeypatch):
  jsonl(tmp_path / "a.jsonl", TEXTS)
  with GoogleServer({"data/a.jsonl": (tmp_path / "a.jsonl").read_bytes()}) as server:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setattr("maxbatch.data.object_store.FIRST_WAIT_SECONDS", 0.01)
    local = build(tmp_path, tmp_path / "a.jsonl")
    assert same(local, build(tmp_path, "gs://bucket/data"))
    assert server.contents_read == 1
    assert same(local, build(tmp_path, "gs://bucket/data/*.jsonl"))
    assert same(local, build(tmp_path, "gs://bucket/data/a.jsonl"))
    assert "no such object" in refusal(tmp_path, "gs://bucket/none")
    server.is_forbidden = True
    message = refusal(tmp_path, "gs://bucket/data")
    assert message.startswith(f"grain_train_files: gs://bucket/data: {server.url}/storage/v1/")
    assert "Forbidden" in message
    assert "GOOGLE_APPLICATION_CREDENTIALS" in message
