"""Every key with values that nobody means: taken, or refused at once in a sentence whose offers work.

The cases are generated from the schema, so that a new key is tried without anybody's doing.
"""

import contextlib
import dataclasses
import functools
import re
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from maxbatch import critical_batch, pipeline, train
from maxbatch.checkpoints.formats import FORMATS
from maxbatch.command_line import arguments
from maxbatch.config.find import read_argument
from maxbatch.config.load import load_config
from maxbatch.config.registry import registered
from maxbatch.config.schema import Config, fields
from maxbatch.config.value import convert, holds_text
from maxbatch.data.registry import DATASETS, TOKENIZERS
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import count_devices
from maxbatch.models.registry import MODELS
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.plan import COMMAND as PLAN
from maxbatch.plan import make_report
from maxbatch.training.metrics import METRICS
from maxbatch.training.optimizer import OPTIMIZERS

NUMBERS = ["0", "1", "-1", "-2", "3", "7", "13", "2147483647", "2147483648", "9007199254740993"]
NUMBERS += ["1" + "0" * 80, "-1" + "0" * 80, "9" * 5000, "0.1", "1/3", "1/0", "1e20", "1e999"]
NUMBERS += ["-1e999", "1e-999", "1e9999999999", "0x10", "nan", ".inf", "_1", "1_", "1__0", "0b_"]
NUMBERS += ["1:30", "1e", "١٢"]
TEXTS = ["", '""', "~", "null", "true", "[]", "{}", "[[[[]]]]", "{a: 1}", "2026-01-02", "!!int x"]
TEXTS += ["a\0b", "a\nb", "/", "/tmp", ".", "..", "../../x", "a/../b", "~nobody/x", "a" * 5000]
TEXTS += [
  "\x1b[2J",
  "\udce4",
  "é" * 300,
  ":",
  "os:",
  ":path",
  "os:sep",
  "no.such:thing",
  "*",
  "&a",
  f"v5e-{'9' * 5000}",
]
LISTS = ["[[0]]", "[[0, 8]]", "[[0, 0]]", "[[0, -8]]", "[[-1, 8]]", "[[0, 7]]", "[[0, 8], [0, 16]]"]
LISTS += ["[[0, 8, 9]]", "[[0, x]]", "[[0, 10000000000000000]]", "[[0, 8], [1e9, 8]]", "[[], []]"]
LISTS += ["[[0, 8], [99999999999999999999999, 16]]", "[[0, 9], [7, 12]]", "[0, 8]", "[a, b]"]

RAMP = ["batch_size=64", "batch_size_start=8", "batch_schedule_length=3000"]
CONTEXTS = {
  "base": [],
  "ramp": ["batch_size=64", "enable_rampup_batch_size=true", "per_device_batch_size_start=1"],
  "linear": [*RAMP, "batch_schedule_type=linear"],
  "doubling": [*RAMP, "batch_schedule_type=doubling"],
  "listed": ["batch_schedule=[[0, 32], [100, 64]]", "micro_batch_size=4"],
  "steered": ["batch_size=64", "batch_schedule=gns", "gns=norm", "steps=-1", "total_samples=6400"],
  "chosen": ["batch_size=64", "micro_batch_size=auto"],
  "loaded": ["batch_size=64", "expansion_factor_real_data=2"],
  "pipeline": ["pipeline_schedule=1f1b", "ici_pipeline_parallelism=2", "batch_size=64"],
}
"""Keys beside which those of the batch are tried."""
PLANNED = ("run", "batch", "mesh", "pipeline", "compile", "optimizer")
"""Sections that the plan reads; of the others, keys that name something are looked up."""
REGISTRIES = {
  "dataset_type": DATASETS,
  "tokenizer_type": TOKENIZERS,
  "checkpoint_format": FORMATS,
  "decoder_block": MODELS,
  "metrics": METRICS,
  "opt_type": OPTIMIZERS,
}
OFFER = re.compile(r"\b([a-z][a-z_0-9]+)=(\[\[.*?\]\]|\[\]|[^\s,;:()]+(?::\d+)?)")


@functools.cache
def context(name: str) -> Config:
  return load_config(["config=base", *CONTEXTS[name]])


def changed(config: Config, argument: str) -> Config:
  """`config` with one more argument, as the command line would have it."""
  key, _, text = argument.partition("=")
  section, field = fields()[key]
  value = convert(read_argument(key, text, holds_text(field.type)), field.type)
  part = dataclasses.replace(vars(config)[section], **{key: value})
  return dataclasses.replace(config, **{section: part})


def value_of(config: Config, key: str) -> object:
  return vars(vars(config)[fields()[key][0]])[key]


def planned(config: Config) -> None:
  """Everything that the commands plan and pipeline derive and print."""
  devices = count_devices(config)
  report = make_report(config, devices)
  if config.pipeline.pipeline_schedule != "none":
    stages = pipeline_of(config, devices.layout, report.plan)
    str(pipeline.make_report(config, report.plan, stages, ""))
  str(report)
  report.as_dict()


def refusal(config: Config, given: Sequence[str], is_planned: bool) -> str:
  """The message that refuses these arguments; empty if they are taken."""
  try:
    for argument in given:
      config = changed(config, argument)
      key = argument.partition("=")[0]
      names = value_of(config, key)
      for name in names if isinstance(names, tuple) else [names]:
        if key in REGISTRIES:
          registered(key, str(name), REGISTRIES[key])
    if is_planned:
      planned(config)
  except UserError as error:
    return str(error)
  return ""


@contextlib.contextmanager
def at_once(what: str) -> Iterator[None]:
  """Under a second of computing, and an error instead of a hang."""

  def stop(*_: object) -> None:
    raise TimeoutError(what)

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, 10)
  began = time.process_time()
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  assert time.process_time() - began < 1, what


def check_message(message: str) -> None:
  """It is a sentence of readable length, whose offers are not empty."""
  assert len(message) < 1500, message[:200]
  assert message.isprintable() or "\n" in message, ascii(message)
  assert "Error" not in message
  assert not message.rstrip().endswith(("nearest:", "for example", "works:")), message


def offers(message: str) -> list[list[str]]:
  """The alternatives that a message offers, each one or more arguments."""
  said = re.split(r"works: |nearest: |for example |also: ", message)[1:]
  results = []
  for part in said:
    for alternative in re.split(r" or (?=[a-z_0-9]+=)|, (?=[a-z_0-9]+=)", part):
      given = OFFER.findall(alternative)
      known = [f"{key}={value.rstrip('.')}" for key, value in given if key in fields()]
      results += [known] if known else []
  return results


def kind_of(message: str) -> str:
  """What a message complains of, without the values."""
  return re.sub(r"[\d.]+|\[.*\]", "#", message.partition(";")[0])[:200]


def faults(name: str, argument: str, taken: set[object]) -> Iterator[str]:
  """What is wrong with how an argument is refused beside those of a context."""
  key = argument.partition("=")[0]
  planned_here = fields()[key][0] in PLANNED
  try:
    read = value_of(changed(context(name), argument), key)
  except UserError as error:
    message = str(error) if name == "base" else ""  # The others would say the same.
  else:
    message = "" if read in taken else refusal(context(name), [argument], planned_here)
    taken.add(read)
  if not message:
    return
  check_message(message)
  for offered in offers(message):
    kept = [] if key in [each.partition("=")[0] for each in offered] else [argument]
    again = refusal(context(name), [*kept, *offered], planned_here)
    if again and kind_of(again) == kind_of(message):
      yield f"{argument[:70]}: {message}\n  offers {offered}, of which it says: {again}"


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_hostile_value_is_taken_or_refused_in_a_sentence_whose_offers_work(name):
  sections = {section for section, _ in fields().values()} if name == "base" else {"batch"}
  sections |= {"pipeline"} if name == "pipeline" else set()
  results: list[str] = []
  for key, (section, _) in fields().items():
    # Models are files: model_name is read before the other keys.
    if section in sections and key != "model_name":
      taken: set[object] = set()
      for value in [*NUMBERS, *TEXTS, *LISTS]:
        with at_once(f"{name}: {key}={value[:50]}"):
          results += faults(name, f"{key}={value}", taken)
  assert not results, "\n".join(results)


@pytest.mark.parametrize("command", [PLAN, pipeline.COMMAND, critical_batch.COMMAND])
def test_a_hostile_value_of_a_command_s_own_key_is_taken_or_refused_in_a_sentence(command):
  for one in arguments.declared(command):
    if not isinstance(one.kind, arguments.Key):
      continue
    for value in [*NUMBERS, *TEXTS, *LISTS]:
      with at_once(f"{command.name}: {one.name}={value[:50]}"):
        try:
          given = arguments.parse(command, [f"{one.name}={value}"])
          if isinstance(given.own, critical_batch.BranchArguments):
            critical_batch.request_of(given)
          elif one.name == "num_devices":
            count_devices(context("base"), given.own.num_devices)
        except UserError as error:
          check_message(str(error))


@pytest.mark.parametrize(
  "key", ["config", "model_name", "save_compiled_step", "batch_schedule_file", "compiled_step"]
)
def test_a_file_s_name_that_no_file_system_takes_is_refused_in_a_sentence(key, capsys):
  for name in ("a" * 5000, "a/" * 3000, f"{'a' * 300}.yml"):
    given = [f"{key}={name}"] if key == "config" else ["config=base", f"{key}={name}"]
    more = ["batch_schedule=file"] if key == "batch_schedule_file" else []
    assert train.main([*given, *more, "dataset_type=synthetic"]) == 2
    check_message(capsys.readouterr().err.strip())
