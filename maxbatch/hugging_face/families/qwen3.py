"""Qwen 3: Llama with queries and keys normalized in each head."""

from maxbatch.hugging_face.families.llama import ACTIVATION, NOT_PARAMETERS, QK_NORMS, SAME, TENSORS
from maxbatch.hugging_face.families.qwen2 import QWEN_DEFAULTS, WINDOWS
from maxbatch.hugging_face.family import Family
from maxbatch.hugging_face.parts import BIASES, HEADS, ROPE

QWEN3 = Family(
  model_types=("qwen3",),
  architectures=("Qwen3ForCausalLM",),
  same=SAME,
  constants={"use_qk_norm": True},
  choices=ACTIVATION,
  fixed={"attention_dropout": 0.0},
  parts=(HEADS, ROPE, WINDOWS, BIASES),
  defaults={**QWEN_DEFAULTS, "head_dim": 128},
  tensors=(*TENSORS, *QK_NORMS),
  not_parameters=NOT_PARAMETERS,
)
