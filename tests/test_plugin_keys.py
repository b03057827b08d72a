"""Keys that a plug-in declares: read, checked, shown, compared and written as all others are."""

import pathlib

import pytest
import yaml
from first_devices import use_first_devices
from support import SMALLEST

from maxbatch import train
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.registry import registered
from maxbatch.config.schema import fields, replaced
from maxbatch.errors import UserError
from maxbatch.models.registry import MODELS, build_model
from maxbatch.plan import main as plan
from maxbatch.rl.rewards import Group, RewardPool
from maxbatch.run_folder.metrics import read_metrics

MODULE = '''
import dataclasses
from fractions import Fraction
from typing import Annotated, Literal

import jax.numpy as jnp
import optax

from maxbatch.config.declare import Range
from maxbatch.config.declare import CHANGEABLE, FIXED, PER_START, key, with_keys
from maxbatch.models.transformer import Transformer
from maxbatch.training.metrics import TokenMetric


class Scaled(Transformer):
  @dataclasses.dataclass(frozen=True)
  class Keys:
    embedding_gain: Annotated[float, Range(low=0.1, high=10)] = key(1.0, FIXED)
    """Factor of the embeddings, which
    the first layer is given."""
    gain_shares: tuple[Annotated[Fraction, Range(low=0)], ...] = key((Fraction(1, 3),), PER_START)
    """Shares of it."""

  def __init__(self, rngs, config, max_target_length, *, keys):
    super().__init__(rngs, config, max_target_length)
    self.gain = keys.embedding_gain

  def embed(self, rows, keys_B):
    return self.gain * super().embed(rows, keys_B)


@dataclasses.dataclass(frozen=True)
class SignKeys:
  sign_kind: Literal["plain", "lion"] = key("lion", CHANGEABLE)
  """Rule whose sign is taken."""


@with_keys(SignKeys)
def sign(config, axes, *, keys):
  return optax.lion(1.0) if keys.sign_kind == "lion" else optax.sign_sgd(1.0)


@dataclasses.dataclass(frozen=True)
class SureKeys:
  sure_from: Annotated[float, Range(low=0, high=1)] = key(0.5, CHANGEABLE)
  """Probability from which a token counts as sure."""


@with_keys(SureKeys)
def sure(*, keys):
  return TokenMetric(
    lambda tokens: jnp.float32(tokens.max_logit_BC - tokens.log_z_BC >= jnp.log(keys.sure_from))
  )


@with_keys(SureKeys)
def sure_too(*, keys):
  return sure(keys=keys)


def declaring(**fields):
  namespace = {name: value for name, (_, value) in fields.items()}
  namespace["__annotations__"] = {name: kind for name, (kind, _) in fields.items()}
  return with_keys(dataclasses.dataclass(frozen=True)(type("Own", (), namespace)))(
    lambda *arguments, keys: None
  )


@dataclasses.dataclass(frozen=True)
class BrevityKeys:
  brevity_bonus: float = key(1.0, CHANGEABLE)
  """Reward of a short completion."""


@with_keys(BrevityKeys)
def brevity(prompts, completions, *, keys, **columns):
  return [keys.brevity_bonus * (len(each) < 2) for each in completions]


clashing = declaring(steps=(int, key(1, FIXED)))
reserved = declaring(derived=(int, key(1, FIXED)))
section = declaring(model=(int, key(1, FIXED)))
other_gain = declaring(embedding_gain=(int, key(1, FIXED)))
wrong_default = declaring(depth=(Annotated[int, Range(low=1)], key(0, FIXED)))
wrong_type = declaring(depth=(dict, key(0, FIXED)))
undeclared = declaring(depth=(int, 3))
no_dataclass = with_keys(dict)(lambda **_: None)
'''
MODEL = "decoder_block=own_plugins:Scaled"
HELP = "--help all lists every key."


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The user's folder, with a module of plug-ins."""
  (tmp_path / "own_plugins.py").write_text(MODULE)
  (tmp_path / "text.txt").write_text("".join(f"line {n} of the text\n" for n in range(300)))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def load(*arguments: str):
  return load_config(["config=base", *arguments])


def refused(*arguments: str) -> str:
  with pytest.raises(UserError) as caught:
    load(*arguments)
  return str(caught.value)


@pytest.mark.usefixtures("folder")
def test_they_are_read_as_all_others():
  config = load(MODEL, "embedding_gain=2", "gain_shares=[1/3, 0.29]", "opt_type=own_plugins:sign")
  assert (
    to_flat_dict(config).items()
    >= {
      "embedding_gain": 2.0,
      "sign_kind": "lion",
    }.items()
  )
  assert to_flat_dict(config)["gain_shares"] == ["1/3", 0.29]
  assert [*to_flat_dict(config)][: len(fields())] == [*fields()]
  assert to_flat_dict(config.model).keys() - fields().keys() == {"embedding_gain", "gain_shares"}


def test_a_file_gives_them_and_a_written_configuration_gives_them_back(folder):
  (folder / "own.yml").write_text(
    "base_config: base\nmodel_name: own_shape.yml\nembedding_gain: 3\n"
  )
  (folder / "own_shape.yml").write_text("decoder_block: own_plugins:Scaled\nembedding_gain: 2\n")
  config = load_config(["config=own.yml"])
  assert to_flat_dict(config)["embedding_gain"] == 3
  (folder / "written.yml").write_text(yaml.safe_dump(to_flat_dict(config)))
  assert load_config(["config=written.yml"]) == config
  assert load_config(["config=written.yml", "embedding_gain=4"]) != config
  assert hash(config.model) != hash(load(MODEL).model)
  assert replaced(config, {"steps": 7}).model == config.model


@pytest.mark.usefixtures("folder")
def test_the_plug_in_is_given_them_and_only_who_declares_any():
  config = load(MODEL, "embedding_gain=2").model
  chosen = registered("decoder_block", config.decoder_block, MODELS, config.plugins)
  assert chosen is registered("decoder_block", config.decoder_block, MODELS, config.plugins)
  assert build_model(config, 16) is build_model(config, 16)
  assert build_model(config, 16) is not build_model(load(MODEL).model, 16)
  assert not load().model.plugins


MESSAGES = {
  "embedding_gain=20": (
    "command line: embedding_gain=20: embedding_gain must be at least 0.1 and at most 10. The "
    "nearest "
    "value that works: embedding_gain=10"
  ),
  "embedding_gain=much": (
    "command line: embedding_gain=much: embedding_gain must be a finite number, at least 0.1 and "
    "at "
    "most 10. A value that works: embedding_gain=0.1"
  ),
  "embeding_gain=2": (
    f"command line: there is no key 'embeding_gain'. Did you mean embedding_gain? {HELP}"
  ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("argument", MESSAGES)
def test_a_mistake_is_refused_as_in_all_others(argument):
  assert refused(MODEL, argument) == MESSAGES[argument]


def test_without_its_plug_in_a_key_is_unknown_or_what_replaces_it_is_named(folder):
  assert refused("embedding_gain=2").startswith("command line: there is no key 'embedding_gain'.")
  (folder / "own.yml").write_text(
    f"base_config: base\n{MODEL.replace('=', ': ')}\nembedding_gain: 2\n"
  )
  with pytest.raises(UserError) as caught:
    load_config(["config=own.yml", "decoder_block=transformer"])
  assert str(caught.value) == (
    "own.yml:3: embedding_gain is a key of decoder_block=own_plugins:Scaled, which "
    "decoder_block=transformer (command line) replaces; leave out embedding_gain, or name that "
    "plug-in again."
  )
  message = refused("decoder_block=own_absent:Scaled", "embedding_gain=2")
  assert message.startswith("decoder_block=own_absent:Scaled: there is no module own_absent")


DECLARATIONS = {
  "opt_type=own_plugins:clashing": (
    "opt_type=own_plugins:clashing declares the key steps, which maxbatch already has; rename "
    "it, for example clashing_steps"
  ),
  "opt_type=own_plugins:reserved": (
    "opt_type=own_plugins:reserved declares the key derived, which maxbatch already has; rename "
    "it, for example reserved_derived"
  ),
  "opt_type=own_plugins:section": (
    "opt_type=own_plugins:section declares the key model, which maxbatch already has; rename "
    "it, for example section_model"
  ),
  "opt_type=own_plugins:other_gain": (
    "decoder_block=own_plugins:Scaled and opt_type=own_plugins:other_gain both declare the key "
    "embedding_gain; rename one of them, for example other_gain_embedding_gain"
  ),
  "opt_type=own_plugins:wrong_default": (
    "opt_type=own_plugins:wrong_default, its default: depth: 0: depth must be at least 1. The "
    "nearest "
    "value that works: depth: 1"
  ),
  "opt_type=own_plugins:wrong_type": (
    "opt_type=own_plugins:wrong_type: its key depth has the type <class 'dict'>, and must be "
    "bool, int, "
    "float, Fraction, str, Literal or a tuple of these, with a range as in Annotated[int, "
    "Range(low=1)]"
  ),
  "opt_type=own_plugins:undeclared": (
    "opt_type=own_plugins:undeclared: its Keys must be a frozen dataclass, each field declared as "
    "in "
    "`top_k: int = key(2, FIXED)`, which depth is not"
  ),
  "opt_type=own_plugins:no_dataclass": (
    "opt_type=own_plugins:no_dataclass: its Keys must be a frozen dataclass, each field declared "
    "as in "
    "`top_k: int = key(2, FIXED)`"
  ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("argument", DECLARATIONS)
def test_a_wrong_declaration_is_refused_by_name(argument):
  assert refused(MODEL, argument) == DECLARATIONS[argument]


@pytest.mark.usefixtures("folder")
def test_a_reward_function_is_given_them_in_its_processes():
  rl = load("reward_functions=[own_plugins:brevity]", "reward_processes=1", "brevity_bonus=3").rl
  with RewardPool(rl) as pool:
    assert pool.score([Group("x", ["a", "bb"], {})]).rewards_N.tolist() == [3, 0]


@pytest.mark.usefixtures("folder")
def test_two_plug_ins_may_share_their_keys():
  config = load("metrics=[own_plugins:sure, own_plugins:sure_too]", "sure_from=0.9")
  (_, one), (_, other) = config.run.plugins
  assert one == other


def test_a_plug_in_whose_module_says_nothing_of_keys_is_not_imported(folder):
  (folder / "own_quiet.py").write_text(
    "from own_plugins import Scaled\n\n\nclass Quiet(Scaled):\n  pass\n"
  )
  config = load("decoder_block=own_quiet:Quiet").model
  with pytest.raises(UserError) as caught:
    build_model(config, 16)
  assert str(caught.value) == (
    "decoder_block=own_quiet:Quiet got its Keys after the configuration was read; declare "
    "them in its module, as in Keys = Base.Keys"
  )
  load("decoder_block=own_absent:Model")


@pytest.mark.usefixtures("folder")
def test_help_shows_them_where_the_plug_in_is_named(capsys):
  assert plan([MODEL, "metrics=[own_plugins:sure, own_plugins:sure_too]", "--help"]) == 0
  text = capsys.readouterr().out
  assert (
    "\n\nKeys of decoder_block=own_plugins:Scaled\n"
    "  embedding_gain=1.0  (number, at least 0.1 and at most 10)\n"
    "      Factor of the embeddings, which the first layer is given.\n"
    "  gain_shares=[1/3]  (list: exact number, at least 0)\n"
    "      Shares of it.\n"
  ) in text
  assert text.count("sure_from=0.5") == 1
  assert plan([MODEL.replace("Scaled", "Scald"), "embedding_gain=1", "--help"]) == 0
  assert "The keys of plug-ins cannot be shown: " in capsys.readouterr().out
  assert plan(["--help"]) == 0
  assert "embedding_gain" not in capsys.readouterr().out


def test_a_command_s_own_key_is_not_mistaken_for_one(folder, capsys):
  (folder / "own_near.py").write_text(MODULE.replace("sign_kind", "num_host"))
  assert plan(["config=base", "opt_type=own_near:sign", "num_host=plain"]) == 0
  assert plan(["config=base", "num_host=plain"]) == 2
  assert "Did you mean num_hosts?" in capsys.readouterr().err


def test_a_run_is_trained_with_them_and_resumed_by_their_classes(folder, monkeypatch, capsys):
  use_first_devices(monkeypatch, 1)
  small = SMALLEST | {
    "per_device_batch_size": 1,
    "eval_samples": 2,
    "eval_interval": -1,
    "generate_length": 0,
    "dataset_path": "text.txt",
    "dataset_cache_directory": ".",
    "base_output_directory": folder,
  }
  own = [MODEL, "opt_type=own_plugins:sign", "metrics=[own_plugins:sure]", "sure_from=0.001"]
  given = ["config=base", *(f"{key}={value}" for key, value in small.items()), *own]

  def start(*keys: str) -> tuple[int, str]:
    capsys.readouterr()
    code = train.main([*given, *keys])
    captured = capsys.readouterr()
    return code, captured.out + captured.err

  assert start("steps=2", "embedding_gain=2")[0] == 0
  written = yaml.safe_load((folder / "first_run" / "config.yml").read_text())
  assert written["embedding_gain"] == 2
  assert written["gain_shares"] == ["1/3"]
  assert read_metrics(folder / "first_run")[-1]["own_plugins:sure"] == 1
  code, said = start("steps=3")
  assert code == 2
  assert "embedding_gain is 2.0 in the checkpoint and 1.0 now" in said
  code, said = start("steps=3", "embedding_gain=2", "sure_from=1", "gain_shares=[1]")
  assert code == 0
  assert "sure_from: 0.001 → 1.0" in said
  assert "gain_shares" not in said
  assert read_metrics(folder / "first_run")[-1]["own_plugins:sure"] == 0
