"""PyTorch's training step of the same model and rows, as a peer of benchmark_gpu.py.

    python scripts/torch_step.py base_num_decoder_layers=12 … per_device_batch_size=16 steps=12

Keys that are not given are those of DEFAULTS; others are refused. The model is Hugging Face's
LlamaForCausalLM: computed in bfloat16 from weights kept in float32, or in float32 under autocast=true; sdpa
by a fused kernel, torch.compile over the whole model, fused AdamW, gradients clipped by their global norm.
remat_policy=full checkpoints each layer; any other leaves to torch.compile what is kept. A step is launched
before the one before it has ended, as a loop that reads its losses late; seconds are from end to end.

Needs torch and transformers, and nothing of maxbatch.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

DEFAULTS = {
  "base_num_decoder_layers": "2",
  "base_emb_dim": "64",
  "base_mlp_dim": "128",
  "base_num_query_heads": "4",
  "base_num_kv_heads": "4",
  "head_dim": "16",
  "vocab_size": "512",
  "max_target_length": "64",
  "per_device_batch_size": "2",
  "remat_policy": "none",
  "scan_layers": "false",
  "dtype": "bfloat16",
  "weight_dtype": "float32",
  "attention": "auto",
  "autocast": "false",
  "compile": "true",
  "steps": "12",
}


def model_of(keys: Mapping[str, str]) -> transformers.LlamaForCausalLM:
  """The model, with weights drawn at random."""
  # With "sdpa" a mask is made while torch.compile traces, and with a mask no flash kernel runs.
  transformers.AttentionInterface.register("causal", sdpa_attention_forward)
  transformers.AttentionMaskInterface.register("causal", lambda *_, **__: None)
  heads, length = int(keys["base_num_query_heads"]), int(keys["max_target_length"])
  llama: Any = transformers.LlamaConfig
  config = llama(
    vocab_size=int(keys["vocab_size"]),
    hidden_size=int(keys["base_emb_dim"]),
    intermediate_size=int(keys["base_mlp_dim"]),
    num_hidden_layers=int(keys["base_num_decoder_layers"]),
    num_attention_heads=heads,
    num_key_value_heads=int(keys["base_num_kv_heads"]),
    head_dim=int(keys["head_dim"]),
    max_position_embeddings=length,
    tie_word_embeddings=False,
    use_cache=False,
    attn_implementation="causal",
  )
  model: Any = transformers.LlamaForCausalLM(config)
  if keys["remat_policy"] == "full":
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
  return model.train()


def main(arguments: Sequence[str]) -> int:
  """Trains on random tokens and prints each step's seconds."""
  keys = DEFAULTS | dict(argument.split("=", 1) for argument in arguments)
  if unknown := keys.keys() - DEFAULTS.keys():
    print(f"{', '.join(sorted(unknown))}: the keys are {', '.join(DEFAULTS)}", file=sys.stderr)
    return 2
  on_gpu = torch.cuda.is_available()
  device = torch.device("cuda" if on_gpu else "cpu")
  torch.set_float32_matmul_precision("high")
  torch.manual_seed(0)
  with device:
    model: Any = model_of(keys)
  weights = list(model.parameters())
  print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}")
  print(f"parameters: {sum(each.numel() for each in weights):,}", flush=True)
  copy: Any = getattr(torch, "_foreach_copy_")  # noqa: B009
  dtype, autocast = getattr(torch, keys["dtype"]), keys["autocast"] == "true"
  kept, narrowed = weights, dtype != torch.float32 and not autocast
  if narrowed:
    kept = [each.detach().clone() for each in weights]
    for each, narrow in zip(kept, weights, strict=True):
      each.grad = torch.zeros_like(each)
      narrow.data = narrow.data.to(dtype)
  optimizer = torch.optim.AdamW(kept, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
  forward = (
    torch.compile(model, dynamic=False, fullgraph=True) if keys["compile"] == "true" else model
  )
  rows = int(keys["per_device_batch_size"]), int(keys["max_target_length"])

  def step() -> torch.Tensor:
    tokens = torch.randint(int(keys["vocab_size"]), rows, device=device)
    with torch.autocast(device.type, dtype, enabled=autocast):
      loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    if narrowed:
      copy([each.grad for each in kept], [each.grad for each in weights])
    torch.nn.utils.clip_grad_norm_(kept, 1.0)
    optimizer.step()
    if narrowed:
      with torch.no_grad():
        copy(weights, kept)
    model.zero_grad(set_to_none=True)
    return loss.detach()

  def ended(number: int, loss: torch.Tensor, event: Any, before: float) -> float:
    if event is not None:
      event.synchronize()
    now = time.perf_counter()
    print(f"completed step: {number}, seconds: {now - before:.4f}, loss: {loss.item():.3f}")
    sys.stdout.flush()
    return now

  began, waiting = time.perf_counter(), None
  kernels = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
  backends = [
    getattr(torch.nn.attention.SDPBackend, name)
    for name in (kernels.values() if keys["attention"] == "auto" else [kernels[keys["attention"]]])
  ]
  with torch.nn.attention.sdpa_kernel(backends):
    for number in range(int(keys["steps"])):
      loss = step()
      event = torch.cuda.Event() if on_gpu else None
      if event is not None:
        event.record()
      if waiting is not None:
        began = ended(*waiting, began)
      waiting = number, loss, event
    if waiting is not None:
      ended(*waiting, began)
  if on_gpu:
    print(f"device_peak_bytes: {torch.cuda.max_memory_allocated()}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
