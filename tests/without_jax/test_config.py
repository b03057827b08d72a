"""Which value wins, what is read from where, and that nothing is lost on the way."""

import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from published import PUBLISHED_PARAMETERS

from maxbatch.command_line.arguments import MOST_USED, Command, help_text, wants_help
from maxbatch.config import schema
from maxbatch.config.declare import Positive
from maxbatch.config.find import config_path, model_names, packaged_folder, read_argument, read_file
from maxbatch.config.load import load_config, to_flat_dict
from maxbatch.config.schema import base_file, documented_keys
from maxbatch.config.value import convert
from maxbatch.errors import UserError

BASE = load_config(["config=base"])


def write(path: Path, text: str) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding="utf-8")
  return f"config={path}"


# --- base.yml and the models ---------------------------------------------------------------------


def test_base_equals_the_declarations():
  # If not: python scripts/write_base_config.py
  assert config_path("base").read_text(encoding="utf-8") == base_file()
  assert list(read_file(config_path("base"))) == list(schema.fields())


@pytest.mark.parametrize("key", schema.fields())
def test_default_is_of_its_type_and_range(key: str):
  entry = read_file(config_path("base"))[key]
  section, declared = schema.fields()[key]
  value = vars(vars(BASE)[section])[key]
  assert convert(entry, declared.type) == value == declared.default
  assert type(value) is type(declared.default)


def test_every_key_has_one_line_of_why():
  documented = documented_keys()
  assert [entry.key for entry in documented] == list(schema.fields())
  for entry in documented:
    assert len(entry.help) > 10, entry.key


@pytest.mark.parametrize("name", model_names())
def test_model_loads_and_takes_effect(name: str):
  config = load_config(["config=base", f"model_name={name}"])
  flat = to_flat_dict(config)
  written = yaml.safe_load((packaged_folder() / "models" / f"{name}.yml").read_text())
  # Lists are not compared with a tolerance.
  assert flat["layer_types"] == written.pop("layer_types", [])
  assert {key: flat[key] for key in written} == pytest.approx(written)
  assert flat["model_name"] == name


def parameters(config: schema.Config) -> int:
  """Counts weights from the shapes alone, as the papers describe the layers."""
  model = config.model
  width, heads, kv_heads = model.base_emb_dim, model.base_num_query_heads, model.base_num_kv_heads
  qkv_width = (heads + 2 * kv_heads) * model.head_dim
  norm = width * (2 if model.normalization == "layernorm" else 1)
  norms = 2 * model.use_pre_norm + model.use_post_attn_norm + model.use_post_ffw_norm
  layer = width * qkv_width + heads * model.head_dim * width + norms * norm
  if model.attention_type == "mla":
    rank, latent, rotated = model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim
    query = heads * (model.qk_nope_head_dim + rotated)
    layer = norms * norm + (rank * (width + 1 + query) if rank else width * query)
    layer += width * (latent + rotated) + latent
    layer += latent * heads * (model.qk_nope_head_dim + model.v_head_dim)
    layer += heads * model.v_head_dim * width
  layer += model.attention_qkv_bias * qkv_width + model.attention_out_bias * width
  of_mlp = width * model.base_mlp_dim * (2 if model.mlp_activation == "gelu" else 3)
  dense = of_mlp + model.mlp_bias * (model.base_mlp_dim + width)
  if model.num_experts > 1:
    expert = model.base_mlp_dim if model.base_moe_mlp_dim == -1 else model.base_moe_mlp_dim
    each = 3 * width * expert + model.mlp_bias * (2 * expert + width)
    of_router = width + model.router_logit_bias + model.routed_bias
    of_mlp = model.num_experts * (each + of_router) + model.shared_experts * each
  else:
    of_mlp = dense
  layer += model.attention_sink * heads
  normed_heads = heads + kv_heads if model.qk_norm_across_heads else 2
  layer += model.use_qk_norm * normed_heads * model.head_dim
  tables = model.vocab_size * width * (1 if model.logits_via_embedding else 2)
  if model.position_embedding == "learned":
    tables += model.max_position_embeddings * width
  layers, first = model.base_num_decoder_layers, model.first_num_dense_layers
  return tables + norm + layers * layer + first * dense + (layers - first) * of_mlp


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_shapes_give_the_published_parameter_count(name: str):
  config = load_config(["config=base", f"model_name={name}"])
  assert parameters(config) == PUBLISHED_PARAMETERS[name]


# --- which value wins ----------------------------------------------------------------------------


def test_later_argument_wins():
  assert load_config(["steps=3", "config=base", "steps=5"]).run.steps == 5


def test_command_line_beats_file_beats_its_base(tmp_path: Path):
  write(tmp_path / "mid.yml", "base_config: base\nsteps: 11\nlog_period: 11\neval_samples: 11")
  top = write(tmp_path / "top.yml", "base_config: mid.yml\nsteps: 22\nlog_period: 22")
  run = load_config([top, "steps=33"]).run
  assert (run.steps, run.log_period, run.eval_samples) == (33, 22, 11)
  assert run.prompt == BASE.run.prompt


@pytest.mark.parametrize("base", ["base", "base.yml"])
def test_a_file_called_base_can_build_on_the_packaged_one(tmp_path: Path, base: str):
  own = write(tmp_path / "base.yml", f"base_config: {base}\nsteps: 7")
  assert load_config([own]).run.steps == 7


def test_a_base_yml_beside_the_file_is_meant_by_its_file_name(tmp_path: Path):
  write(tmp_path / "base.yml", "base_config: base\nsteps: 7")
  assert load_config([write(tmp_path / "a.yml", "base_config: base.yml")]).run.steps == 7
  assert load_config([write(tmp_path / "b.yml", "base_config: base")]).run.steps == BASE.run.steps


def test_keys_set_by_the_user_beat_the_model(tmp_path: Path):
  own = write(tmp_path / "own.yml", "base_config: base\nbase_num_decoder_layers: 2")
  model = load_config([own, "model_name=llama3-8b", "vocab_size=300"]).model
  assert (model.base_num_decoder_layers, model.vocab_size, model.base_emb_dim) == (2, 300, 4096)


def test_model_named_in_the_users_file(tmp_path: Path):
  own = write(tmp_path / "own.yml", "base_config: base\nmodel_name: qwen3-0.6b")
  config = load_config([own])
  assert config.model.use_qk_norm
  assert config.mesh.ici_fsdp_parallelism == -1
  assert load_config([own, "model_name=default"]).model == BASE.model


def test_model_named_in_a_base_yml_takes_effect(tmp_path: Path):
  named = 'model_name: "default"', 'model_name: "llama2-7b"'
  text = config_path("base").read_text().replace(*named)
  assert load_config([write(tmp_path / "base.yml", text)]).model.base_emb_dim == 4096


def test_a_base_yml_of_one_key_lacks_the_others(tmp_path: Path):
  with pytest.raises(UserError, match="no value for run_name, "):
    load_config([write(tmp_path / "base.yml", "steps: 3")])


def test_shape_edited_in_base_yml_takes_effect(tmp_path: Path):
  text = config_path("base").read_text().replace("base_emb_dim: 128", "base_emb_dim: 256")
  assert load_config([write(tmp_path / "base.yml", text)]).model.base_emb_dim == 256


def test_model_changed_over_a_written_out_file_takes_effect(tmp_path: Path):
  own = write(tmp_path / "config.yml", yaml.safe_dump(to_flat_dict(BASE)))
  assert load_config([own, "model_name=llama2-7b"]).model.base_emb_dim == 4096


def test_model_from_a_path_relative_to_its_file(tmp_path: Path):
  write(tmp_path / "shapes" / "tiny.yml", "base_emb_dim: 8")
  own = write(tmp_path / "own.yml", "base_config: base\nmodel_name: shapes/tiny.yml")
  assert load_config([own]).model.base_emb_dim == 8


# --- how values are read -------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("argument", "expected"),
  [
    ("packing=False", False),
    ("packing=true", True),
    ("steps=1_000", 1000),
    ("steps=+7", 7),
    ("learning_rate=3e-4", 3e-4),
    ("learning_rate=1", 1.0),
    ("learning_rate=.5", 0.5),
    ("adam_eps=1E-10", 1e-10),
    ("per_device_batch_size=0.29", Fraction(29, 100)),
    ("per_device_batch_size=1/3", Fraction(1, 3)),
    ('per_device_batch_size="1/3"', Fraction(1, 3)),
    ("per_device_batch_size=1e-2", Fraction(1, 100)),
    ("expansion_factor_real_data=-0.1", Fraction(-1, 10)),
    ("per_device_batch_size=0.1000000000000000055", Fraction("0.1000000000000000055")),
    ("run_name=7", "7"),
    ("run_name=007", "007"),
    ("run_name=2026-01-02", "2026-01-02"),
    ("eval_dataset_path=", ""),
    ('eval_dataset_path=""', ""),
    ("prompt=def ", "def "),
    ("prompt=# a: b", "# a: b"),
    ('prompt="tab\\t"', "tab\t"),
    ('prompt="a" or "b"', '"a" or "b"'),
    ("accumulation=streamed", "streamed"),
    ('accumulation="streamed"', "streamed"),
  ],
)
def test_value_is_read_by_the_type_of_its_key(argument: str, expected: object):
  key = argument.partition("=")[0]
  config = load_config(["config=base", argument])
  section, _ = schema.fields()[key]
  value = vars(vars(config)[section])[key]
  assert value == expected
  assert type(value) is type(expected)


@pytest.mark.parametrize(
  ("text", "key", "expected"),
  [
    ("learning_rate: 3e-4", "learning_rate", 3e-4),
    ("per_device_batch_size: 0.29", "per_device_batch_size", Fraction(29, 100)),
    ("run_name: 7  # lucky", "run_name", "7"),
    ("prompt: |\n  two\n  lines\n", "prompt", "two\nlines\n"),
    ("\ufeffsteps: 5", "steps", 5),
  ],
)
def test_value_in_a_file(tmp_path: Path, text: str, key: str, expected: object):
  config = load_config([write(tmp_path / "own.yml", f"{text}\nbase_config: base\n")])
  assert vars(vars(config)[schema.fields()[key][0]])[key] == expected


def test_lists_are_yaml():
  assert read_list("[1, 2_000]") == (1, 2000)
  with pytest.raises(UserError, match="whole number"):
    read_list("[1, x]")
  with pytest.raises(UserError, match=r"works: tiles=\[3\]"):
    read_list("3")


def read_list(text: str) -> object:
  return convert(read_argument("tiles", text, holds_text=False), tuple[Positive, ...])


# --- help and speed ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NoArguments:
  """Of a command that takes nothing but configuration keys."""


COMMAND = Command("train", "", NoArguments)


def test_help_shows_the_most_used_keys_and_the_topics_of_the_others():
  lines = help_text(COMMAND).splitlines()
  assert max(map(len, lines)) <= 100
  assert lines[0] == "Usage: maxbatch train config=FILE [key=value ...]"
  assert "  steps=400  (whole number, at least 1, or -1)" in lines
  assert [line[2:].partition("=")[0] for line in lines if "=" in line and line[2:3].strip()][
    -len(MOST_USED) :
  ] == [*MOST_USED]
  topics = lines[-lines[::-1].index("") :]
  assert [line.split()[0] for line in topics[1:] if line[2:3].strip()] == [*schema.sections()]
  assert len(lines) < 90


@pytest.mark.parametrize("topic", schema.sections())
def test_help_on_a_topic_shows_its_keys_alone(topic):
  text = help_text(COMMAND, ["config=base", "--help", topic])
  for key, (section, _) in schema.fields().items():
    assert (f"  {key}=" in text) == (section == topic)


def test_help_of_every_key_is_short():
  """What does not fit is in the docs."""
  assert {one.key: len(one.help) for one in documented_keys() if len(one.help) > 160} == {}


def test_help_on_a_topic_that_is_none():
  with pytest.raises(UserError, match=r"unknown topic\. Did you mean batch\? Topics: run, "):
    help_text(COMMAND, ["--help", "batsh"])
  # What follows may also be a key, an option, or what a command without keys is given.
  for rest in (["steps=3"], ["--retune"], []):
    assert "Other keys, by topic" in help_text(COMMAND, ["--help", *rest])
  assert help_text(dataclasses.replace(COMMAND, takes_keys=False), ["--help", "batsh"])


def test_help_all_shows_every_key_with_type_default_and_meaning():
  text = help_text(COMMAND, ["--help", "all"])
  lines = text.splitlines()
  assert max(map(len, lines)) <= 100
  assert "  steps=400  (whole number, at least 1, or -1)" in lines
  assert '  attention="auto"  (auto | dot_product | flash)' in lines
  flowing = " ".join(text.split())
  for entry in documented_keys():
    assert f"  {entry.key}={entry.default}  (" in text
    assert " ".join(entry.help.split()) in flowing
  headings = [line for line in lines if line and not line.startswith(" ")][
    -len(schema.sections()) :
  ]
  assert headings[:3] == ["The run", "The batch", "The mesh"]
  assert headings[-1] == "Reinforcement learning"


def test_wants_help():
  assert wants_help(["steps=3", "--help"])
  assert wants_help(["-h"])
  assert not wants_help(["config=base", "run_name=help"])


def test_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    BASE.run.steps = 5  # pyright: ignore[reportAttributeAccessIssue]
