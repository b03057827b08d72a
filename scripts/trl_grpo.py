"""One run of TRL's GRPOTrainer for compare_trl.py, by an interpreter that has trl and need not have maxbatch.

python scripts/trl_grpo.py SPEC.json RESULT.json
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# It is not among what this package needs.
trl: Any = importlib.import_module("trl")
BOS, EOS, PAD = 256, 257, 258


def tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Bytes of ASCII as tokens, with the ids that maxbatch's tokenizer gives them."""
  names = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
  vocabulary = {chr(code): code for code in range(32, 127)} | names
  inner: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
  inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
  inner.decoder = decoders.Fuse()
  inner.post_processor = processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", BOS)]
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
  )


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
  """1 for the answer and nothing else."""
  return [
    float(text.strip() == right.strip()) for text, right in zip(completions, answer, strict=True)
  ]


class Clock(transformers.TrainerCallback):
  """Seconds of each step."""

  def __init__(self) -> None:
    self.seconds: list[float] = []
    self._began = 0.0

  def on_step_begin(self, *_: Any, **__: Any) -> None:
    """Before the first microbatch of a step."""
    self._began = time.perf_counter()

  def on_step_end(self, *_: Any, **__: Any) -> None:
    """After the update."""
    self.seconds.append(time.perf_counter() - self._began)


def main() -> None:
  """Trains as the specification says."""
  spec, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
  torch.set_num_threads(spec["cores"])
  clock = Clock()
  trainer = trl.GRPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
    reward_funcs=exact,
    args=trl.GRPOConfig(
      output_dir=str(result.parent / "trl"),
      per_device_train_batch_size=spec["micro_batch_size"],
      gradient_accumulation_steps=spec["microbatches"],
      num_generations=spec["num_generations"],
      max_completion_length=spec["completion"],
      max_steps=spec["steps"],
      learning_rate=spec["learning_rate"],
      lr_scheduler_type="constant_with_warmup",
      warmup_steps=spec["warmup_steps"],
      adam_beta2=spec["adam_b2"],
      weight_decay=0.0,
      max_grad_norm=1.0,
      loss_type="dr_grpo",
      scale_rewards="none",
      beta=0.0,
      temperature=1.0,
      shuffle_dataset=False,
      gradient_checkpointing=False,
      bf16=False,
      use_cpu=True,
      seed=spec["seed"],
      logging_steps=1,
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(spec["prompts"]),
    processing_class=tokenizer(),
    callbacks=[clock],
  )
  trainer.train()
  rewards = [record["reward"] for record in trainer.state.log_history if "reward" in record]
  results = {"rewards": rewards, "seconds": clock.seconds, "version": trl.__version__}
  result.write_text(json.dumps(results))


if __name__ == "__main__":
  main()
