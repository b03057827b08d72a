"""Every key with values that nobody means: accepted or refused in a sentence, and at once.

The cases are generated from the schema, so that a new key is tried without anybody's doing.
"""

import contextlib
import functools
import signal
import time
import typing
from collections.abc import Iterator

import pytest

from maxbatch.config import load
from maxbatch.config.load import load_config
from maxbatch.config.schema import fields
from maxbatch.config.yaml_file import Entry, read_file
from maxbatch.errors import UserError
from maxbatch.hardware.counted_devices import count_devices
from maxbatch.pipeline import make_report as make_pipeline_report
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.plan import make_report

NUMBERS = ["0", "1", "-1", "-2", "3", "7", "2147483647", "2147483648", "4294967296", "10000000000"]
NUMBERS += ["9223372036854775807", "9223372036854775808", "1" + "0" * 80, "-1" + "0" * 80]
NUMBERS += ["9" * 5000, "0.1", "1/3", "1e20", "1e999", "-1e999", "1e-999", "1e9999999999", "0x10"]
NUMBERS += ["nan", ".nan", "inf", "-.inf", "_1", "1_", "1__0", "0b_", "0x_", "1:30", "1e", "١٢"]
TEXTS = ["", '""', "~", "null", "true", "[]", "{}", "[[[[]]]]", "{a: 1}", "2026-01-02", "!!int x"]
TEXTS += [
  "a\0b",
  "a\nb",
  "/",
  "/tmp",
  ".",
  "..",
  "../../x",
  "a/../b",
  "~/x",
  "~nobody/x",
  "a" * 5000,
]
TEXTS += [
  "\x1b[2J",
  "\udce4",
  "é" * 300,
  ":",
  "os:",
  ":path",
  "os:path",
  "no.such:thing",
  "*",
  "&a",
]
LISTS = ["[[0]]", "[[0, 8]]", "[[0, 0]]", "[[0, -8]]", "[[-1, 8]]", "[[0, 7]]", "[[0, 8], [0, 16]]"]
LISTS += ["[[0, 8, 9]]", "[[0, x]]", "[[0, 10000000000000000]]", "[[0, 8], [1e9, 8]]", "[[], []]"]
LISTS += ["[[0, 8], [99999999999999999999999, 16]]", "[0, 8]", "[[0, [8]]]", "[a, b]", "[1.5]"]

CONTEXTS = {
  "base": [],
  "ramp": ["batch_size=64", "enable_rampup_batch_size=true", "per_device_batch_size_start=1"],
  "linear": [
    "batch_size=64",
    "batch_schedule_type=linear",
    "batch_size_start=8",
    "batch_schedule_length=3000",
  ],
  "doubling": [
    "batch_size=64",
    "batch_schedule_type=doubling",
    "batch_size_start=8",
    "batch_schedule_length=3000",
  ],
  "listed": ["batch_schedule=[[0, 32], [100, 64]]", "micro_batch_size=4"],
  "steered": ["batch_size=64", "batch_schedule=gns", "gns=norm", "steps=-1", "total_samples=6400"],
  "chosen": ["batch_size=64", "micro_batch_size=auto"],
  "loaded": ["batch_size=64", "expansion_factor_real_data=2"],
  "pipeline": ["pipeline_schedule=1f1b", "ici_pipeline_parallelism=2", "batch_size=64"],
}
OF_A_CONTEXT = {
  **dict.fromkeys(CONTEXTS, ("batch",)),
  "base": (),
  "pipeline": ("batch", "pipeline"),
}
"""The sections whose keys are tried in a context; in base those of all sections."""


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
  """base.yml is read once: nine tenths of the time of a load."""
  once = functools.cache(read_file)

  def read(path: typing.Any) -> dict[str, Entry]:
    return dict(once(path))

  monkeypatch.setattr(load, "read_file", read)


@contextlib.contextmanager
def at_once(what: str) -> Iterator[None]:
  """Under a second of computing, and an error instead of a hang."""

  def stop(*_: object) -> None:
    raise TimeoutError(what)

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, 3)
  began = time.process_time()
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  assert time.process_time() - began < 1, what


def plan_of(arguments: list[str]) -> str:
  """What the plan says, or the message that refuses it."""
  try:
    config = load_config(["config=base", *arguments])
    layout = count_devices(config).layout
    report = make_report(config, count_devices(config))
    if config.pipeline.pipeline_schedule != "none":
      pipeline = pipeline_of(config, layout, report.plan)
      make_pipeline_report(config, report.plan, pipeline, "")
    return str(report)
  except UserError as error:
    return check_message(str(error))


def check_message(message: str) -> str:
  """It is a sentence of readable length, whose offers are not empty."""
  assert len(message) < 3000
  assert message.isprintable() or "\n" in message
  assert "Error" not in message
  assert not message.rstrip().endswith(("nearest:", "for example", "works:"))
  return message


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("key", fields())
def test_a_hostile_value_is_refused_in_a_sentence_or_taken(key, context):
  section, _ = fields()[key]
  if context != "base" and section not in OF_A_CONTEXT[context]:
    return
  for value in [*NUMBERS, *TEXTS, *LISTS]:
    with at_once(f"{context}: {key}={value[:50]}"):
      plan_of([*CONTEXTS[context], f"{key}={value}"])
