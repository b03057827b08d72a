"""maxbatch sample checkpoint=RUN prompt=…: texts that a trained model writes."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from maxbatch.checkpoints.find import config_of
from maxbatch.command_line.arguments import Arguments, Command, File, Key
from maxbatch.command_line.output_file import check_output, write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.screen import printable
from maxbatch.compile import cache
from maxbatch.compile.program import capacity_bytes, gib
from maxbatch.config.declare import FLOAT32, INT32, FileName, Positive, Range, Seed
from maxbatch.config.find import shown
from maxbatch.config.schema import Config, RunConfig, cached_numbers
from maxbatch.conversion.beside import origin_of
from maxbatch.conversion.for_sampling import read_parameters
from maxbatch.conversion.source import Source, find_source, open_source
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device
from maxbatch.hardware.processes import leave_together, refusing_together
from maxbatch.hardware.sharding import make_mesh
from maxbatch.hugging_face.registry import is_model_folder
from maxbatch.models.flash import resolve_attention
from maxbatch.models.float8 import AMAX
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.modes.start import connected_devices, started
from maxbatch.precision.formats import compute_format
from maxbatch.precision.policy import sampling_policy_of
from maxbatch.sampling.choice import Choice
from maxbatch.sampling.requests import (
  PromptEncoder,
  Request,
  config_of_folder,
  ends_of_folder,
  read_prompts,
  requests,
)
from maxbatch.sampling.sampler import Sampler, Samples, on_fewest_devices, stream
from maxbatch.sampling.text import TextStream, choice_of, prompts_of, text_after, vocabulary_of

_CHUNK = 8
"""Tokens between two looks at a text that a person reads."""

_BEGINS = b'{"sample": 0, "prompt": '
"""What is written begins so."""

_AsRun = Range(low=0, limit=FLOAT32, also=-1)
_RUN_SAYS = "; -1: decode_sampling_{} of the run"


@dataclasses.dataclass(frozen=True)
class SampleArguments:
  """Beside the configuration's keys."""

  checkpoint: Annotated[
    str,
    FileName(),
    Key(
      "a run's folder, for its newest checkpoint, or .../checkpoints/200, or a Hugging Face folder",
      "checkpoint=runs/mine",
    ),
  ] = ""
  prompts_file: Annotated[
    str,
    FileName(),
    Key(
      "a prompt in each line, or .jsonl with prompt or messages, instead of prompt=…",
      "prompts_file=prompts.txt",
    ),
  ] = ""
  num_samples: Annotated[
    int, Range(low=1, limit=1_000_000), Key("texts of each prompt", "num_samples=4")
  ] = 1
  max_new_tokens: Annotated[
    Positive, Key("tokens of a text, if nothing ends it before", "max_new_tokens=200")
  ] = 128
  temperature: Annotated[
    float,
    _AsRun,
    Key("0: always the most likely token" + _RUN_SAYS.format("temperature"), "temperature=0.8"),
  ] = -1
  top_k: Annotated[
    int,
    Range(low=0, limit=INT32, also=-1),
    Key("only from this many of the most likely tokens" + _RUN_SAYS.format("top_k"), "top_k=50"),
  ] = -1
  top_p: Annotated[
    float,
    Range(low=0.001, high=1, also=-1),
    Key(
      "only from the smallest set of most likely tokens with this total probability"
      + _RUN_SAYS.format("nucleus_p"),
      "top_p=0.95",
    ),
  ] = -1
  min_p: Annotated[
    float,
    Range(low=0, high=1, also=-1),
    Key(
      "only from tokens with at least this fraction of the highest probability"
      + _RUN_SAYS.format("min_p"),
      "min_p=0.05",
    ),
  ] = -1
  seed: Annotated[
    Seed, Key("a text follows from it, its prompt and its number alone", "seed=0")
  ] = 0
  stop: Annotated[
    tuple[str, ...],
    Key("tokens that end a text, as the end of a document does", r'stop=["\n"]'),
  ] = ()
  samples_at_once: Annotated[
    Positive, Key("texts written together: more is faster, and takes memory", "samples_at_once=8")
  ] = 8
  output: Annotated[str, File("a JSON object for each text, a line each", "texts.jsonl")] = ""


COMMAND = Command(
  "sample",
  """\
Writes texts with the model of a checkpoint, whose parameters are read and verified; nothing else of
it is. On a terminal they are shown as they come; elsewhere each is a line of JSON. The
configuration is RUN's own config.yml, or config=FILE; keys change it, and its prompt is the default.
""",
  SampleArguments,
  "checkpoint=RUN [prompt=…]",
)


class _Job(NamedTuple):
  model: Model
  params: Parameters
  mesh: Mesh
  tokenizer: Tokenizer
  choice: Choice
  ends: Sequence[int]
  requests: Sequence[Request]
  shows_prompts: bool
  """Whether a prompt is a text that goes on, and no message."""
  max_target_length: int
  own: SampleArguments


class _Text(NamedTuple):
  """What was written for a request, without what ended it."""

  request: Request
  ids: Sequence[int]
  num_tokens: int
  """With what ended it."""
  log_probability: float
  """Log-probability of all of them together."""
  ended: bool


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _sample)


def _sample(arguments: Arguments[SampleArguments]) -> None:
  own, rest = arguments.own, arguments.configuration
  with refusing_together(rest):
    _check(own, rest)
    folder = find_source("checkpoint", own.checkpoint)
    read = config_of_folder if is_model_folder(folder) else config_of
    config = read(folder, rest)
    if config.compile.compile_topology:
      raise UserError(
        f"compile_topology={config.compile.compile_topology}: sampling runs on the devices of "
        "this machine; leave it out"
      )
    with started(config, leaves_files=False):
      job = _prepare(own, config, open_source("checkpoint", folder))
      if own.output:
        lines = [_line(job, text) for text in _texts(job)]
        write_output("--output", own.output, "".join(f"{line}\n" for line in lines).encode())
      elif not sys.stdout.isatty():
        for text in _texts(job):
          print(_line(job, text), flush=True)
      elif len(job.requests) == 1:
        _show_as_it_comes(job)
      else:
        _show_all(job)


def _check(own: SampleArguments, rest: Sequence[str]) -> None:
  prompts = [argument for argument in rest if argument.startswith("prompt=")]
  if own.prompts_file and prompts:
    raise UserError(
      f"{shown(prompts[-1])} and prompts_file={own.prompts_file}: one of them says what texts "
      "begin with; leave out the other"
    )
  if own.output:
    check_output("--output", own.output, _BEGINS)


def _prepare(own: SampleArguments, config: Config, source: Source) -> _Job:
  """Reads what is asked for, then the model. Raises UserError: one of the two does not work."""
  target, length = connected_devices(config), config.batch.max_target_length
  tokenizer = build_tokenizer(config.data)
  encode = PromptEncoder(config.data, tokenizer)
  prompts = read_prompts(own.prompts_file) if own.prompts_file else [config.run.prompt]
  asked = list(requests(prompts, own.num_samples, encode))
  origin = origin_of(config)
  ends = encode.ends(own.stop) + (ends_of_folder(origin) if origin else [])
  cache.enable(config.compile.jax_cache_dir)
  policy = sampling_policy_of(config.precision)
  shape = resolve_attention(config.model, length, target.devices[0], policy.compute)
  model = build_model(shape, length, policy=policy)
  mesh = make_mesh(target.layout, target.devices)
  _check_memory(own, config, asked, target.devices)
  params = read_parameters(source, model, mesh)
  missing = {path[-1] for path in model.axes().keys() - flatten_dict(params).keys()}
  if AMAX in missing:
    raise UserError(
      f"quantization=fp8: checkpoint={own.checkpoint} was not trained in float8, and has no magnitudes "
      "for its scales; sample from it with quantization=none, or quantization=int8"
    )
  if missing:
    raise UserError(
      f"lora_rank={config.model.lora_rank}: checkpoint={own.checkpoint} has no adapters; sample from "
      "it with lora_rank=0"
    )
  return _Job(
    model=model,
    params=params,
    mesh=mesh,
    tokenizer=tokenizer,
    choice=_choice(own, config.run),
    ends=ends,
    requests=asked,
    shows_prompts=not config.data.use_chat_template,
    max_target_length=length,
    own=own,
  )


def _check_memory(
  own: SampleArguments, config: Config, asked: Sequence[Request], devices: Sequence[Device]
) -> None:
  """Raises UserError: tokens, keys and values of the texts written together are more than the devices
  have, however they are divided."""
  model, rows = config.model, min(own.samples_at_once, len(asked))
  kept = model.base_num_decoder_layers * cached_numbers(model)
  token_bytes = 8 + kept * compute_format(config.precision).bytes
  places = max(len(request.ids) for request in asked) + own.max_new_tokens
  needed = rows * places * token_bytes / len(devices)
  capacity = capacity_bytes(devices, config.compile.device_memory_gb)
  if needed <= capacity:
    return
  fitting = int(rows * capacity / needed)
  shorter = max(int(own.max_new_tokens * capacity * rows / needed), 1)
  offer = f"samples_at_once={fitting}" if fitting else f"samples_at_once=1 max_new_tokens={shorter}"
  raise UserError(
    f"max_new_tokens={own.max_new_tokens} samples_at_once={rows}: a device needs at least "
    f"{gib(needed)} for tokens, keys and values, and has {gib(capacity)}; for example {offer}"
  )


def _choice(own: SampleArguments, run: RunConfig) -> Choice:
  of_run = choice_of(run)
  return Choice(
    of_run.temperature if own.temperature == -1 else own.temperature,
    of_run.top_k if own.top_k == -1 else own.top_k,
    of_run.top_p if own.top_p == -1 else own.top_p,
    of_run.min_p if own.min_p == -1 else own.min_p,
  )


def _texts(job: _Job) -> Iterator[_Text]:
  """Yields all texts that are asked for, in order."""
  num_groups = -(-len(job.requests) // job.own.samples_at_once)
  size = -(-len(job.requests) // num_groups)
  for start in range(0, len(job.requests), size):
    group = job.requests[start : start + size]
    # As many rows each time, so that all groups share a program.
    *_, last = _streamed(job, [*group, *[group[-1]] * (size - len(group))], job.own.max_new_tokens)
    for row, request in enumerate(group):
      yield _text(request, last, row)


def _streamed(job: _Job, group: Sequence[Request], chunk: int) -> Iterator[Samples]:
  """Yields the texts of a group, after every chunk of tokens; on the host."""
  params, mesh = on_fewest_devices(job.params, job.mesh, len(group))
  sampler = Sampler(job.model, job.choice, job.own.max_new_tokens, job.max_target_length, mesh)
  numbers = [request.number for request in group]
  prompts = prompts_of([request.ids for request in group], job.own.seed, numbers)
  vocabulary = vocabulary_of(job.tokenizer, job.model.config.vocab_size, job.ends)
  for samples in stream(sampler, params, prompts, vocabulary, chunk):
    yield jax.device_get(samples)


def _text(request: Request, samples: Samples, row: int) -> _Text:
  num_tokens, ended = int(samples.lengths_B[row]), bool(samples.ended_B[row])
  ids = samples.tokens_BN[row, : num_tokens - ended].tolist()
  return _Text(request, ids, num_tokens, float(samples.log_probs_BN[row].sum()), ended)


def _line(job: _Job, text: _Text) -> str:
  fields: dict[str, Any] = {
    "sample": text.request.number,
    "prompt": text.request.prompt,
    "text": text_after(job.tokenizer, text.request.ids, text.ids),
    "ended": text.ended,
    "tokens": text.num_tokens,
    "log_probability": round(text.log_probability, 4),
  }
  return json.dumps(fields, ensure_ascii=False)


def _show_as_it_comes(job: _Job) -> None:
  (request,), began = job.requests, time.perf_counter()
  shown_yet = TextStream(job.tokenizer, request.ids)
  print(_opening(job, request), end="", flush=True)
  text = _Text(request, [], 0, 0.0, ended=False)
  for samples in _streamed(job, [request], _CHUNK):
    text = _text(request, samples, 0)
    print(printable(shown_yet.more(text.ids)), end="", flush=True)
  print(printable(shown_yet.more(text.ids, is_all=True)))
  _show_speed(text.num_tokens, began)


def _show_all(job: _Job) -> None:
  began, num_tokens = time.perf_counter(), 0
  for number, text in enumerate(_texts(job), 1):
    continued = text_after(job.tokenizer, text.request.ids, text.ids)
    print(f"--- {number} of {len(job.requests)}")
    print(_opening(job, text.request) + printable(continued), flush=True)
    num_tokens += text.num_tokens
  _show_speed(num_tokens, began)


def _opening(job: _Job, request: Request) -> str:
  """Returns what a text goes on from, to be shown before it."""
  return printable(str(request.prompt)) if job.shows_prompts else ""


def _show_speed(num_tokens: int, began: float) -> None:
  seconds = time.perf_counter() - began
  print(f"--- {num_tokens:,} tokens in {seconds:.1f} s, compiling included", flush=True)


if __name__ == "__main__":
  leave_together(main(sys.argv[1:]))
