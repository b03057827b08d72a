"""The conditions under which keys are read, where not every run reads them."""

from maxbatch.config.declare import besides, when

# What a run trains on.
TEXT = when({"num_generations": -1}, refuses=True)
# A folder for caches says nothing of the training, and stands in files that commands share.
TOKENIZED_TEXT = when({"num_generations": -1})
RL = when({"num_generations": besides(-1, like=8)})
ROLLOUTS = when({"num_generations": besides(-1, like=8)}, refuses=True)
ROLLOUT_DEVICES = when({"rollout_devices": besides(0, like=4)}, refuses=True)
TEXT_OR_OWN_PROMPTS = when({"num_generations": -1}, {"rl_task": ""}, refuses=True)
BUILT_IN_TASK = when({"rl_task": besides("", like="mix-sort")}, refuses=True)
FINITE_PROMPTS = when({"rl_task": ""}, {"num_prompts": besides(-1, like=64)})

# The batch.
RAMPUP = when({"enable_rampup_batch_size": True}, {"batch_schedule_type": "rampup"}, refuses=True)
RAMP = when({"batch_schedule_type": ["linear", "doubling"]}, refuses=True)
RAMP_OR_SEESAW = when({"batch_schedule_type": ["linear", "doubling", "seesaw"]}, refuses=True)
LINEAR_RAMP = when({"batch_schedule_type": "linear"}, refuses=True)
SCHEDULE_WITH_UNIT = when(
  {"batch_schedule_type": ["linear", "doubling"]},
  {"batch_schedule": besides((), "gns", "file", like=((0, 32), (10000, 64)))},
)
CHANGING_BATCH = when(
  {"batch_schedule_type": besides("constant", like="doubling")},
  {"batch_schedule": besides((), like=((0, 32), (10000, 64)))},
  {"enable_rampup_batch_size": True},
)
FILE_SCHEDULE = when({"batch_schedule": "file"}, refuses=True)
NOISE_SCHEDULE = when({"batch_schedule": "gns"}, refuses=True)
CONTEXT = when(
  {"ici_context_parallelism": besides(1, like=4)},
  {"dcn_context_parallelism": besides(1, like=2)},
  refuses=True,
)
NO_PIPELINE = when({"pipeline_schedule": "none"}, refuses=True)
FUSED = when({"accumulation": "fused"}, refuses=True)
PIPELINE = when({"pipeline_schedule": besides("none", like="gpipe")}, refuses=True)

# The devices and the processes.
HERE = when({"compile_topology": ""}, {"num_simulated_devices": 0})
TOPOLOGY = when({"compile_topology": besides("", like="v5e-8")}, refuses=True)
ELASTIC = when({"elastic": True})
PROCESSES = when({"skip_jax_distributed_system": False, "compile_topology": ""})

# The data.
REAL_DATA = when({"dataset_type": besides("synthetic", like="text")})
PROMPTS_OR_REAL_DATA = when(
  {"dataset_type": besides("synthetic", like="text")},
  {"num_generations": besides(-1, like=8)},
)
TEXT_FILES = when({"dataset_type": "text"}, refuses=True)
GRAIN = when({"dataset_type": "grain"}, refuses=True)
HF = when({"dataset_type": "hf"}, refuses=True)
RECORDS = when({"dataset_type": ["grain", "hf"]}, refuses=True)
EVAL_FILES = when(
  {"dataset_type": "grain", "grain_eval_files": besides("", like="eval.jsonl")},
  {"dataset_type": "hf", "hf_eval_files": besides("", like="eval.jsonl")},
  {"dataset_type": "hf", "hf_eval_split": besides("", like="validation")},
)
NO_EVAL_FILES = when(
  {"dataset_type": "synthetic"},
  {"dataset_type": "text", "eval_dataset_path": ""},
  {"dataset_type": "grain", "grain_eval_files": ""},
  {"dataset_type": "hf", "hf_eval_files": "", "hf_eval_split": ""},
)
VOCABULARY = when({"tokenizer_type": besides("byte", like="huggingface")}, refuses=True)
NO_CHAT = when({"use_chat_template": False})
PACKING = when({"packing": True})
THREADS = when({"grain_worker_count": 0})
WORKERS = when({"grain_worker_count": besides(0, like=2)})

# The model and its precision.
ROPE = when({"position_embedding": "rope"}, refuses=True)
LLAMA_ROPE = when({"rope_type": "llama3.1"}, refuses=True)
LONGER_ROPE = when({"rope_type": ["llama3.1", "yarn"]}, refuses=True)
YARN = when({"rope_type": "yarn"}, refuses=True)
WINDOW = when({"sliding_window_size": besides(0, like=1024)}, refuses=True)
MLA = when({"attention_type": "mla"}, refuses=True)
NOT_MLA = when({"attention_type": "global"}, refuses=True)
QK_NORM = when({"use_qk_norm": True}, refuses=True)
CUSTOM_REMAT = when({"remat_policy": ["custom", "explore"]}, refuses=True)
GATED = when({"mlp_activation": ["swiglu", "geglu", "clamped_swiglu"]}, refuses=True)
CLAMPED = when({"mlp_activation": "clamped_swiglu"}, refuses=True)
NOT_GATED = when({"mlp_activation": "gelu"}, refuses=True)
EXPERTS = when({"num_experts": besides(1, like=8)}, refuses=True)
EXPERT_BIAS = when({"routed_bias": True}, refuses=True)
EXPERT_BALANCE = when({"load_balance_loss_weight": besides(0.0, like=0.01)}, refuses=True)
EXPERT_GROUPS = when({"n_routing_groups": besides(-1, like=4)}, refuses=True)
ADAPTERS = when({"lora_rank": besides(0, like=16)}, refuses=True)
BFLOAT16_WEIGHTS = when({"weight_dtype": "bfloat16"}, refuses=True)
_AUTO_SCALE = (
  {"loss_scale": "auto", "dtype": "float16"},
  {"loss_scale": "auto", "dtype": "auto", "precision": "float16"},
  {"loss_scale": "auto", "grad_dtype": "float16"},
)
DYNAMIC_SCALE = when({"loss_scale": "dynamic"}, *_AUTO_SCALE)
LOSS_SCALE = when({"loss_scale": besides("auto", "none", like="dynamic")}, *_AUTO_SCALE)

# The optimizer and the noise scale.
WARMUP_FRACTION = when({"warmup_steps": -1})
DECAY = when({"lr_schedule_type": besides("constant", like="cosine")})
WSD = when({"lr_schedule_type": "wsd"})
ADAM = when({"opt_type": ["adamw", "muon"]})
SGD = when({"opt_type": "sgd"})
FIRST_MOMENT = when({"opt_type": besides("adafactor", like="adamw")}, refuses=True)
MEASURED = when({"gns": besides("off", like="norm")}, {"gns_from_microbatches": True})
CALIBRATED = when({"gns": "norm"})

# What a run does beside training.
SAMPLE_TEXT = when({"generate_length": besides(0, like=160)})
PROFILER = when({"profiler": "xplane"})
CHECKPOINTS = when({"enable_checkpointing": True})
