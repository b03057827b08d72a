"""Nothing is ignored: every key is read by every run, or has a condition without which it is named."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from support import SMALLEST

import maxbatch
from maxbatch.config.declare import CHANGEABLE, Besides, key, when
from maxbatch.config.find import model_names
from maxbatch.config.load import load_config, without_effect
from maxbatch.config.registry import naming_keys
from maxbatch.config.schema import fields, replaced, sections, to_flat
from maxbatch.data.reading import read_ahead
from maxbatch.data.registry import build_dataset, build_tokenizer, check_epochs
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import count_devices
from maxbatch.models.registry import build_model
from maxbatch.models.remat import kept
from maxbatch.plan import main as plan
from maxbatch.plan import make_report
from maxbatch.precision.loss_scale import scaling_of
from maxbatch.precision.policy import policy_of
from maxbatch.rl.grpo import objective
from maxbatch.train import main as train
from maxbatch.training.optimizer import OPTIMIZERS

CONDITIONAL = {name: one for name, (_, one) in fields().items() if one.read_when}


@functools.cache
def base():
  return load_config(["config=base"])


def load(*arguments):
  return load_config(["config=base", *arguments])


def named(config):
  """The lines about keys without effect, or the refusal of one."""
  try:
    return without_effect(config)
  except UserError as error:
    return [str(error)]


def names(lines, name):
  return any(re.search(rf"(^|[ :]){name}=", re.split(r" with |, with ", line)[0]) for line in lines)


def another(name):
  """A value that is not the default; without_effect does not look whether it is allowed."""
  default = fields()[name][1].default
  if isinstance(default, bool):
    return not default
  if isinstance(default, tuple):
    return ("another",)
  if isinstance(default, str):
    return "another"
  assert isinstance(default, int | float | Fraction)
  return default + 3


def example(allowed):
  if isinstance(allowed, Besides):
    return allowed.like
  return allowed[0] if isinstance(allowed, list) else allowed


def holding(conditions):
  """Keys with which all conditions hold, once for each choice of alternatives."""
  for chosen in itertools.product(*(each.alternatives for each in conditions)):
    keys = {}
    for alternative in chosen:
      for name, allowed in alternative.items():
        known = keys.get(name)
        is_kept = (
          isinstance(allowed, Besides) and known is not None and known not in allowed.excluded
        )
        keys[name] = known if is_kept else example(allowed)
    yield keys


def failing(condition):
  """Keys with which no alternative of a condition holds."""
  keys = sorted({name for each in condition.alternatives for name in each})
  tried = []
  for name in keys:
    excluded = [
      each
      for alternative in condition.alternatives
      for each in getattr(alternative.get(name), "excluded", ())
    ]
    # A colon would be a plug-in's.
    tried.append([*excluded, fields()[name][1].default, another(name)])
  for values in itertools.product(*tried):
    found = dict(zip(keys, values, strict=True))
    if not any(
      all(
        found[name] not in allowed.excluded
        if isinstance(allowed, Besides)
        else found[name] in (allowed if isinstance(allowed, list) else [allowed])
        for name, allowed in alternative.items()
      )
      for alternative in condition.alternatives
    ):
      return found
  raise AssertionError(condition)


# --- the rule, on every key ----------------------------------------------------------------------


def test_no_default_and_no_model_has_a_key_without_effect():
  for name in model_names():
    for topology in ("", "v5e-8"):
      config = load(f"model_name={name}", f"compile_topology={topology}")
      assert named(config) == [], name
  assert named(load_config(["config=configs/post_train/rl.yml"])) == []


@pytest.mark.parametrize("name", CONDITIONAL)
def test_a_key_is_named_exactly_when_one_of_its_conditions_fails(name):
  conditions, own = CONDITIONAL[name].read_when, {name: another(name)}
  for keys in holding(conditions):
    assert not names(named(replaced(base(), keys | own)), name), keys
    assert not names(named(replaced(base(), own | keys | {name: CONDITIONAL[name].default})), name)
  for condition in conditions:
    keys = next(iter(holding(conditions))) | failing(condition) | own
    values = to_flat(base()) | keys
    # Others may have no effect either, and be refused before this one: only its own are changed.
    said = [line for line in named(replaced(base(), keys)) if names([line], name)]
    if not said:
      with pytest.raises(UserError, match="has no effect with"):
        without_effect(replaced(base(), keys))
      continue
    is_line = said[0].startswith("Without effect: ")
    first = next(each for each in conditions if _fails(each, values))
    assert is_line is not first.refuses, said
    fix = re.split("; it has one with |; there is one with ", said[0])[1]
    assert fix
    assert not fix.startswith(f"{name}="), said


def _fails(condition, values):
  return not any(
    all(
      values[name] not in allowed.excluded
      if isinstance(allowed, Besides)
      else values[name] in (allowed if isinstance(allowed, list) else [allowed])
      for name, allowed in alternative.items()
    )
    for alternative in condition.alternatives
  )


def test_conditions_name_keys_that_there_are():
  for one in CONDITIONAL.values():
    for condition in one.read_when:
      assert all(set(each) <= set(fields()) for each in condition.alternatives)


def test_what_a_plug_in_reads_nobody_knows():
  for name, one in CONDITIONAL.items():
    for other in {each for when_ in one.read_when for alt in when_.alternatives for each in alt}:
      if other in naming_keys() and len(one.read_when) == 1 and name != other:
        assert not names(named(replaced(base(), {name: another(name), other: "mine:own"})), name)
  assert named(load("batch_size_start=8", "opt_type=sgd"))
  assert not names(named(load("adam_b1=0.5", "opt_type=mine:sign")), "adam_b1")


def test_the_sentences(capsys):
  assert named(load("rope_factor=8")) == [
    "rope_factor=8.0 has no effect with rope_type=default; leave it out, or set rope_factor=1.0; it "
    "has one with rope_type=llama3.1"
  ]
  assert named(load("profiler_steps=9", "grpo_beta=0.1", "rl_task=format")) == [
    "Without effect: profiler_steps=9, with profiler=; there is one with profiler=xplane",
    "Without effect: rl_task=format grpo_beta=0.1, with num_generations=-1; there is one with "
    "num_generations=8",
  ]
  assert plan(["config=base", "wsd_decay_steps_fraction=0.3"]) == 0
  assert capsys.readouterr().err == (
    "Without effect: wsd_decay_steps_fraction=0.3, with lr_schedule_type=cosine; there is one with "
    "lr_schedule_type=wsd\n"
  )
  assert plan(["config=base", "batch_size_start=8"]) == 2
  assert (
    "batch_size_start=8 has no effect with batch_schedule_type=constant" in capsys.readouterr().err
  )


PLUGIN = """
import dataclasses
from maxbatch.config.declare import CHANGEABLE, key, when, with_keys

@dataclasses.dataclass(frozen=True)
class Keys:
  is_warped: bool = key(False, CHANGEABLE)
  warp: float = key(1.0, CHANGEABLE, when({"is_warped": True}))
  twist: float = key(1.0, CHANGEABLE, when({"lr_schedule_type": "wsd", "is_warped": True}, refuses=True))

@with_keys(Keys)
def rule(config, axes, *, keys):
  raise NotImplementedError
"""


def test_a_plug_in_declares_conditions_of_its_keys(tmp_path, monkeypatch):
  (tmp_path / "conditional_plugin.py").write_text(PLUGIN)
  monkeypatch.syspath_prepend(tmp_path)
  mine = "opt_type=conditional_plugin:rule"
  assert named(load(mine, "warp=2")) == [
    "Without effect: warp=2.0, with is_warped=false; there is one with is_warped=true"
  ]
  assert named(load(mine, "warp=2", "is_warped=true")) == []
  assert named(load(mine, "twist=2"))[0].startswith(
    "twist=2.0 has no effect with lr_schedule_type=cosine"
  )
  assert dataclasses.fields(
    dataclasses.make_dataclass("D", [("a", int, key(1, CHANGEABLE, when({})))])
  )


# --- with the condition a key changes something ---------------------------------------------------


def planned(config):
  report = make_report(config, count_devices(config))
  return str(report.as_dict()), report.plan, report.pipeline, report.rl


def traced(config):
  """The program of a model, with its constants."""
  model = build_model(config.model, 8)
  ids = jnp.zeros((1, 8), jnp.int32)
  rows = Rows(ids, ids, jnp.ones((1, 8)), jnp.zeros(1, jnp.int32))
  params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  program = jax.make_jaxpr(lambda params: model.bind(params)(rows, None))(params)
  return re.sub(r"0x\w+", "", str(program)) + str(
    [jnp.asarray(each).tolist() for each in program.consts]
  )


def handed_out(config):
  return str(build_model(config.model, 8).own_sums)


def updated(config):
  rule = OPTIMIZERS[config.optimizer.opt_type](config.optimizer, {})
  params = {"kernel": jnp.array([[1.0, -2.0]])}
  state = rule.init(params)
  for grad in (1e-8, 1.0, 0.5):
    updates, state = rule.update({"kernel": jnp.array([[grad, 2 * grad]])}, state, params)
  return str(updates), str(state)


def scaled(config):
  return scaling_of(config.precision)


def formats(config):
  return policy_of(config.precision)


def kept_tensors(config):
  return kept(config.model)


def loss(config):
  return objective(config.rl, 8)


def ahead(config):
  return read_ahead(config.data)


@functools.cache
def used_names():
  """What the source reads: for what only a run of several processes or a failure shows."""
  files = pathlib.Path(maxbatch.__file__).parent.rglob("*.py")
  text = "\n".join(path.read_text() for path in files if "config" not in path.parts)
  return {read or quoted for read, quoted in re.findall(r"\.(\w+)\b(?! = )|\"(\w+)\"", text)}


def is_used(name):
  return name in used_names()


SMALL = "base_num_decoder_layers=2 base_emb_dim=8 head_dim=4 base_num_query_heads=2 base_num_kv_heads=2 base_mlp_dim=8"
LLAMA = f"{SMALL} head_dim=16 rope_type=llama3.1 original_max_position_embeddings=64 rope_factor=8"
EXPERTS = f"{SMALL} num_experts=4 num_experts_per_tok=2 norm_topk_prob=false"
MLA = f"{SMALL} attention_type=mla"
EFFECTS = [
  (planned, "batch_size=64 batch_schedule_type=linear batch_size_start=16 batch_schedule_length=100",
   "batch_size_start=32 batch_size_increment=8 batch_schedule_length=200 batch_schedule_unit=steps "
   "learning_rate_batch_coupling=linear"),
  (planned, "per_device_batch_size=4 enable_rampup_batch_size=true",
   "per_device_batch_size_start=2 per_device_batch_size_increment=3 global_rampup_samples=900"),
  (planned, "batch_size=64 batch_schedule=gns gns=norm", "gns_max_batch_size=128"),
  (planned, "batch_size=32", "expansion_factor_real_data=2 eval_per_device_batch_size=9 num_simulated_devices=4"),
  (planned, "batch_size=8 num_simulated_devices=8", "pad_batch=true"),
  (planned, "compile_topology=v5e-8 dcn_data_parallelism=-1", "compile_topology_num_slices=2"),
  (planned, "lr_schedule_type=wsd", "wsd_decay_steps_fraction=0.7 learning_rate_final_fraction=0.5 warmup_steps_fraction=0.3"),
  (planned, "pipeline_schedule=circular ici_pipeline_parallelism=2 base_num_decoder_layers=8 batch_size=64",
   "num_pipeline_microbatches=8 num_pipeline_repeats=2 num_layers_per_pipeline_stage=2 "
   "pipeline_delay_activation_forwarding=true pipeline_saved_activations=residuals"),
  (planned, "num_generations=4 batch_size=8 accumulation=streamed num_prompts=9 rl_task=format steps=10",
   "num_iterations=2 max_prefill_predict_length=9 rollout_staleness=1 num_prompts=10 rollout_devices=4 "
   "leftover_prompts=drop grpo_beta=0.1"),
  (planned, "num_generations=4 batch_size=8 accumulation=streamed rl_task=format rollout_devices=4",
   "rollout_fsdp_parallelism=2 rollout_tensor_parallelism=2"),
  (planned, "num_generations=4 batch_size=8 accumulation=streamed rl_task=format rollout_devices=4 "
   "rollout_tensor_parallelism=-1 rollout_data_parallelism=1", "rollout_data_parallelism=2"),
  (loss, "num_generations=4",
   "loss_type=grpo grpo_beta=0.1 grpo_epsilon=0.1 grpo_epsilon_high=0.3 importance_sampling_cap=3"),
  (traced, f"{SMALL} position_embedding=rope", "rope_max_timescale=99 rope_linear_scaling_factor=2"),
  (traced, f"{SMALL} rope_factor=8 original_max_position_embeddings=64", "rope_type=llama3.1"),
  (traced, f"{SMALL} head_dim=16 rope_type=yarn original_max_position_embeddings=64 rope_factor=8",
   "rope_factor=4 original_max_position_embeddings=16 beta_fast=3 beta_slow=2 rope_truncate=false "
   "rope_attention_scaling=true"),
  (traced, LLAMA, "rope_factor=4 rope_low_freq_factor=2 rope_high_freq_factor=9 original_max_position_embeddings=16"),
  (traced, f"{SMALL} sliding_window_size=4", "local_rope_max_timescale=99 layer_types=[sliding_attention,full_attention]"),
  (traced, f"{SMALL} use_qk_norm=true", "qk_norm_across_heads=true"),
  (traced, f"{SMALL} position_embedding=rope", "rope_interleave=true head_dim=8"),
  (traced, MLA, "q_lora_rank=4 kv_lora_rank=4 qk_nope_head_dim=4 qk_rope_head_dim=4 v_head_dim=4"),
  (traced, f"{MLA} rope_type=yarn rope_factor=4", "mscale=0.5"),
  (traced, f"{SMALL} num_experts=4", "first_num_dense_layers=1"),
  (traced, EXPERTS, "num_experts_per_tok=1 base_moe_mlp_dim=4 shared_experts=1 routed_score_func=sigmoid "
   "norm_topk_prob=true routed_scaling_factor=2 routed_bias=true n_routing_groups=2"),
  (traced, f"{EXPERTS}", "router_logit_bias=true"),
  (traced, f"{SMALL} mlp_activation=clamped_swiglu", "mlp_activations_limit=2 swiglu_alpha=1"),
  (handed_out, EXPERTS, "load_balance_loss_weight=0.1 router_z_loss_weight=0.1"),
  (traced, f"{EXPERTS} n_routing_groups=2", "topk_routing_group=2"),
  (traced, f"{EXPERTS} load_balance_loss_weight=0.1", "load_balance_loss_type=global"),
  (traced, f"{SMALL} lora_rank=2", "lora_alpha=9 lora_targets=[out]"),
  (kept_tensors, "remat_policy=custom",
   "decoder_layer_input=offload query_proj=device key_proj=device value_proj=device context=device "
   "attention_out=device out_proj=device mlpwo=device mlpwi_0=device mlpwi_1=device"),
  (kept_tensors, "remat_policy=custom mlp_activation=gelu", "mlpwi=device"),
  (formats, "weight_dtype=bfloat16", "weight_rounding=nearest"),
  (scaled, "loss_scale=dynamic",
   "initial_loss_scale=8 min_loss_scale=1 max_loss_scale=32 loss_scale_window=9 loss_scale_growth_factor=4 "
   "loss_scale_backoff_factor=0.25 max_consecutive_skipped_steps=3"),
  (scaled, "precision=float16", "initial_loss_scale=8 max_consecutive_skipped_steps=3"),
  (scaled, "grad_dtype=float16", "initial_loss_scale=8"),
  (updated, "opt_type=adamw", "adam_b1=0.5 adam_b2=0.5 adam_eps=0.1 adam_weight_decay=0.5 mu_dtype=bfloat16"),
  (updated, "opt_type=sgd", "sgd_momentum=0.5 mu_dtype=bfloat16"),
  (ahead, "", "grain_num_threads=4 grain_prefetch_buffer_size=4"),
  (ahead, "grain_worker_count=1", "grain_per_worker_buffer_size=4"),
]  # fmt: skip

READ = """loading_hosts batch_schedule_file grain_worker_count rl_task warm_start_steps reward_functions
  routed_bias_update_rate rollout_routing_replay rollout_expert_parallelism compile_topology_network_gbps
  reward_processes reward_timeout_seconds reward_failure scale_rewards eval_sampling_strategy gns_window_steps
  gns_calibrate_every gns_report_every gns_hold_tokens gns_windows_before_growth gns_dry_run
  coordinator_address num_processes process_id jax_distributed_initialization_timeout
  elastic min_devices max_restarts_per_hour state_copy_period context_parallel_strategy
  context_parallel_load_balance
  jax_distributed_heartbeat_timeout_seconds skip_first_n_steps_for_profiler profiler_steps prompt
  async_checkpointing checkpoint_format checkpoint_period max_num_checkpoints_to_keep
  checkpoint_keep_period allow_changed_resume dataset_type use_chat_template tokenizer_path bos_token eos_token pad_token"""
"""Shown by the tests of what they are for; here only that something reads them."""

DATA = {
  "": "dataset_path eval_dataset_path eval_fraction dataset_cache_directory add_eos packing num_epoch "
  "max_bad_records tokenize_train_data tokenize_eval_data weights_column dataset_mixture "
  "mixture_schedule grain_train_mixture_config_path grain_packing_type use_truncation "
  "block_cross_document_attention use_chat_template sft_train_on_completion_only",
  "dataset_type=grain grain_train_files=x.jsonl": "train_data_columns grain_file_type grain_train_files grain_eval_files",
  "dataset_type=grain grain_train_files=x.jsonl grain_eval_files=y.jsonl": "eval_data_columns",
  "dataset_type=hf hf_path=FOLDER": "hf_path hf_name hf_data_dir hf_train_files hf_eval_files "
  "train_split hf_eval_split",
}
"""Keys that reading the data reads, by others that make them be read."""


@pytest.mark.parametrize(("observe", "others", "keys"), EFFECTS)
def test_a_key_changes_what_its_condition_says(observe, others, keys):
  before = observe(load(*others.split()))
  for each in keys.split():
    config = load(*others.split(), each)
    assert not names(named(config), each.partition("=")[0]), each
    assert observe(config) != before, each


def test_every_conditional_key_is_shown_to_do_something():
  shown = {each.partition("=")[0] for _, _, keys in EFFECTS for each in keys.split()}
  assert set(CONDITIONAL) <= shown | set(f"{READ} {' '.join(DATA.values())}".split())


@pytest.mark.parametrize("name", fields())
def test_every_key_is_read_by_name(name):
  mesh = fields()[name][0] == "mesh"
  assert (
    is_used(name)
    or (mesh and name.endswith("_parallelism"))
    or name == "block_cross_document_attention"
  )


@pytest.mark.parametrize("others", DATA)
def test_reading_the_data_reads_a_key(others, tmp_path, monkeypatch):
  (tmp_path / "text.txt").write_text("some text " * 90)
  (tmp_path / "x.jsonl").write_text('{"text": "some text"}\n' * 90)
  (tmp_path / "y.jsonl").write_text('{"text": "other text"}\n' * 9)
  monkeypatch.chdir(tmp_path)
  given = ["dataset_path=text.txt", "add_bos=false"] if not others else []
  config = load(
    *given, *others.replace("FOLDER", str(tmp_path)).split(), f"dataset_cache_directory={tmp_path}"
  )
  read = set()
  _record(monkeypatch, type(config.data), read)
  with contextlib.suppress(UserError):
    build_tokenizer(config.data)
    dataset = build_dataset(config.data, 8)
    check_epochs(config.data, dataset.train, 8)
  assert set(DATA[others].split()) <= read


def test_a_plain_run_reads_every_key_that_has_no_condition(tmp_path, monkeypatch):
  (tmp_path / "text.txt").write_text("".join(f"{n} follows {n - 1}\n" for n in range(300)))
  read = set()
  with monkeypatch.context() as patched:
    for section in sections().values():
      _record(patched, section, read)
    # A shape of its own: tests share what they trace, and what is not traced again reads nothing.
    keys = [f"{key}={value}" for key, value in {**SMALLEST, "base_mlp_dim": 44}.items()]
    keys += [f"base_output_directory={tmp_path}", f"dataset_path={tmp_path / 'text.txt'}"]
    keys += ["steps=2", "eval_samples=8", "generate_length=2", "per_device_batch_size=1"]
    assert train(["config=base", *keys, f"dataset_cache_directory={tmp_path}"]) == 0
  always = {name for name, (_, one) in fields().items() if not one.read_when}
  unread = {name for name in always - read if not re.fullmatch(r"(ici|dcn)_\w+_parallelism", name)}
  assert not unread


def _record(patched, section, read):
  def get(self, name):
    if sys._getframe(1).f_code.co_filename not in ("<string>", dataclasses.__file__):
      read.add(name)
    return object.__getattribute__(self, name)

  patched.setattr(section, "__getattribute__", get, raising=False)
