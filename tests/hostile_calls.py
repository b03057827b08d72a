"""Calls of every command that nobody means, written by hand and generated from what keys declare.

A call is a line: a command, + for the arguments that it cannot do without (++: but no text to train on),
and what is wrong.
<name> is a path of hostile_places.py, <name!damage!file> a copy of it with one damaged file, and with
* as damage there is a call for each that a file of its kind can have.
"""

import pathlib
import re
import typing
from collections.abc import Iterator

from maxbatch import advise, convert, critical_batch, input_analyzer, sample
from maxbatch.command_line.arguments import Key, declared
from maxbatch.config.declare import FileName, Range, Registered
from maxbatch.config.declare import declared as keys_of
from maxbatch.config.schema import sections
from maxbatch.plan import COMMAND as PLAN

NEEDED = {
  "advise": "config=base model_name=llama2-7b total_tokens=140e9 compile_topology=v5e-256",
  "convert": "base_output_directory=<folder>/runs run_name=new",
  "critical_batch": "checkpoint=<run>",
  "input_analyzer": "<training> seconds=1 num_simulated_devices=8",
  "keys": "",
  "pipeline": "config=base pipeline_schedule=1f1b ici_pipeline_parallelism=2 batch_size=64",
  "plan": "config=base",
  "report": "",
  "runs": "",
  "sample": "checkpoint=<run> max_new_tokens=4",
  "train": "<training> steps=1 num_simulated_devices=8 run_name=new",
  "train_rl": "<training> steps=1 num_simulated_devices=8 run_name=new generate_length=0"
  " max_prefill_predict_length=8 num_generations=4 batch_size=4 micro_batch_size=8"
  " accumulation=streamed rl_task=format reward_functions=[exact]",
}
"""Arguments that + stands for."""

_MESSAGES = "dataset_type=grain use_chat_template=true train_data_columns=[messages]"
CHATS = (
  f"train ++ {_MESSAGES} grain_train_files=<chats.jsonl> tokenizer_type=huggingface vocab_size=304"
)
CHAT_SAMPLE = f"sample {_MESSAGES} max_new_tokens=4"

TEMPLATES = {
  "unclosed": "{% for",
  "unknown": "{% nothing %}",
  "raises": "{{ raise_exception('no') }}",
  "divides": "{{ 1 / 0 }}",
  "undefined": "{{ a.b.c }}",
  "overflows": "{{ 'a' * 10 ** 12 }}",
  "power": "{{ 10.0 ** 400 }}",
  "recursive": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
  "answers": "{% if messages[0]['role'] == 'user' and messages|length == 2 %}{{ 1 / 0 }}{% endif %}a",
  "private": "{{ ''.__class__.__mro__ }}",
  "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
  "turns": "{% for i in range(10 ** 9) %}{% endfor %}",
  "nests": "{% set t = 'a' * 999 %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}"
  "{% endfor %}{% endfor %}",
  "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
  "doubles": "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
  "adds": "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
  "digits": "{{ 7 ** (10 ** 9) }}",
  "centers": "{{ 'a'|center(10 ** 9) }}",
  "widens": "{{ '%1000000000d' % 1 }}",
  "formats": "{{ '%1000000000d'|format(1) }}",
  "indents": "{{ messages|tojson(10 ** 9) }}",
  "lipsum": "{{ lipsum(10 ** 6) }}",
  "keys": "{{ {}['a'] }}",
  "imports": "{% include 'a' %}",
  "filters": "{{ messages|nothing }}",
  "strftime": "{{ strftime_now('%Y') }}",
  "types": "{{ messages + 1 }}",
}
"""Chat templates that cannot be rendered."""


def by_hand() -> Iterator[str]:
  lines = (pathlib.Path(__file__).parent / "data" / "hostile_calls.txt").read_text().splitlines()
  for line in lines:
    if line and not line.startswith("#"):
      yield from _each_damage(line)


_ANY = "binary empty folder missing text truncated"
_DAMAGES = {
  "arrow": _ANY,
  "json": f"{_ANY} deep list null number wrong-object",
  "jsonl": f"{_ANY} broken-line deep list utf-16",
  "metadata": f"{_ANY} deep flipped list",
  "ocdbt": f"{_ANY} flipped",
  "parquet": _ANY,
  "safetensors": f"{_ANY} longer-header shorter-header wrong-dtype wrong-offsets",
  "yml": f"{_ANY} bomb deep list loop number twice utf-16",
}
"""By the end of a file's name."""


def _each_damage(call: str) -> Iterator[str]:
  """The call with every damage of the file that it names as <name!*> or <name!*!file>."""
  match = re.search(r"<([^<>!]+)!\*(?:!([^<>]+))?>", call)
  if match is None:
    yield call
    return
  kind = re.split(r"[./]", match[2] or match[1])[-1]
  for damage in _DAMAGES[kind].split():
    damaged = re.sub(r"!\*(?=[!>])", f"!{damage}", call)
    if damaged not in _HARMLESS:
      yield damaged


_HARMLESS = {
  "convert + from_hf=<hf!missing!tokenizer_config.json>",
  "convert + from_hf=<hf!wrong-object!tokenizer_config.json>",
  "sample checkpoint=<hf!missing!generation_config.json>",
  "sample checkpoint=<hf!wrong-object!generation_config.json>",
}
"""Of these files, which nobody needs, none is as good as one that says nothing."""


def of_templates() -> Iterator[str]:
  for name in TEMPLATES:
    yield f"{CHAT_SAMPLE} checkpoint=<hf!template-{name}!tokenizer_config.json>"
    # This one renders what is trained on, without a token that counts; a test has it.
    if name != "answers":
      yield f"{CHATS} tokenizer_path=<tokenizer!template-{name}!tokenizer_config.json>"


_OWN = {
  "advise": advise.COMMAND,
  "convert": convert.COMMAND,
  "critical_batch": critical_batch.COMMAND,
  "input_analyzer": input_analyzer.COMMAND,
  "plan": PLAN,
  "sample": sample.COMMAND,
}
_BESIDE = {"convert": " from_hf=<hf>"}
_NUMBERS = ("x", "nan", "1e999", "٣", "")
_TEXTS = ("a" * 300, "no\udce4such")


def wrong_values(annotation: object) -> Iterator[str]:
  """Values that no key of this type may have."""
  if typing.get_origin(annotation) is not typing.Annotated:
    notes: list[object] = []
  else:
    annotation, *notes = typing.get_args(annotation)
  origin = typing.get_origin(annotation)
  if origin is typing.Literal:
    yield from ("nothing", "[]", "true")
  elif origin is tuple:
    yield from ("{a: 1}", "[[[[[a]]]]]", "[")
  elif annotation is bool:
    yield from ("2", "maybe", "")
  elif annotation is str:
    yield from (
      _TEXTS[: 1 + any(isinstance(note, Registered) for note in notes)]
      if any(isinstance(note, FileName | Registered) for note in notes)
      else ()
    )
  elif annotation in (int, float) or getattr(annotation, "__name__", "") == "Fraction":
    yield from _NUMBERS
    for note in notes:
      if isinstance(note, Range) and note.low is not None:
        yield f"{note.low - 7:g}"


def of_own_keys() -> Iterator[str]:
  for command, own in _OWN.items():
    for one in declared(own):
      if isinstance(one.kind, Key):
        for value in wrong_values(one.type):
          yield f"{command} +{_BESIDE.get(command, '')} '{one.name}={value}'"


def of_configuration(*names: str) -> Iterator[str]:
  for name in names:
    command = "train_rl +" if name == "rl" else "train"
    for key, one in keys_of(sections()[name]).items():
      for value in list(wrong_values(one.type))[:2]:
        yield f"{command} + '{key}={value}'"


def every() -> Iterator[str]:
  """All calls, of keys with what is wrong with most of them."""
  yield from by_hand()
  yield from of_templates()
  yield from sorted(of_own_keys())[::3]
  yield from sorted(of_configuration("data", "distributed", "rl"))[::2]
