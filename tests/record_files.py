"""Files of records in every format, written with the libraries that others write them with."""

import gzip
import json
import pkgutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from maxbatch.data.formats import tf_records


def json_lines(values: Sequence[Any], column: str = "text") -> bytes:
  return b"".join(json.dumps({"id": 1, column: value}).encode() + b"\n" for value in values)


def jsonl(path: Path, values: Sequence[Any], column: str = "text") -> None:
  path.write_bytes(json_lines(values, column))


def jsonl_gz(path: Path, values: Sequence[Any], column: str = "text") -> None:
  path.write_bytes(gzip.compress(json_lines(values, column)))


def jsonl_zst(path: Path, values: Sequence[Any], column: str = "text") -> None:
  """In two frames, as tools write that work in parallel."""
  content = json_lines(values, column)
  codec, half = pa.Codec("zstd"), len(content) // 2
  parts = [codec.compress(part, asbytes=True) for part in (content[:half], content[half:])]
  path.write_bytes(b"".join(parts))


def table(values: Sequence[Any], column: str = "text") -> pa.Table:
  return pa.table({"id": list(range(len(values))), column: values})


def parquet(path: Path, values: Sequence[Any], column: str = "text") -> None:
  pq.write_table(table(values, column), path, row_group_size=7)


def arrow_stream(path: Path, values: Sequence[Any], column: str = "text") -> None:
  made = table(values, column)
  with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, made.schema) as writer:
    writer.write_table(made, max_chunksize=5)


def arrow_file(path: Path, values: Sequence[Any], column: str = "text") -> None:
  made = table(values, column)
  with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
    writer.write_table(made, max_chunksize=5)


def example(value: Any, column: str = "text") -> bytes:
  """A serialized tf.train.Example."""
  made = tf_records.example_class()()
  feature = made.features.feature[column]
  if isinstance(value, list):
    feature.int64_list.value.extend(value)
  elif isinstance(value, float):
    feature.float_list.value.append(value)
  else:
    feature.bytes_list.value.append(value.encode() if isinstance(value, str) else value)
  return made.SerializeToString()


def array_record(path: Path, values: Sequence[Any], column: str = "text") -> None:
  # A compiled module, of which type checkers see nothing.
  array_record_module: Any = pkgutil.resolve_name("array_record.python.array_record_module:")
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for value in values:
    writer.write(example(value, column))
  writer.close()


def framed(record: bytes) -> bytes:
  length = struct.pack("<Q", len(record))
  checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, record)]
  return length + checksums[0] + record + checksums[1]


def tfrecord(path: Path, values: Sequence[Any], column: str = "text") -> None:
  path.write_bytes(b"".join(framed(example(value, column)) for value in values))


def tfrecord_gz(path: Path, values: Sequence[Any], column: str = "text") -> None:
  path.write_bytes(gzip.compress(b"".join(framed(example(value, column)) for value in values)))


WRITERS: dict[str, Callable[..., None]] = {
  "a.jsonl": jsonl,
  "a.json.gz": jsonl_gz,
  "a.jsonl.zst": jsonl_zst,
  "a.parquet": parquet,
  "stream.arrow": arrow_stream,
  "file.arrow": arrow_file,
  "a.array_record-00000-of-00001": array_record,
  "a.tfrecord": tfrecord,
  "a.tfrecord.gz": tfrecord_gz,
}
"""By a name that says the format."""
