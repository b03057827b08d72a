"""tf.train.Example, the records of ArrayRecord and TFRecord files, without TensorFlow."""

import functools
from typing import Any

from maxbatch.data.formats.format import Bad
from maxbatch.data.optional import library

_PACKAGE = "maxbatch.tf_example"
_WHAT = "a tf.train.Example"
_SHOWN = 5
# Of google.protobuf.FieldDescriptorProto.
_MESSAGE = 11
_OPTIONAL, _REPEATED = 1, 3


def feature(record: bytes, column: str) -> Any:
  """The bytes, the ids, or what is wrong, of one feature of a serialized tf.train.Example."""
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
  """The class of the message, as tensorflow/core/example/example.proto declares it."""
  descriptors = library("google.protobuf.descriptor_pb2", _WHAT)
  kinds = descriptors.FieldDescriptorProto
  file = descriptors.FileDescriptorProto(
    name="maxbatch/tf_example.proto", package=_PACKAGE, syntax="proto3"
  )
  for name, kind in (
    ("BytesList", kinds.TYPE_BYTES),
    ("FloatList", kinds.TYPE_FLOAT),
    ("Int64List", kinds.TYPE_INT64),
  ):
    _field(file.message_type.add(name=name), "value", 1, kind, repeated=True)
  one = file.message_type.add(name="Feature")
  one.oneof_decl.add(name="kind")
  for number, name in enumerate(("bytes_list", "float_list", "int64_list"), start=1):
    type_name = name.title().replace("_", "")
    _field(one, name, number, type_name=type_name).oneof_index = 0
  features = file.message_type.add(name="Features")
  entry = features.nested_type.add(name="FeatureEntry")
  entry.options.map_entry = True
  _field(entry, "key", 1, kinds.TYPE_STRING)
  _field(entry, "value", 2, type_name="Feature")
  _field(features, "feature", 1, type_name="Features.FeatureEntry", repeated=True)
  _field(file.message_type.add(name="Example"), "features", 1, type_name="Features")
  pool = library("google.protobuf.descriptor_pool", _WHAT).DescriptorPool()
  pool.Add(file)
  message_factory = library("google.protobuf.message_factory", _WHAT)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def _field(
  holder: Any,
  name: str,
  number: int,
  kind: int = _MESSAGE,
  *,
  type_name: str = "",
  repeated: bool = False,
) -> Any:
  added = holder.field.add(
    name=name, number=number, type=kind, label=_REPEATED if repeated else _OPTIONAL
  )
  if type_name:
    added.type_name = f".{_PACKAGE}.{type_name}"
  return added
