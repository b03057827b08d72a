"""A configuration that is written out loads back to the same one, exact numbers included."""

import dataclasses
import types
import typing
from fractions import Fraction

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from maxbatch.config import schema
from maxbatch.config.declare import Example, Registered
from maxbatch.config.find import model_names
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.errors import UserError

BASE = load_config(["config=base"])

SCALARS = {
  bool: st.booleans(),
  int: st.integers(-1, 1000) | st.integers(-(10**12), 10**12),
  float: st.floats(allow_nan=False, allow_infinity=False),
  Fraction: st.fractions() | st.decimals(-99, 99, places=3).map(Fraction),
  str: st.text().filter(lambda text: "\0" not in text)
  | st.sampled_from(
    ["null", "yes", "7", "1e3", "", " a ", "'", "a: b # c", "=", "<<", "\x85", "\u2028"]
  ),
}


def values_of(annotation: typing.Any) -> st.SearchStrategy:
  """Values that a key of this type may have."""
  rules = []
  if typing.get_origin(annotation) is typing.Annotated:
    annotation, *notes = typing.get_args(annotation)
    rules = [note for note in notes if not isinstance(note, Example | Registered)]
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return st.one_of(*map(values_of, typing.get_args(annotation)))
  if typing.get_origin(annotation) is tuple:
    items = typing.get_args(annotation)
    if items[-1] is not Ellipsis:
      return st.tuples(*map(values_of, items))
    return st.lists(values_of(items[0]), max_size=3).map(tuple)
  if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
    fields = {field.name: values_of(field.type) for field in dataclasses.fields(annotation)}
    return st.builds(annotation, **fields)
  if annotation not in SCALARS:
    return st.sampled_from(typing.get_args(annotation))
  return SCALARS[annotation].filter(lambda value: all(rule.holds(value) for rule in rules))


VALUES = {key: values_of(field.type) for key, (_, field) in schema.fields().items()}
VALUES["model_name"] = st.sampled_from(model_names())


@st.composite
def configs(draw: st.DrawFn) -> schema.Config:
  """The default with a few keys drawn anew."""
  drawn = {key: draw(VALUES[key]) for key in draw(st.sets(st.sampled_from(list(VALUES))))}
  try:
    sections = {
      name: dataclasses.replace(
        section, **{key: drawn[key] for key in vars(section) if key in drawn}
      )
      for name, section in vars(BASE).items()
    }
    return schema.Config(**sections)
  except UserError:
    # Values that do not go together, such as more experts of a token than there are.
    return reject()


# The first draw builds hypothesis' tables of Unicode, which takes seconds on a busy machine.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(config=configs())
def test_written_out_config_loads_back_to_the_same(
  tmp_path_factory: pytest.TempPathFactory, config: schema.Config
):
  path = tmp_path_factory.mktemp("written") / "config.yml"
  # As a run writes it: with allow_unicode, PyYAML does not read U+0085 back.
  path.write_text(yaml.safe_dump(to_flat_dict(config), sort_keys=False), encoding="utf-8")
  assert load_config([f"config={path}"]) == config


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (Fraction(4), 4),
    (Fraction(1, 4), 0.25),
    (Fraction(29, 100), 0.29),
    (Fraction(1, 3), "1/3"),
    (Fraction(10**400 + 1, 2), f"{10**400 + 1}/2"),
  ],
)
def test_exact_numbers_are_written_plainly(value: Fraction, expected: object):
  batch = dataclasses.replace(BASE.batch, per_device_batch_size=value)
  written = to_flat_dict(dataclasses.replace(BASE, batch=batch))["per_device_batch_size"]
  assert written == expected
  assert type(written) is type(expected)
