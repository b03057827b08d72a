"""What a resumed run may change: every key is in exactly one of three classes, by test.

A new key is decided on here. FIXED keys give what is trained already its meaning: a resume with
another value is refused, unless allow_changed_resume=true. CHANGEABLE ones apply from the resume on,
and what changed is printed key by key. The keys OF_ONE_START say what a start does beside training,
and where; they are not compared.
"""


def _keys(*groups: str) -> frozenset[str]:
  return frozenset(key for group in groups for key in group.split())


FIXED = _keys(
  # The model: its arrays, and what they compute.
  """decoder_block vocab_size base_emb_dim base_num_decoder_layers base_num_query_heads
  base_num_kv_heads head_dim base_mlp_dim mlp_activation normalization normalization_layer_epsilon
  use_pre_norm use_post_attn_norm use_post_ffw_norm position_embedding max_position_embeddings
  rope_type rope_max_timescale local_rope_max_timescale rope_linear_scaling_factor rope_factor
  rope_low_freq_factor rope_high_freq_factor original_max_position_embeddings sliding_window_size
  layer_types query_pre_attn_scalar attn_logits_soft_cap final_logits_soft_cap scale_embedding
  logits_via_embedding use_qk_norm qk_norm_across_heads attention_qkv_bias attention_out_bias
  mlp_bias lora_rank lora_alpha lora_targets""",
  # How weights and moments are kept.
  "weight_dtype mu_dtype",
  # What it is trained to do, and with which draws.
  "z_loss_multiplier dropout_rate init_weights_seed",
  # Which samples come in which order. What is in the files is compared by fingerprint.
  "tokenizer_type data_shuffle_seed packing max_target_length",
  # The optimizer's state: averages of gradients, with these weights, of these parameters.
  "opt_type adam_b1 adam_b2 sgd_momentum trainable",
  # Which prompt comes when: a position counts pairs, each as often as it is trained on.
  "rl_task num_prompts leftover_prompts num_generations num_iterations",
)

CHANGEABLE = _keys(
  # How long, and what is shown and measured on the way.
  """steps total_samples total_tokens schedule_unit log_period metrics metrics_writers eval_interval eval_samples
  write_report generate_length prompt decode_sampling_temperature decode_sampling_top_k
  decode_sampling_nucleus_p decode_sampling_min_p gns gns_from_microbatches gns_window_steps
  gns_calibrate_every gns_report_every gns_dwell_tokens gns_windows_before_growth gns_dry_run""",
  # The batch: another one takes effect at the sample that comes next.
  """batch_size global_batch_to_train tokens_per_step per_device_batch_size micro_batch_size
  gradient_accumulation_steps enable_rampup_batch_size per_device_batch_size_start
  per_device_batch_size_increment global_rampup_samples batch_schedule batch_schedule_file
  batch_schedule_type batch_schedule_unit batch_schedule_length batch_size_start
  batch_size_increment gns_max_batch_size""",
  # The rule of each update, of which the state keeps nothing.
  """learning_rate lr_schedule_type learning_rate_schedule_steps learning_rate_batch_coupling
  warmup_steps warmup_steps_fraction learning_rate_final_fraction wsd_decay_steps_fraction
  gradient_clipping_threshold adam_eps adam_weight_decay""",
  # The format that is computed in, and the loss's scale, which a checkpoint notes.
  """precision dtype weight_rounding grad_dtype loss_scale initial_loss_scale min_loss_scale
  max_loss_scale loss_scale_window loss_scale_growth_factor loss_scale_backoff_factor
  max_consecutive_skipped_steps precision_report""",
  # How the same is computed, on which devices, and how it is loaded and saved.
  """model_name attention optimizer_memory_host_offload scan_layers remat_policy decoder_layer_input query_proj
  key_proj value_proj context attention_out out_proj mlpwi mlpwi_0 mlpwi_1 mlpwo num_vocab_tiling accumulation
  expansion_factor_real_data loading_hosts eval_per_device_batch_size num_simulated_devices
  ici_data_parallelism ici_fsdp_parallelism ici_tensor_parallelism ici_pipeline_parallelism
  dcn_data_parallelism dcn_fsdp_parallelism dcn_tensor_parallelism dcn_pipeline_parallelism
  pipeline_schedule num_pipeline_microbatches num_pipeline_repeats num_layers_per_pipeline_stage
  pipeline_delay_activation_forwarding pipeline_stash grain_worker_count grain_num_threads
  grain_prefetch_buffer_size grain_per_worker_buffer_size enable_checkpointing async_checkpointing
  checkpoint_format checkpoint_period max_num_checkpoints_to_keep checkpoint_keep_period""",
  # Where the data come from: what is there is compared by fingerprint.
  """dataset_type dataset_path eval_dataset_path eval_fraction dataset_cache_directory
  dataset_mixture mixture_schedule grain_train_mixture_config_path grain_packing_type use_truncation
  block_cross_document_attention use_chat_template sft_train_on_completion_only""",
  # Likewise the vocabulary; what these make of the text is in the fingerprint of its tokens.
  "tokenizer_path add_bos add_eos bos_token eos_token pad_token max_bad_records",
  """num_epoch train_data_columns eval_data_columns tokenize_train_data tokenize_eval_data
  weights_column grain_file_type grain_train_files grain_eval_files hf_path hf_name hf_data_dir hf_train_files
  hf_eval_files train_split hf_eval_split""",
  # Reinforcement learning: the rule of each update, and who samples and rewards.
  """max_prefill_predict_length rollout_devices rollout_staleness reward_functions reward_processes
  reward_timeout_seconds reward_failure loss_type scale_rewards grpo_beta grpo_epsilon
  grpo_epsilon_high importance_sampling_cap""",
)

OF_ONE_START = _keys(
  "run_name base_output_directory allow_changed_resume jax_cache_dir device_memory_gb",
  "validate_only compile_only compile_topology compile_topology_num_slices save_compiled_step",
  "compiler_flags",
  "compiled_step coordinator_address num_processes process_id skip_jax_distributed_system",
  "jax_distributed_initialization_timeout jax_distributed_heartbeat_timeout_seconds",
  "profiler skip_first_n_steps_for_profiler profiler_steps",
  "hang_timeout_seconds load_parameters_path load_full_state_path warm_start_steps",
)
