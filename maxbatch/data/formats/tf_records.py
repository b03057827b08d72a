"""ArrayRecord and TFRecord files, whose records are tf.train.Example, without TensorFlow.

A TFRecord file has its records one after the other, each with its length and checksums; plain or
with gzip: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

import contextlib
import functools
import gzip
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any

from maxbatch.config.registry import library
from maxbatch.data.formats.format import (
  MAX_RECORD_BYTES,
  Bad,
  Record,
  RecordFormat,
  damaged,
  naming_errors,
)
from maxbatch.data.sources import SourceFile

_WHAT = "a tf.train.Example"
_SHOWN = 5
_PROTO = """
name: "maxbatch/tf_example.proto" package: "maxbatch.tf_example" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0
    type_name: ".maxbatch.tf_example.BytesList" }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0
    type_name: ".maxbatch.tf_example.FloatList" }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE oneof_index: 0
    type_name: ".maxbatch.tf_example.Int64List" } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
      type_name: ".maxbatch.tf_example.Feature" } }
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
    type_name: ".maxbatch.tf_example.Features.FeatureEntry" } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
    type_name: ".maxbatch.tf_example.Features" } }
"""


def feature(record: bytes, column: str) -> Any:
  """Returns a feature of a serialized tf.train.Example: bytes, ids, or what is wrong."""
  message = library("google.protobuf.message", _WHAT)
  try:
    features = example_class().FromString(record).features.feature
  except message.DecodeError as error:
    return Bad(f"not a tf.train.Example: {error}")
  if column not in features:
    names = ", ".join(sorted(features)[:_SHOWN]) or "none"
    return Bad(f"no feature {column}; it has {names}")
  kind = features[column].WhichOneof("kind")
  if kind == "int64_list":
    return list(features[column].int64_list.value)
  texts = features[column].bytes_list.value
  if kind == "bytes_list" and len(texts) == 1:
    return texts[0]
  what = f"{len(texts)} byte strings" if kind == "bytes_list" else kind or "nothing"
  return Bad(f"the feature {column} holds {what} instead of one text or a list of ids")


@functools.cache
def example_class() -> Any:
  """Returns the class of the message, as tensorflow/core/example/example.proto declares it."""
  descriptors = library("google.protobuf.descriptor_pb2", _WHAT)
  file = descriptors.FileDescriptorProto()
  library("google.protobuf.text_format", _WHAT).Parse(_PROTO, file)
  pool = library("google.protobuf.descriptor_pool", _WHAT).DescriptorPool()
  pool.Add(file)
  message_factory = library("google.protobuf.message_factory", _WHAT)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Example"))


# All that is read at once is in memory, and records may be large.
_BYTES_AT_ONCE = 4 * 2**20
_MOST_AT_ONCE = 1024


def _array_record_size(key: str, file: SourceFile) -> int:
  with _opened_array_record(key, file) as reader:
    return reader.num_records()


def _read_array_record(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened_array_record(key, file) as reader:
    count = reader.num_records()
    stop = min(stop, count)
    mean_bytes = max(file.size_bytes // max(count, 1), 1)
    at_once = min(max(_BYTES_AT_ONCE // mean_bytes, 1), _MOST_AT_ONCE)
    for first in range(start, stop, at_once):
      records = reader.read(first, min(first + at_once, stop))
      for place, content in enumerate(records, start=first):
        if len(content) > MAX_RECORD_BYTES:
          yield Record(place, Bad(f"longer than {MAX_RECORD_BYTES:,} bytes"))
        else:
          result = feature(content, weights) if weights else None
          yield Record(place, feature(content, column), result)


@contextlib.contextmanager
def _opened_array_record(key: str, file: SourceFile) -> Iterator[Any]:
  module = library("array_record.python.array_record_module", file.path)
  reader = module.ArrayRecordReader(file.local_path)
  with naming_errors(key, file, "ArrayRecord", RuntimeError):
    if not reader.ok():
      reader.close()  # Which says what is wrong.
      raise damaged(key, file, "ArrayRecord", "its index cannot be read")
    yield reader
    reader.close()


ARRAY_RECORD = RecordFormat(
  suffix=r"\.array_?record\b",
  size=_array_record_size,
  read=_read_array_record,
  can_be_divided=lambda file: True,
)


_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def _tfrecord_size(key: str, file: SourceFile) -> int:
  """Returns the number of records, by going from length to length."""
  with _opened_tfrecord(key, file) as stream:
    return sum(1 for _ in _lengths(key, file, stream))


def _read_tfrecord(
  key: str, file: SourceFile, column: str, start: int, stop: int, weights: str = ""
) -> Iterator[Record]:
  with _opened_tfrecord(key, file) as stream:
    for place, length in enumerate(_lengths(key, file, stream)):
      if place >= stop:
        return
      if place < start:
        continue
      if length > MAX_RECORD_BYTES:
        yield Record(place, Bad(f"longer than {MAX_RECORD_BYTES:,} bytes"))
        continue
      content, checksum = stream.read(length), stream.read(_CHECKSUM.size)
      if len(content) + len(checksum) < length + _CHECKSUM.size:
        raise damaged(key, file, "TFRecord", f"record {place} is cut off")
      if _CHECKSUM.unpack(checksum) != (_masked(content),):
        raise damaged(key, file, "TFRecord", f"record {place} does not match its checksum")
      result = feature(content, weights) if weights else None
      yield Record(place, feature(content, column), result)


def _lengths(key: str, file: SourceFile, stream: IO[bytes]) -> Iterator[int]:
  """Yields the length of each record, at whose first byte the stream then is."""
  position, place = 0, 0
  while header := stream.read(_LENGTH.size):
    length, checksum = _LENGTH.unpack(header) if len(header) == _LENGTH.size else (0, -1)
    if checksum != _masked(header[:8]):
      what = f"where record {place} should begin, at byte {position}, is none"
      raise damaged(key, file, "TFRecord", what)
    yield length
    position += _LENGTH.size + length + _CHECKSUM.size
    stream.seek(position - 1)
    if not stream.read(1):
      raise damaged(key, file, "TFRecord", f"record {place} is cut off")
    place += 1


def _masked(content: bytes) -> int:
  """Returns the masked CRC-32C that follows a length, and a record."""
  crc = _crc32c()(content)
  return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
  return library("google_crc32c", "TFRecord").value


@contextlib.contextmanager
def _opened_tfrecord(key: str, file: SourceFile) -> Iterator[Any]:
  with (
    naming_errors(key, file, "TFRecord"),
    gzip.open(file.local_path) if ".gz" in file.name else open(file.local_path, "rb") as stream,
  ):
    yield stream


TFRECORD = RecordFormat(
  suffix=r"\.tfrecords?\b",
  size=_tfrecord_size,
  read=_read_tfrecord,
  # To find a record, all lengths before it are read.
  can_be_divided=lambda file: False,
)
