"""Keys of what is learned from, and how: data, optimizer, noise scale and reinforcement learning."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  FIXED,
  FLOAT32,
  INT32,
  PER_START,
  CountOrUnset,
  CountOrZeroOrUnset,
  DevicesOrNone,
  Example,
  Name,
  NonNegative,
  NonNegativeFloat,
  Path,
  Positive,
  PositiveOrUnset,
  Probability,
  Range,
  Seconds,
  Section,
  Seed,
  Weight,
  key,
)
from maxbatch.config.keys.read_when import (
  ADAM,
  BUILT_IN_TASK,
  CALIBRATED,
  CHANGING_BATCH,
  DECAY,
  EVAL_FILES,
  EXPERTS,
  FINITE_PROMPTS,
  FIRST_MOMENT,
  GRAIN,
  HF,
  MEASURED,
  NO_CHAT,
  NO_EVAL_FILES,
  NOISE_SCHEDULE,
  PACKING,
  PROMPTS_OR_REAL_DATA,
  REAL_DATA,
  RECORDS,
  RL,
  ROLLOUT_DEVICES,
  ROLLOUTS,
  SGD,
  TEXT,
  TEXT_FILES,
  TEXT_OR_OWN_PROMPTS,
  THREADS,
  TOKENIZED_TEXT,
  VOCABULARY,
  WARMUP_FRACTION,
  WORKERS,
  WSD,
)


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, heading="the data"):
  """What is trained on and how it is read."""

  dataset_type: Name = key("text", CHANGEABLE, TEXT_OR_OWN_PROMPTS)
  """text: files, each a document; grain or hf: files of records, by MaxText's keys; synthetic:
  random tokens, for timing; or module:function of your own."""
  dataset_path: Path = key("stdlib", CHANGEABLE, TEXT, REAL_DATA, TEXT_FILES)
  """File, folder or glob of text (gzip too); stdlib: the text of the Python standard library."""
  eval_dataset_path: Path = key("", CHANGEABLE, TEXT, REAL_DATA, TEXT_FILES)
  """Validation text, as dataset_path; empty: files of dataset_path named valid, val, dev, eval or
  test, or else eval_fraction of it."""
  eval_fraction: Annotated[float, Range(low=0, high=0.9)] = key(
    0.05, CHANGEABLE, TEXT_OR_OWN_PROMPTS, NO_EVAL_FILES
  )
  """Share of the bytes held out for validation: whole files, and the end of large ones; 0: no
  validation, nor of synthetic data."""
  dataset_cache_directory: Path = key("", CHANGEABLE, TOKENIZED_TEXT, REAL_DATA)
  """Folder of the token caches; empty: the user's cache folder."""
  tokenizer_type: Name = key("byte", FIXED)
  """byte: a token per byte; huggingface: tokenizer.json; sentencepiece: its model file; tiktoken:
  Llama 3's file; or module:attribute of your own."""
  tokenizer_path: Path = key("", CHANGEABLE, VOCABULARY)
  """File of the vocabulary, the folder that holds it, or a model's name on the Hugging Face hub;
  byte needs none."""
  add_bos: bool = key(True, CHANGEABLE)
  """Begin every document with the bos token."""
  add_eos: bool = key(True, CHANGEABLE, TEXT, REAL_DATA, NO_CHAT)
  """End every document with the eos token."""
  bos_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that begins a document, for example <s>; empty: the tokenizer's own."""
  eos_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that ends a document, for example </s>; empty: the tokenizer's own."""
  pad_token: str = key("", CHANGEABLE, VOCABULARY)
  """Token that fills up the last row; empty: the tokenizer's own, else eos_token."""
  data_shuffle_seed: Seed = key(0, FIXED)
  """Random seed of the order of samples, 0 to 2³² − 1."""
  packing: bool = key(True, FIXED, TEXT)
  """Pack several documents into a row, by grain_packing_type; false: one document a row, then
  padding."""
  max_bad_records: NonNegative = key(0, CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA)
  """Bad records (null, no text, not UTF-8, no such column, or prompts that are too long) to skip
  and count; one more is an error."""
  num_epoch: Annotated[int, Range(low=1, limit=INT32, also=-1)] = key(-1, CHANGEABLE, TEXT)
  """Most epochs that a run may take; one that needs more is refused; -1: as many as its budget
  needs."""
  # Files of records, by MaxText's names.
  train_data_columns: tuple[str, ...] = key(
    ("text",), CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, RECORDS
  )
  """Column that holds the documents, for example [text]."""
  eval_data_columns: tuple[str, ...] = key(
    ("text",), CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, RECORDS, EVAL_FILES
  )
  """The same for validation files."""
  tokenize_train_data: bool = key(True, CHANGEABLE, TEXT, REAL_DATA)
  """false: the records hold token ids, which are used as they are."""
  tokenize_eval_data: bool = key(True, CHANGEABLE, TEXT, REAL_DATA)
  """The same for validation files."""
  weights_column: str = key("", CHANGEABLE, TEXT, REAL_DATA)
  """Column that says which tokens count in the loss: 0 or 1 for each token id, or for a whole
  document; empty: all count."""
  grain_file_type: str = key("auto", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: arrayrecord, parquet, tfrecord, jsonl (gzip and zstd too) or arrow; auto:
  by the files' names."""
  grain_train_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: file, folder or glob of records."""
  grain_eval_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, GRAIN)
  """dataset_type grain: the same for validation; empty: as with eval_dataset_path."""
  hf_path: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: folder of a dataset (save_to_disk, Parquet, JSONL or Arrow); parquet, json or
  arrow, with hf_train_files; or a name on the hub."""
  hf_name: str = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: configuration of a dataset given by name."""
  hf_data_dir: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: folder within the dataset."""
  hf_train_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: file, folder or glob of training records; in a folder's dataset, within it."""
  hf_eval_files: Path = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: the same for validation."""
  train_split: str = key("train", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: split to train on, of a dataset that has splits."""
  hf_eval_split: str = key("", CHANGEABLE, TEXT_OR_OWN_PROMPTS, REAL_DATA, HF)
  """dataset_type hf: split for validation; empty: as with eval_dataset_path."""
  # Each is a process.
  grain_worker_count: Annotated[int, Range(low=0, limit=256)] = key(0, CHANGEABLE, TEXT)
  """Grain worker processes for loading; 0: threads only; does not change the data."""
  # Each thread has a load, and so has each place of a buffer.
  grain_num_threads: Annotated[int, Range(low=1, limit=256)] = key(1, CHANGEABLE, TEXT, THREADS)
  """Without worker processes: number of loads read at once; more than 1 helps where reading waits
  for a network."""
  grain_prefetch_buffer_size: Annotated[int, Range(low=1, limit=10_000)] = key(
    2, CHANGEABLE, TEXT, THREADS
  )
  """Without worker processes: loads read ahead, a step's samples each (MaxText: rows)."""
  grain_per_worker_buffer_size: Annotated[int, Range(low=1, limit=10_000)] = key(
    2, CHANGEABLE, TEXT, WORKERS
  )
  """Loads that each worker process reads ahead."""
  # Several sources, and documents as rows.
  dataset_mixture: Annotated[
    tuple[tuple[Path, Weight], ...], Example("[[texts, 0.7], [code, 0.3]]")
  ] = key((), CHANGEABLE, TEXT, REAL_DATA)
  """Sources and their shares of the samples, for example [[texts, 0.7], [code, 0.3]], each a path
  as in dataset_path; []: dataset_path alone."""
  mixture_schedule: Annotated[tuple[tuple[Weight, ...], ...], Example("[[10000, 0.5, 0.5]]")] = key(
    (), CHANGEABLE, TEXT, REAL_DATA
  )
  """Shares that change at a sample, for example [[10000, 0.5, 0.5]]: the sample, then a weight for
  each source of the mixture, in its order."""
  grain_train_mixture_config_path: Path = key("", CHANGEABLE, TEXT, REAL_DATA)
  """JSON file with a mixture in MaxText's form, {"name": {"path": "texts", "weight": 0.7}, …};
  empty: dataset_mixture."""
  grain_packing_type: Literal["concat_then_split", "first_fit", "best_fit"] = key(
    "concat_then_split", CHANGEABLE, TEXT, REAL_DATA, PACKING
  )
  """concat_then_split (documents end to end, cut where a row ends: no padding), or each whole into
  the first_fit or best_fit row (fewer cuts, some padding)."""
  use_truncation: bool = key(False, CHANGEABLE, TEXT, REAL_DATA)
  """Cut documents that are longer than a row at its end, and drop the rest; false: divide them into
  rows, losing nothing."""
  block_cross_document_attention: bool = key(True, CHANGEABLE, TEXT, PACKING)
  """Tokens attend to their own document only; false: to all earlier ones in the row, which is
  faster with attention: flash."""
  use_chat_template: bool = key(False, CHANGEABLE, PROMPTS_OR_REAL_DATA)
  """The column holds conversations (messages of role and content), rendered by the tokenizer's chat
  template; needs tokenizer_type: huggingface."""
  sft_train_on_completion_only: bool = key(False, CHANGEABLE, TEXT, REAL_DATA)
  """Only what the assistant says in conversations counts in the loss; false: all of it."""

  @property
  def segmented(self) -> bool:
    """Whether rows say which tokens belong to one document."""
    return self.packing and self.block_cross_document_attention


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section, heading="the optimizer"):
  """The optimizer, its learning rate, and which parameters it changes."""

  opt_type: Name = key("adamw", FIXED)
  """Optimizer: adamw, sgd, adafactor or muon."""
  learning_rate: NonNegativeFloat = key(0.003, CHANGEABLE)
  """Peak learning rate."""
  lr_schedule_type: Name = key("cosine", CHANGEABLE)
  """Learning rate schedule: constant, cosine, linear or wsd (warm-up, stable, decay)."""
  learning_rate_schedule_steps: CountOrUnset = key(-1, CHANGEABLE)
  """Length of the schedule, warm-up included, in schedule_unit; -1: the whole budget."""
  learning_rate_batch_coupling: Literal["auto", "none", "linear", "sqrt"] = key(
    "auto", CHANGEABLE, CHANGING_BATCH
  )
  """Scale the learning rate with batch / final batch (gns, file, seesaw: first batch): none,
  linear (for SGD), sqrt (for Adam); auto: sqrt with those three."""
  warmup_steps: CountOrZeroOrUnset = key(-1, CHANGEABLE)
  """Length of the warm-up in schedule_unit; -1: warmup_steps_fraction of the schedule."""
  warmup_steps_fraction: Probability = key(0.1, CHANGEABLE, WARMUP_FRACTION)
  """Length of the warm-up as a fraction of the schedule."""
  learning_rate_final_fraction: Probability = key(0.1, CHANGEABLE, DECAY)
  """Final learning rate as a fraction of the peak."""
  wsd_decay_steps_fraction: Probability = key(0.1, CHANGEABLE, WSD)
  """Length of the decay in wsd as a fraction of the schedule after the warm-up."""
  gradient_clipping_threshold: NonNegativeFloat = key(1.0, CHANGEABLE)
  """Maximum global norm of the gradient, averaged over the step's tokens; 0: no clipping."""
  adam_b1: Annotated[float, Range(low=0, high=0.99999)] = key(0.9, FIXED, ADAM)
  """adamw, muon: decay rate of the gradient's moving average."""
  adam_b2: Annotated[float, Range(low=0, high=0.999999)] = key(0.95, FIXED, ADAM)
  """adamw, muon: decay rate of the squared gradient's moving average."""
  adam_eps: NonNegativeFloat = key(1e-08, CHANGEABLE, ADAM)
  """adamw, muon: epsilon added to the denominator."""
  adam_weight_decay: NonNegativeFloat = key(0.1, CHANGEABLE, ADAM)
  """adamw, muon: weight decay of matrices; norms and biases are not decayed."""
  sgd_momentum: Annotated[float, Range(low=0, high=0.99999)] = key(0.9, FIXED, SGD)
  """sgd: momentum."""
  mu_dtype: Literal["float32", "bfloat16"] = key("float32", FIXED, FIRST_MOMENT)
  """Data type of the first moment of adamw and muon, or of sgd's momentum; bfloat16 saves 2 bytes a
  parameter."""
  optimizer_memory_host_offload: bool = key(False, CHANGEABLE)
  """Keep the optimizer's state in host memory between updates, for devices whose memory it fills;
  false: on the devices."""
  shard_optimizer_over_data: bool = key(False, CHANGEABLE)
  """Divide the optimizer's state and what it updates over the data axis too (ZeRO-1), for less memory;
  false: every replica has all."""
  trainable: Annotated[tuple[str, ...], Example('["layers/attention/*", "head"]')] = key((), FIXED)
  """Patterns of the paths of parameters that train, for example ["layers/attention/*", "head"];
  others are frozen; []: all, or only the adapters with lora_rank."""

  batch_by_group: Annotated[
    tuple[tuple[str, Annotated[int, Range(low=1, high=1024)]], ...], Example("[[embedding, 2]]")
  ] = key((), FIXED)
  """Patterns of paths, each with a number of steps over which gradients accumulate for an update:
  [[embedding, 2]]; []: one for all."""


@dataclasses.dataclass(frozen=True)
class NoiseConfig(Section, heading="the gradient noise scale: which batch size is worth using"):
  """How the gradient noise scale is measured and reported, and how it may steer the batch."""

  gns: Literal["off", "norm", "all"] = key("off", CHANGEABLE)
  """Measure the gradient noise scale per example: off, norm (normalization layers only, cheapest)
  or all (every layer)."""
  gns_from_microbatches: bool = key(False, CHANGEABLE)
  """Also estimate it from the gradients of whole microbatches; in reinforcement learning by
  prompts: whether more prompts or more generations help."""
  gns_window_steps: Annotated[int, Range(low=8, limit=INT32)] = key(64, CHANGEABLE, MEASURED)
  """Steps over which an estimate averages; more: less noise, slower response."""
  gns_calibrate_every: NonNegative = key(10, CHANGEABLE, CALIBRATED)
  """With gns: norm, steps between measurements of all layers, which calibrate the whole model's
  prediction (it takes about 20 of them); 0: never."""
  gns_report_every: NonNegative = key(100, CHANGEABLE, MEASURED)
  """Steps between log lines with the noise scale; 0: one at the end."""
  gns_hold_tokens: CountOrZeroOrUnset = key(
    -1, CHANGEABLE, NOISE_SCHEDULE, old_names=("gns_dwell_tokens",)
  )
  """Least number of tokens that batch_schedule: gns trains with a batch size; -1: 1/50 of the
  run."""
  gns_windows_before_growth: Positive = key(3, CHANGEABLE, NOISE_SCHEDULE)
  """Consecutive windows, half overlapping, that must agree before the batch grows."""
  gns_dry_run: bool = key(False, CHANGEABLE, NOISE_SCHEDULE)
  """Log what batch_schedule: gns would do without changing the batch."""


@dataclasses.dataclass(frozen=True)
class RLConfig(Section, heading="reinforcement learning"):
  """Reinforcement learning: what is sampled for a prompt, how it is rewarded, and GRPO's loss."""

  # The sizes; batch_size then counts prompts, and micro_batch_size completions (batch/rl_sizes.py).
  num_generations: Annotated[int, Range(low=2, limit=INT32, also=-1)] = key(-1, FIXED)
  """Completions per prompt (a group); batch_size then counts prompts, micro_batch_size completions
  on all devices; -1: no reinforcement learning."""
  num_iterations: Positive = key(1, FIXED, RL)
  """Optimizer steps per batch of completions; more: fewer rollouts, further from the policy that
  sampled."""
  max_prefill_predict_length: Positive = key(64, CHANGEABLE, RL)
  """Longest prompt, in tokens; the rest of max_target_length is for the completion."""
  rollout_devices: DevicesOrNone = key(0, CHANGEABLE, ROLLOUTS)
  """Devices that only sample, beside the mesh that trains; 0: all devices alternate."""
  rollout_data_parallelism: PositiveOrUnset = key(-1, CHANGEABLE, ROLLOUT_DEVICES)
  """Copies of the policy on the rollout devices; of this key and the next three one may be -1: all
  devices that the others leave."""
  rollout_fsdp_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES)
  """Rollout devices that store the parts of a copy and gather those of a layer when they use it; each
  samples completions of its own."""
  rollout_expert_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES, EXPERTS)
  """Rollout devices over which a mixture's experts are divided; each samples completions of its own."""
  rollout_tensor_parallelism: PositiveOrUnset = key(1, CHANGEABLE, ROLLOUT_DEVICES)
  """Rollout devices over which each matrix product is sharded; they sample the same completions."""
  # A snapshot of the parameters for each.
  rollout_staleness: Annotated[int, Range(low=0, high=64)] = key(0, CHANGEABLE, RL)
  """Steps by which the sampling policy lags, so that the next batch is sampled meanwhile; 0:
  overlap within a batch only, exactly synchronous training."""
  rollout_routing_replay: bool = key(False, CHANGEABLE, RL, EXPERTS)
  """Send a mixture's tokens in training to the experts that sampling chose for them (R3); their
  weights, and the gradient, stay the router's."""
  # The prompts.
  rl_task: str = key("", FIXED, RL)
  """Built-in task with verifiable answers: mix-sort or format; empty: prompts from the data's first
  column, the others for the reward functions."""
  warm_start_steps: NonNegative = key(0, PER_START, RL, BUILT_IN_TASK)
  """Steps of 64 of the task's demonstrations with which a run begins, in {run_name}/warm_start:
  rewards reinforce only what a model sometimes does; 0: none."""
  num_prompts: CountOrUnset = key(-1, FIXED, RL)
  """Prompts of an epoch: the first num_prompts; -1: all of the data; a built-in task then never
  ends."""
  leftover_prompts: Literal["carry", "drop", "error"] = key("carry", FIXED, RL, FINITE_PROMPTS)
  """Prompts at the end of an epoch that do not fill a batch: carry (into the next epoch), drop
  (counted in the metrics) or error."""
  # The evaluations; MaxText's name, whose standard is a distribution of its own.
  eval_sampling_strategy: Literal["standard", "greedy", "both"] = key("standard", CHANGEABLE, RL)
  """Evaluations of pass@k: standard (num_generations completions of a prompt, sampled as in training),
  greedy (one, of the likeliest tokens: pass@1) or both."""
  # The rewards.
  reward_functions: tuple[Name, ...] = key((), CHANGEABLE, RL)
  """Functions that reward completions, summed: module:function of your own, exact or gsm8k (with
  the column answer); []: exact, for rl_task."""
  reward_processes: Annotated[int, Range(low=1, high=256)] = key(2, CHANGEABLE, RL)
  """Processes that run them, one group at a time each, beside every training process."""
  reward_timeout_seconds: Seconds = key(60, CHANGEABLE, RL)
  """Seconds after which a reward function counts as hung."""
  reward_failure: Literal["stop", "zero"] = key("stop", CHANGEABLE, RL)
  """When a reward function raises, hangs or returns no finite numbers: stop, or zero for all
  completions of the prompt, counted in the metrics."""
  # The loss.
  loss_type: Literal["dapo", "grpo", "dr_grpo"] = key("dapo", CHANGEABLE, RL)
  """Average over: dapo (tokens of the step), grpo (tokens of a completion, then completions) or
  dr_grpo (completions times their longest length)."""
  scale_rewards: Literal["group", "none"] = key("group", CHANGEABLE, RL)
  """Divide a group's advantages by the standard deviation of its rewards: group, or none (Dr.
  GRPO)."""
  grpo_beta: NonNegativeFloat = key(0.0, CHANGEABLE, RL)
  """Weight of the KL divergence from the initial policy (estimator k3); 0: no reference is kept."""
  grpo_epsilon: Probability = key(0.2, CHANGEABLE, RL)
  """How far below 1 the probability ratio may go before it is clipped."""
  grpo_epsilon_high: Annotated[float, Range(low=0, limit=FLOAT32, also=-1)] = key(
    -1.0, CHANGEABLE, RL
  )
  """The same above 1 (DAPO's clip-higher: 0.28); -1: grpo_epsilon."""
  importance_sampling_cap: NonNegativeFloat = key(2.0, CHANGEABLE, RL)
  """Cap of the weights that correct tokens for the sampling policy's lag; 0: no weights, and ratios
  against that policy, clipped."""
