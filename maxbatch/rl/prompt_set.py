"""The prompts of a run: where they come from, and what identifies them."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence

from maxbatch.config.schema import Config
from maxbatch.config.yaml_file import shown
from maxbatch.data.registry import build_tokenizer
from maxbatch.errors import UserError
from maxbatch.rl.prompt_files import read_prompts
from maxbatch.rl.prompts import Prompt, Prompts
from maxbatch.rl.tasks import task_named
from maxbatch.sampling.requests import PromptEncoder


@dataclasses.dataclass(frozen=True)
class PromptSet:
  """What a run samples for, and what it is evaluated on."""

  train: Prompts
  validation: Sequence[Prompt]
  """The first eval_samples; none: there is no evaluation."""
  fingerprint: str
  """Equal exactly when the prompts to train on are."""
  validation_fingerprint: str
  description: str
  num_skipped: int = 0
  """Bad records that were skipped."""


def prompt_set(config: Config) -> PromptSet:
  """The prompts of the task that rl_task names, or of the data.

  Raises:
    UserError: there are none, or there is no end to those to evaluate on.
  """
  name, wanted, data = config.rl.rl_task, config.run.eval_samples, config.data
  if not name:
    return _of_files(config)
  task, seed = task_named(name), data.data_shuffle_seed
  if wanted == -1:
    raise UserError(
      f"eval_samples=-1: the prompts of rl_task={name} have no end; for example eval_samples=64"
    )
  held_out = [task.prompt(seed, number, "validation") for number in range(wanted)]
  own = f"{name}-{seed}"
  return PromptSet(
    train=task.prompts(seed),
    validation=held_out,
    fingerprint=own,
    validation_fingerprint=f"{own}-{wanted}",
    description=f"rl_task={name}: prompts without end, seed {seed}; {wanted} others to evaluate on",
  )


def too_long(config: Config) -> Callable[[str], str]:
  """Says of a prompt why it is too long; nothing where it is not."""
  places = config.rl.max_prefill_predict_length
  encode = PromptEncoder(config.data, build_tokenizer(config.data))

  def problem(text: str) -> str:
    count = len(encode(text))
    if count <= places:
      return ""
    return (
      f"the prompt {shown(text)} has {count} tokens, and max_prefill_predict_length={places}; for "
      f"example max_prefill_predict_length={count}"
    )

  return problem


def _of_files(config: Config) -> PromptSet:
  found, wanted = read_prompts(config.data, too_long(config)), config.run.eval_samples
  train = [found.train.at(number) for number in range(found.train.count)]
  count = found.validation.count if wanted == -1 else min(wanted, found.validation.count)
  held_out = [found.validation.at(number) for number in range(count)]
  return PromptSet(
    train=found.train,
    validation=held_out,
    fingerprint=_hashed(train),
    validation_fingerprint=_hashed(held_out),
    description=f"{len(train):,} prompts; {len(held_out):,} others to evaluate on",
    num_skipped=found.num_skipped,
  )


def _hashed(prompts: Iterable[Prompt]) -> str:
  digest = hashlib.sha256()
  for prompt in prompts:
    digest.update(json.dumps([prompt.text, dict(prompt.columns)], default=str).encode())
  return digest.hexdigest()[:16]
