"""What a person is told when the configuration cannot be used, word for word."""

from pathlib import Path

import pytest

from maxbatch.config import schema
from maxbatch.config.load import load_config
from maxbatch.config.value import holds_text
from maxbatch.errors import UserError


def message(*arguments: str) -> str:
  with pytest.raises(UserError) as caught:
    load_config(arguments)
  return str(caught.value)


STEPS = "must be a whole number, at least 1, or -1. A value that works:"
FILES = "Give the path of a .yml file, or one that comes with maxbatch: base."
MODELS = (
  "Known: deepseek2-16b, deepseek3-671b, default, gemma2-2b, gemma2-9b, gemma3-1b, gemma3-4b, gpt-oss-120b, gpt-oss-20b, gpt2-small, "
  "llama2-7b, llama3-8b, llama3.1-8b, llama3.2-1b, llama3.2-3b, mistral-7b, mixtral-8x7b, olmo2-1b, olmo2-7b, "
  "olmoe-1b-7b, qwen2.5-0.5b, qwen2.5-7b, qwen3-0.6b, qwen3-30b-a3b, qwen3-8b, smollm-135m, "
  "smollm-360m; or give the path of a .yml file, or of a folder with Hugging Face's config.json."
)
HELP = "--help all lists every key."

ARGUMENTS = {
  "stesp=1": f"command line: there is no key 'stesp'. Did you mean steps? {HELP}",
  "Packing=true": f"command line: there is no key 'Packing'. Did you mean packing? {HELP}",
  "run.steps=1": f"command line: there is no key 'run.steps'. Did you mean steps? {HELP}",
  "zzz=1": f"command line: there is no key 'zzz'. {HELP}",
  "batch=1": (
    "command line: there is no key 'batch'. Keys are flat, without sections: "
    f"batch_size and so on. {HELP}"
  ),
  "steps=1.5": f"command line: steps=1.5: steps {STEPS} steps=2",
  "steps=1e3": f"command line: steps=1e3: steps {STEPS} steps=1000",
  "steps=true": f"command line: steps=true: steps {STEPS} steps=1",
  "steps=010": f"command line: steps=010: steps {STEPS} steps=10",
  'steps="4"': f'command line: steps="4": steps {STEPS} steps=4',
  "steps=[4]": f"command line: steps=[...]: steps {STEPS} steps=1",
  "steps=": "command line: steps= has no value; write one after the equals sign.",
  "steps=0": (
    "command line: steps=0: steps must be at least 1, or -1. The nearest value that works: steps=1"
  ),
  "steps=-5": (
    "command line: steps=-5: steps must be at least 1, or -1. The nearest value that works: steps=1"
  ),
  "adam_b2=1": (
    "command line: adam_b2=1: adam_b2 must be at least 0 and at most 0.999999. "
    "The nearest value that works: adam_b2=0.999999"
  ),
  "init_weights_seed=4294967296": (
    "command line: init_weights_seed=4294967296: init_weights_seed must be at least 0 and at most "
    "4294967295. The nearest value that works: init_weights_seed=4294967295"
  ),
  "data_shuffle_seed=1" + 30 * "0": (
    f"command line: data_shuffle_seed=1{30 * '0'}: data_shuffle_seed must be at least 0 and at most "
    "4294967295. The nearest value that works: data_shuffle_seed=4294967295"
  ),
  "packing=no": (
    "command line: packing=no: packing must be true or false. A value that works: packing=false"
  ),
  "learning_rate=inf": (
    "command line: learning_rate=inf: learning_rate must be a finite number, at least 0. "
    "A value that works: learning_rate=0.1"
  ),
  "learning_rate=1e-999": (
    "command line: learning_rate=1e-999: learning_rate must be a finite number, at least 0. "
    "A value that works: learning_rate=0.1"
  ),
  "per_device_batch_size=1/0": (
    "command line: per_device_batch_size=1/0: per_device_batch_size must be a number such as 2, "
    "0.25 or 1/3, at least 0, or -1. A value that works: per_device_batch_size=1/2"
  ),
  "micro_batch_size=largest": (
    "command line: micro_batch_size=largest: micro_batch_size must be a number such as 2, 0.25 or "
    "1/3, at least 0, or -1, or none, or auto, or explore. A value that works: micro_batch_size=1/2"
  ),
  "micro_batch_size=atuo": (
    "command line: micro_batch_size=atuo: micro_batch_size must be a number such as 2, 0.25 or 1/3, "
    "at least 0, or -1, or none, or auto, or explore. A value that works: micro_batch_size=auto"
  ),
  "micro_batch_size={explore: {mon: 3}}": (
    "command line: micro_batch_size={...}: micro_batch_size must be explore or {explore: {min: 1}}, "
    "with any of min, max"
  ),
  "micro_batch_size={explore: {max: 0}}": (
    "command line: micro_batch_size.explore.max=0: micro_batch_size.explore.max must be at least 1, "
    "or -1. The nearest value that works: micro_batch_size.explore.max=1"
  ),
  "batch_schedule=[0, 32]": (
    "command line: batch_schedule=[...]: batch_schedule must be a list, each a list, each a whole "
    "number, at least 0, or gns, or file. A value that works: batch_schedule=[[0, 32], [10000, 64]]"
  ),
  "dtype=bfloat61": (
    "command line: dtype=bfloat61: dtype must be one of auto, float32, bfloat16, float16, "
    "cbfloat16. "
    "A value that works: dtype=bfloat16"
  ),
  "steps={a": (
    "command line: steps={a: not valid YAML: a mapping is opened with { and not closed; "
    "write {name: 1}."
  ),
  "model_name=lama3-8b": (
    "command line: model_name=lama3-8b: there is no such model. Did you mean llama3-8b? " + MODELS
  ),
  "model_name=my/shape.yml": (
    "command line: model_name=my/shape.yml: there is no such model. " + MODELS
  ),
  "steps": "'steps' is not of the form key=value. Did you mean steps=VALUE?",
  "=5": "'=5' is not of the form key=value. Did you mean steps=VALUE?",
  "my.yml": "'my.yml' is not of the form key=value. Did you mean config=my.yml?",
  "--steps=5": "--steps=5: options have no dashes; write steps=5",
  "base_config=base": (
    "base_config=base: base_config belongs in a file; on the command line use config="
  ),
  "config=my.yml": (
    "config=base and config=my.yml: only one file can be given; let one name the other as "
    "base_config."
  ),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_argument(argument: str):
  assert message("config=base", argument) == ARGUMENTS[argument]


CONFIGS = {
  "config=bse": f"config=bse: there is no such file. Did you mean base? {FILES}",
  "config=mine": f"config=mine: there is no such file. Did you mean mine.yml? {FILES}",
  "config=no/base.yml": f"config=no/base.yml: there is no such file. Did you mean base? {FILES}",
  "config=.": f"config=.: that is a folder, not a file. {FILES}",
  "config=gpt2-small": (
    "config=gpt2-small: there is no such file. That is a model: write config=base "
    f"model_name=gpt2-small. {FILES}"
  ),
  "config=": "No configuration given. Write config=base, or config= and your own file.",
  "steps=3": "No configuration given. Write config=base, or config= and your own file.",
}


@pytest.mark.parametrize("argument", CONFIGS)
def test_which_configuration(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  Path("mine.yml").write_text("base_config: base\n")
  assert message(argument) == CONFIGS[argument]


INVALID = "not valid YAML:"

FILE_TEXTS = {
  "": "f.yml: the file is empty. Start it with `base_config: base`.",
  "# nothing\n": "f.yml: the file is empty. Start it with `base_config: base`.",
  "- steps\n": (
    "f.yml:1: expected lines of `key: value`, with a space after the colon, such as `steps: 400`."
  ),
  "steps:400\n": (
    "f.yml:1: expected lines of `key: value`, with a space after the colon, such as `steps: 400`."
  ),
  "base_config: base\nstpes: 4\n": f"f.yml:2: there is no key 'stpes'. Did you mean steps? {HELP}",
  "config: base\n": f"f.yml:1: there is no key 'config'. Did you mean base_config? {HELP}",
  "base_config: base\nsteps: four\n": f"f.yml:2: steps: four: steps {STEPS} steps: 1",
  "base_config: base\nsteps:\n": f"f.yml:2: steps has no value: steps {STEPS} steps: 1",
  "base_config: base\nrun_name:\n": (
    "f.yml:2: run_name has no value: run_name must be text. A value that works: run_name: my_run"
  ),
  "base_config: base\nrun_name: null\n": (
    "f.yml:2: run_name: null: run_name must be text. A value that works: run_name: my_run"
  ),
  "base_config: base\nsteps: 1\n\nsteps: 2\n": (
    "f.yml:4: steps is given twice, in lines 2 and 4; keep one of them."
  ),
  "steps: 3\n": (
    "f.yml: no value for run_name, base_output_directory, total_samples, total_tokens, "
    f"schedule_unit, log_period and {len(schema.fields()) - 7} more. A file without base_config "
    "gives every key itself; add the line `base_config: base` to take the others from base.yml."
  ),
  "base_config: nope.yml\n": (f"f.yml:1: base_config: nope.yml: there is no such file. {FILES}"),
  "base_config:\n": "f.yml:1: base_config has no value. Write `base_config: base`.",
  "base_config: base\nmodel_name: shape.yml\n": (
    "shape.yml:2: model_name cannot be set in a model's file; remove the line."
  ),
  "prompt: a: b\n": (
    f"f.yml:1: {INVALID} a second `: ` in one line; put the value in quotes.\n  prompt: a: b"
  ),
  "steps 4\nseed: 2\n": (
    f"f.yml:2: {INVALID} the line above is not `key: value`; it needs a colon and a space."
    "\n  seed: 2"
  ),
  "base_config: base\nsteps 4\nseed: 2\n": (
    f"f.yml:2: {INVALID} expected `key: value`, with a space after the colon.\n  steps 4"
  ),
  "steps: 4\n\tseed: 3\n": (f"f.yml:2: {INVALID} a tab where YAML needs spaces.\n  \tseed: 3"),
  "steps: 4\n  seed: 3\n": (
    f"f.yml:2: {INVALID} this line is indented; start every key in the first column.\n    seed: 3"
  ),
  'prompt: "a\nsteps: 3\n': (
    f'f.yml:1: {INVALID} a quote is opened and never closed.\n  prompt: "a'
  ),
  'prompt: "a" or b\n': (
    f"f.yml:1: {INVALID} text follows the end of a value; put the whole value in one pair of "
    'quotes.\n  prompt: "a" or b'
  ),
  "prompt: @a\n": (
    f"f.yml:1: {INVALID} a value that starts with @, `, % or a comma must be in quotes."
    "\n  prompt: @a"
  ),
  "steps: 4\nprompt: a\x01b\n": f"f.yml:2: {INVALID} a control character; remove it.",
  "steps: 4\n---\nsteps: 5\n": (
    f"f.yml:2: {INVALID} a second `---` document; a configuration is one document.\n  ---"
  ),
  "[" * 3000: f"f.yml: {INVALID} brackets are nested too deeply.",
}


@pytest.mark.parametrize("text", FILE_TEXTS, ids=range(len(FILE_TEXTS)))
def test_file(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  Path("f.yml").write_text(text, encoding="utf-8")
  Path("shape.yml").write_text("base_emb_dim: 8\nmodel_name: gpt2-small\n")
  assert message("config=f.yml") == FILE_TEXTS[text]


def test_file_that_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  Path("f.yml").write_bytes(b"steps: \xff")
  assert message("config=f.yml") == "f.yml: not a text file in UTF-8 (byte 7)."


def test_circle_names_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
    Path(f"{name}.yml").write_text(f"base_config: {base}.yml\n")
  assert message("config=a.yml") == (
    "base_config refers to itself: b.yml -> c.yml -> b.yml. Let one of them say "
    "`base_config: base`."
  )


@pytest.mark.parametrize("key", [key for key in schema.fields() if key != "model_name"])
def test_the_value_that_a_message_offers_works(key: str):
  refused = 0
  for value in ("[1]", "-12345678", "1.5e9", "nan", "x", "12345678.5", "yes"):
    try:
      load_config(["config=base", f"{key}={value}"])
    except UserError as error:
      refused += 1
      offered = str(error).rpartition("works: ")[2]
      assert offered.startswith(f"{key}=")
      load_config(["config=base", offered])
  assert refused or holds_text(schema.fields()[key][1].type)


def test_text_with_nul_is_refused(tmp_path):
  file = tmp_path / "mine.yml"
  file.write_text('base_config: base\ndataset_path: "a\\0b"\n')
  assert message(f"config={file}") == (
    f"{file}:2: dataset_path must be text without NUL characters (\\0). "
    "A value that works: dataset_path: ab"
  )
