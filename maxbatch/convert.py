"""maxbatch convert from_hf=MODEL run_name=… | to_hf=FOLDER checkpoint=…: weights, in and out.

to_peft=FOLDER checkpoint=… writes the adapters of a run alone.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import jax

from maxbatch.checkpoints.find import config_of, find_checkpoint
from maxbatch.command_line.arguments import Arguments, Command, Key
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import leave
from maxbatch.config.declare import FileName, NonNegative
from maxbatch.config.find import user_path
from maxbatch.config.load import load_config
from maxbatch.conversion.beside import model_folder, tokenizer_keys
from maxbatch.conversion.to_folder import convert_to_folder, convert_to_peft
from maxbatch.conversion.to_run import Converted, convert_to_run
from maxbatch.data.registry import build_tokenizer
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder


@dataclasses.dataclass(frozen=True)
class ConvertArguments:
  """Beside the configuration's keys; empty and 0: not given."""

  from_hf: Annotated[
    str,
    FileName(),
    Key("the model to begin with: a folder, or a name on the hub", "from_hf=Qwen/Qwen3-0.6B"),
  ] = ""
  to_hf: Annotated[str, FileName(), Key("the folder to write", "to_hf=my_model")] = ""
  to_peft: Annotated[
    str, FileName(), Key("the folder to write a run's LoRA adapters to", "to_peft=my_adapter")
  ] = ""
  checkpoint: Annotated[
    str,
    FileName(),
    Key(
      "of to_hf and to_peft: a step of config's run, or the folder of a run or of a step; else "
      "the newest",
      "checkpoint=runs/qwen",
    ),
  ] = ""
  save_dtype: Annotated[
    Literal["", "float32", "bfloat16", "float16"],
    Key("of to_hf's tensors; default: that of the run's parameters", "save_dtype=bfloat16"),
  ] = ""
  export_vocab_size: Annotated[
    NonNegative,
    Key("of to_hf: rows of the vocabulary to write; default: all", "export_vocab_size=50257"),
  ] = 0
  hf_access_token: Annotated[
    str, Key("for gated or private models; default: HF_TOKEN", "hf_access_token=hf_...")
  ] = ""


COMMAND = Command(
  "convert",
  """\
from_hf makes a run of a Hugging Face model: a folder with its config.yml and the parameters as
checkpoint 0, with which training begins. to_hf makes a folder that transformers reads of a run, with
adapters merged, and to_peft one that peft reads of its adapters. Weights are read and written as
safetensors, a tensor at a time.
""",
  ConvertArguments,
  usage="from_hf=MODEL run_name=NAME | to_hf=FOLDER checkpoint=RUN | to_peft=FOLDER checkpoint=RUN",
  leaves_files=True,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _convert)


def _convert(arguments: Arguments[ConvertArguments]) -> None:
  # Nothing is computed; where there are accelerators, someone else may use them.
  jax.config.update("jax_platforms", "cpu")
  began, own = time.perf_counter(), arguments.own
  if sum(map(bool, (own.from_hf, own.to_hf, own.to_peft))) != 1:
    raise UserError(
      "give one of from_hf, to_hf and to_peft, for example from_hf=Qwen/Qwen3-0.6B run_name=qwen, "
      "or to_hf=my_model checkpoint=runs/qwen"
    )
  made = _to_run(arguments) if own.from_hf else _to_folder(arguments)
  seconds = time.perf_counter() - began
  print(
    f"{made.num_parameters:,} parameters of a model of type {made.model_type} in {made.dtype}: "
    f"{made.num_bytes / 1e9:,.3g} GB in {seconds:.3g} s "
    f"({made.num_bytes / 1e6 / seconds:,.0f} MB/s)"
  )
  for note in made.notes:
    print(note)
  print(f"Written to {made.folder}. Next:\n  {_next(own, made)}")


def _next(own: ConvertArguments, made: Converted) -> str:
  if own.from_hf:
    config = RunFolder(made.folder).config
    return f"maxbatch train config={config} dataset_path=MY_TEXTS"
  if own.to_peft:
    return f"peft.PeftModel.from_pretrained(model, {str(made.folder)!r})"
  return f"transformers.AutoModelForCausalLM.from_pretrained({str(made.folder)!r})"


def _to_run(arguments: Arguments[ConvertArguments]) -> Converted:
  own, keys = arguments.own, list(arguments.configuration)
  _refuse(own, "from_hf", ("checkpoint", "save_dtype", "export_vocab_size"))
  if any(key.startswith("model_name=") for key in keys):
    raise UserError(f"from_hf={own.from_hf} says which model it is; leave out model_name")
  folder = model_folder("from_hf", own.from_hf, own.hf_access_token)
  if not any(key.startswith("config=") for key in keys):
    keys.insert(0, "config=base")
  keys.append(f"model_name={folder.absolute()}")
  config = load_config(keys)
  if any(key.startswith("tokenizer_") for key in keys):
    build_tokenizer(config.data)  # Refuses what a run could not begin with.
  else:
    config = load_config([*keys, *tokenizer_keys(folder, RunFolder.of(config.run))])
  return convert_to_run(folder, config)


def _to_folder(arguments: Arguments[ConvertArguments]) -> Converted:
  own, keys = arguments.own, arguments.configuration
  if own.to_peft:
    _refuse(own, "to_peft", ("hf_access_token", "save_dtype", "export_vocab_size"))
  else:
    _refuse(own, "to_hf", ("hf_access_token",))
  is_in_config = not own.checkpoint or own.checkpoint.isdecimal()
  if not (is_in_config and any(key.startswith("config=") for key in keys)):
    step = find_checkpoint(own.checkpoint)
    config = config_of(step, keys)
  else:
    config = load_config(keys)
    run = RunFolder.of(config.run)
    step = find_checkpoint(str(run.checkpoints / own.checkpoint if own.checkpoint else run.path))
  if own.to_peft:
    return convert_to_peft(step, config, user_path(own.to_peft))
  folder = user_path(own.to_hf)
  return convert_to_folder(step, config, folder, own.save_dtype, own.export_vocab_size)


def _refuse(own: ConvertArguments, direction: str, others: Sequence[str]) -> None:
  values = dataclasses.asdict(own)
  if given := [f"{name}={values[name]}" for name in others if values[name]]:
    raise UserError(f"{given[0]} has no effect with {direction}; leave it out")


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
