"""Every key of a run has an effect on reinforcement learning, or is refused there by name."""

import pytest

from maxbatch.config import schema
from maxbatch.config.declare import declared
from maxbatch.config.load import load_config, without_effect
from maxbatch.errors import UserError
from maxbatch.rl.requirements import check_rl

REFUSED = {
  "": """packing=false grain_packing_type=best_fit use_truncation=true add_eos=false
    block_cross_document_attention=false sft_train_on_completion_only=true weights_column=w
    tokenize_train_data=false tokenize_eval_data=false dataset_path=x eval_dataset_path=x
    dataset_mixture=[[x,1]] mixture_schedule=[[9,1]] grain_train_mixture_config_path=x num_epoch=2
    grain_worker_count=1 grain_num_threads=2 loading_hosts=[0]
    grain_prefetch_buffer_size=3 grain_per_worker_buffer_size=3 expansion_factor_real_data=2
    eval_per_device_batch_size=1 per_device_batch_size_start=2 per_device_batch_size_increment=2
    global_rampup_samples=9 batch_schedule_file=x batch_schedule_unit=steps batch_schedule_length=9
    batch_size_start=8 batch_size_increment=8 gns_max_batch_size=64
    accumulation=fused dropout_rate=0.1 z_loss_multiplier=0.1 load_full_state_path=x
    precision_report=true pad_batch=true shard_optimizer_over_data=true""",
  "rl_task=format": """dataset_type=grain eval_fraction=0.1 max_bad_records=1
    train_data_columns=[ask] eval_data_columns=[ask] grain_file_type=jsonl grain_train_files=x
    grain_eval_files=x hf_path=x hf_name=x hf_data_dir=x hf_train_files=x hf_eval_files=x
    train_split=x hf_eval_split=x""",
  "rl_task= dataset_type=grain train_data_columns=[text,answer]": """hf_path=x hf_name=x hf_data_dir=x hf_train_files=x
    hf_eval_files=x train_split=x hf_eval_split=x warm_start_steps=3""",
  "rl_task= dataset_type=hf train_data_columns=[text,answer]": "grain_file_type=jsonl grain_train_files=x grain_eval_files=x",
}
"""By other keys, those that have no effect with them, or none yet, with a value that asks for one."""

ELSEWHERE = """enable_rampup_batch_size batch_schedule batch_schedule_type lora_alpha lora_targets
  decode_sampling_temperature"""
"""Keys whose refusal other tests show: with the plan's sizes, and without lora_rank."""

NOISE = """gns gns_from_microbatches gns_window_steps gns_calibrate_every gns_report_every
  gns_hold_tokens gns_windows_before_growth gns_dry_run"""

EFFECTIVE = f"""
  run_name base_output_directory steps total_samples total_tokens schedule_unit log_period metrics
  eval_interval eval_samples generate_length prompt decode_sampling_top_k decode_sampling_nucleus_p
  decode_sampling_min_p batch_size global_batch_to_train tokens_per_step per_device_batch_size
  micro_batch_size gradient_accumulation_steps max_target_length
  {" ".join(declared(schema.MeshConfig))}
  {" ".join(declared(schema.DistributedConfig))}
  {" ".join(declared(schema.PipelineConfig))}
  validate_only compile_only compile_topology compile_topology_num_slices
  compile_topology_network_gbps jax_cache_dir
  compiled_step save_compiled_step compiler_flags
  device_memory_gb tokenizer_type tokenizer_path add_bos bos_token eos_token pad_token
  data_shuffle_seed use_chat_template
  {" ".join(declared(schema.OptimizerConfig))}
  enable_checkpointing async_checkpointing checkpoint_format checkpoint_period
  max_num_checkpoints_to_keep checkpoint_keep_period allow_changed_resume load_parameters_path
  {" ".join(declared(schema.RLConfig))}
  {" ".join(declared(schema.ProfilingConfig))}
  precision dtype weight_dtype weight_rounding grad_dtype quantization loss_scale initial_loss_scale
  min_loss_scale max_loss_scale loss_scale_window loss_scale_growth_factor
  loss_scale_backoff_factor max_consecutive_skipped_steps metrics_writers write_report
"""

SAID = "dataset_cache_directory"
"""Keys without effect that change nothing of the training: named at the start."""

KEYS = """config=base num_generations=4 batch_size=4 accumulation=streamed rl_task=format
  reward_functions=[exact]"""


@pytest.mark.parametrize("others", REFUSED)
def test_keys_without_effect_are_refused_by_name(others):
  for given in REFUSED[others].split():
    with pytest.raises(UserError) as caught:
      _check(given, *others.split())
    key, _, value = given.partition("=")
    said = str(caught.value)
    assert said.startswith(key), said
    assert value.strip("[],0123456789") in said
    assert f"leave it out, or set {key}=" in said or f"for example {key}=" in said, said
  _check(*others.split())


def test_a_folder_for_caches_is_named_and_refuses_no_run():
  [line] = without_effect(load_config([*KEYS.split(), "dataset_cache_directory=tokens"]))
  assert line == (
    "Without effect: dataset_cache_directory=tokens, with num_generations=4; there is one with "
    "num_generations=-1"
  )


def _check(*keys: str) -> None:
  config = load_config([*KEYS.split(), *keys])
  without_effect(config)
  check_rl(config)


def test_every_key_is_refused_or_has_an_effect():
  refused = {each.partition("=")[0] for keys in REFUSED.values() for each in keys.split()}
  model = {key for key, (section, _) in schema.fields().items() if section == "model"}
  result = refused | model | set(f"{ELSEWHERE} {NOISE} {EFFECTIVE} {SAID}".split())
  assert result == set(schema.fields())
