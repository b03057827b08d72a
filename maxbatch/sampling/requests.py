"""The texts that are asked for: prompts of a key or a file; and what a Hugging Face folder says of its texts."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxbatch.config.find import shown, user_path
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config, DataConfig
from maxbatch.data.chat import Chat, chat_of
from maxbatch.data.chat_template import TemplateFailedError
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.tokenizers.libraries import HuggingFaceTokenizer
from maxbatch.errors import UserError
from maxbatch.sampling.text import encoded

_LINE = '{"prompt": "Once"} or {"messages": [{"role": "user", "content": "Hi"}]}'

Prompt = str | list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Request:
  """One text to be written."""

  prompt: Prompt
  ids: tuple[int, ...]
  number: int
  """Among those of the same prompt, from 0."""


class PromptEncoder:
  """Makes tokens of prompts, by the tokenizer and the chat template that a run was trained with."""

  def __init__(self, data: DataConfig, tokenizer: Tokenizer):
    """Raises UserError for a chat template that cannot be used."""
    self._tokenizer, self._add_bos = tokenizer, data.add_bos
    self._tokenizer_path = data.tokenizer_path
    self._chat = chat_of(data, tokenizer) if data.use_chat_template else None

  def ends(self, stop: Sequence[str]) -> list[int]:
    """Returns the ids that end a text: of the document, of an answer, and those of `stop`. Raises
    UserError: a text of `stop` is not one token."""
    try:
      answer = self._chat.end_of_answer() if self._chat else None
    except TemplateFailedError as error:
      raise UserError(
        f"tokenizer_path={self._tokenizer_path}: its chat template does not render an answer: {error}; "
        "correct it, or set use_chat_template=false"
      ) from error
    own = [self._tokenizer.eos_id, *([] if answer is None else [answer])]
    return own + [self._one_token(text) for text in stop]

  def _one_token(self, text: str) -> int:
    tokenizer = self._tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer):
      special = tokenizer.inner.token_to_id(text)
      if special is not None:
        return special
    ids = tokenizer.encode(text.encode(errors="surrogateescape")).tolist()
    if len(ids) != 1:
      last = tokenizer.decode(ids[-1:]) if ids else "."
      raise UserError(
        f"stop: {shown(text)!r} is {len(ids)} tokens of this tokenizer, and a text is stopped by one; "
        f"for example stop=[{json.dumps(last, ensure_ascii=False)}]"
      )
    return ids[0]

  def __call__(self, prompt: Prompt) -> tuple[int, ...]:
    """Returns the tokens of a prompt. Raises UserError: messages without a chat template, or which
    it refuses."""
    if self._chat is None:
      if not isinstance(prompt, str):
        raise UserError(
          "the prompt is messages, and the run was trained without a chat template; give a text, or "
          "the keys of one: use_chat_template=true tokenizer_type=huggingface tokenizer_path=…"
        )
      return tuple(encoded(self._tokenizer, prompt, add_bos=self._add_bos))
    ids = tuple(_rendered(self._chat, prompt))
    if not ids:
      raise UserError(
        f"the chat template of tokenizer_path={self._tokenizer_path} renders nothing for "
        f"{shown(json.dumps(prompt))}; correct it, or set use_chat_template=false"
      )
    return ids


def _rendered(chat: Chat, prompt: Prompt) -> list[int]:
  messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
  try:
    return chat.prompt(messages)
  except TemplateFailedError as error:
    raise UserError(
      f"the chat template of tokenizer_path={chat.tokenizer.file.path} refuses "
      f"{shown(json.dumps(messages))}: {error}; prompts are such as {_LINE}"
    ) from error


def requests(
  prompts: Sequence[Prompt], num_samples: int, encode: PromptEncoder
) -> Iterator[Request]:
  before: Counter[tuple[int, ...]] = Counter()
  for prompt in prompts:
    ids = encode(prompt)
    for _ in range(num_samples):
      yield Request(prompt, ids, before[ids])
      before[ids] += 1


def read_prompts(file: str) -> list[Prompt]:
  """Reads the prompts of a file: of each line the text, or in a .jsonl its `prompt` or `messages`.
  Raises UserError: it cannot be read, or a line is no prompt."""
  try:
    lines = user_path(file).read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
    raise UserError(
      f"prompts_file={shown(file)} cannot be read: {reason}; give a file with a prompt in each line, "
      f"or a .jsonl of lines such as {_LINE}"
    ) from error
  if not lines:
    raise UserError(f"prompts_file={shown(file)} is empty; write a prompt into each line")
  if not file.endswith(".jsonl"):
    return list(lines)
  where = f"prompts_file={shown(file)}, line"
  return [_prompt_of(line, f"{where} {n}") for n, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> Prompt:
  try:
    result = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{where}: no JSON ({error}); lines are such as {_LINE}") from None
  result = result if isinstance(result, dict) else {}
  prompt, messages = result.get("prompt"), result.get("messages")
  if isinstance(prompt, str):
    return prompt
  if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
    return messages
  raise UserError(f"{where}: it has neither a prompt nor messages; lines are such as {_LINE}")


_TOKENIZERS = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}
_GENERATION = "generation_config.json"


def config_of_folder(folder: Path, arguments: Sequence[str]) -> Config:
  """Loads the configuration of a folder's model, with its tokenizer and its longest rows.

  Args:
    arguments: keys on top of what the folder says.

  Raises UserError: it has no tokenizer that can be read, or a key is wrong.
  """
  result = next((name for name in _TOKENIZERS if (folder / name).is_file()), None)
  given = {argument.partition("=")[0] for argument in arguments}
  if result is None and "tokenizer_type" not in given:
    raise UserError(
      f"{folder} has neither {' nor '.join(_TOKENIZERS)}; give the tokenizer, for example "
      "tokenizer_type=huggingface tokenizer_path=my_tokenizer"
    )
  own = [f"tokenizer_type={_TOKENIZERS[result]}", f"tokenizer_path={folder}"] if result else []
  # Whether a text begins with a token of its own the tokenizer says itself, once it is read.
  keys = ["config=base", f"model_name={folder}", *own, "add_bos=false", "add_eos=false"]
  config = load_config([*keys, *arguments])
  batch, data = config.batch, config.data
  if "max_target_length" not in given:
    batch = dataclasses.replace(batch, max_target_length=config.model.max_position_embeddings)
  if "add_bos" not in given:
    data = dataclasses.replace(data, add_bos=_begins_texts(config))
  return dataclasses.replace(config, batch=batch, data=data)


def _begins_texts(config: Config) -> bool:
  tokenizer = build_tokenizer(config.data)
  if not isinstance(tokenizer, HuggingFaceTokenizer):
    return True  # As Llama's and Gemma's, which come in such files.
  return tokenizer.inner.encode("a").ids[:1] == [tokenizer.bos_id]


def ends_of_folder(folder: Path) -> list[int]:
  """Reads the ids that end a text from a folder's generation_config.json, such as those of a chat's
  answers. Raises UserError: it cannot be read."""
  path = folder / _GENERATION
  try:
    result = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
  except (FileNotFoundError, KeyError):
    return []
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise UserError(f"{path} cannot be read ({error}); correct it, or remove it") from error
  ids = result if isinstance(result, list) else [result]
  return [id_ for id_ in ids if isinstance(id_, int)]
