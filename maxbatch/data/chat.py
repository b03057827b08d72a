"""Conversations as documents: the tokenizer's own chat template, and which tokens are the assistant's.

A template is a program in Jinja that comes with a tokenizer; it runs in a sandbox and without a
clock (chat_template.py), so that the same records give the same tokens. What the assistant says is found in the text
that it renders: where the template marks it with {% generation %}, or else as what a message adds to
what the messages before it render with the prompt for an answer. The whole text is then tokenized at
once, and a token counts if all of it lies in what the assistant says.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.chat_template import ChatTemplate, TemplateFailedError, compiled_template
from maxbatch.data.formats.format import Bad
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.tokenizers.libraries import HuggingFaceTokenizer, declared_tokens
from maxbatch.errors import UserError

# Characters of no meaning, which no text that is meant to be read holds.
_BEGIN, _END = "\U000f0000", "\U000f0001"
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_ANSWER = "an answer"
_EXAMPLE = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'


class Conversation(NamedTuple):
  """A document of tokens that count or do not."""

  ids: np.ndarray
  counted: np.ndarray
  """uint8, of the same length: 1 where the token counts as a target."""


class _Span(NamedTuple):
  """Characters of the rendered text that an assistant says."""

  begin: int
  end: int


@dataclasses.dataclass(frozen=True)
class Chat:
  """How conversations become tokens; loaded from its texts again where it is unpickled."""

  tokenizer: HuggingFaceTokenizer
  template: str
  tokens: tuple[tuple[str, str], ...]
  """Special tokens by the names that templates give them."""
  completion_only: bool
  """Whether only what assistants say counts."""

  @property
  def version(self) -> str:
    """Changes whenever some conversation gives other tokens or weights."""
    content = json.dumps([self.template, self.tokens, self.completion_only, 1])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()

  @functools.cached_property
  def _compiled(self) -> ChatTemplate:
    """The template. Raises jinja2's TemplateSyntaxError if it is none."""
    # As a call block, of which Jinja keeps the rules for white space and variables.
    return compiled_template(
      _GENERATION.sub(_call, self.template),
      marked_generation=lambda caller: f"{_BEGIN}{caller()}{_END}",
    )

  @functools.cached_property
  def _inner(self) -> Any:
    """The library's tokenizer, by which special tokens in a text are special."""
    inner = self.tokenizer.load(self.tokenizer.file)
    inner.encode_special_tokens = False
    return inner

  @functools.cached_property
  def _special(self) -> list[str]:
    added = self._inner.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]

  def __getstate__(self) -> dict[str, object]:
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}

  def __call__(self, value: object) -> Conversation | Bad:
    messages = _messages(value)
    if isinstance(messages, Bad):
      return messages
    for text in _texts(messages):
      if bad := [each for each in (*self._special, _BEGIN, _END) if each in text]:
        return Bad(f"a message holds {bad[0]!a}, which the template uses to end or mark one")
    try:
      text, spans = self._rendered(messages)
    except TemplateFailedError as error:
      return Bad(f"the chat template refuses it: {error}")
    encoding = self._inner.encode(text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.int64)
    if not self.completion_only:
      return Conversation(ids, np.ones(len(ids), np.uint8))
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    counted = np.zeros(len(ids), np.uint8)
    for span in spans:
      counted |= (span.begin <= begins) & (ends <= span.end) & (begins < ends)
    if not counted.any():
      return Bad("there is no message of an assistant to train on")
    return Conversation(ids, counted)

  def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of a conversation up to where an assistant's answer begins. Raises
    TemplateFailedError."""
    return self._ids(self._render(messages, add_generation_prompt=True))

  def end_of_answer(self) -> int | None:
    """Returns the special token with which the template ends what an assistant says, if there is
    one. Raises TemplateFailedError."""
    asked = [{"role": "user", "content": "?"}]
    text = self._render([*asked, {"role": "assistant", "content": _ANSWER}])
    after = self._ids(text.rpartition(_ANSWER)[2])
    return next((id_ for id_ in after if self._inner.id_to_token(id_) in self._special), None)

  def _ids(self, text: str) -> list[int]:
    plain = text.replace(_BEGIN, "").replace(_END, "")
    return self._inner.encode(plain, add_special_tokens=False).ids

  def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[_Span]]:
    """Renders the conversation; returns its text and the spans that are trained on."""
    text = self._render(messages)
    if not self.completion_only:
      return text.replace(_BEGIN, "").replace(_END, ""), []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if _BEGIN in text:
      text, spans = _marked(text)
      if len(spans) != len(answers):
        raise TemplateFailedError(f"{len(answers)} answers, of which it marks {len(spans)}")
    else:
      spans = [self._added(messages, answer, text) for answer in answers]
    # An answer of weight 0 is not trained on.
    wanted = [messages[answer].get("weight", 1) for answer in answers]
    return text, [span for span, weight in zip(spans, wanted, strict=True) if weight]

  def _added(self, messages: Sequence[Mapping[str, Any]], answer: int, text: str) -> _Span:
    before = self._render(messages[:answer], add_generation_prompt=True)
    after = self._render(messages[: answer + 1])
    if not (after.startswith(before) and text.startswith(after)):
      raise TemplateFailedError(
        f"messages before and after answer {answer} change how it is rendered, so what the "
        "assistant says cannot be found; mark it in the template with {% generation %} and "
        "{% endgeneration %}"
      )
    return _Span(len(before), len(after))

  def _render(
    self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
  ) -> str:
    """Returns the conversation's text. Raises TemplateFailedError: it refuses the conversation."""
    return self._compiled.render(
      messages=messages, add_generation_prompt=add_generation_prompt, **dict(self.tokens)
    )


def build_chat(data: DataConfig, tokenizer: Tokenizer) -> Chat | None:
  """Returns how records become tokens, if the keys ask for it. Raises UserError: keys that need each
  other, or the tokenizer has no chat template that works."""
  if not data.use_chat_template:
    if data.sft_train_on_completion_only:
      raise UserError(
        "sft_train_on_completion_only=true needs conversations, whose chat template says what the "
        "assistant said; set use_chat_template=true train_data_columns=[messages]"
      )
    return None
  if data.weights_column:
    raise UserError(
      f"use_chat_template=true weights_column={data.weights_column}: conversations say in "
      "themselves what counts, with \"weight\": 0 in a message; set weights_column='', or "
      "use_chat_template=false"
    )
  for key, tokenize in (
    ("tokenize_train_data", data.tokenize_train_data),
    ("tokenize_eval_data", data.tokenize_eval_data),
  ):
    if not tokenize:
      raise UserError(
        f"use_chat_template=true {key}=false: conversations are text, which has to be tokenized; "
        f"set {key}=true, or use_chat_template=false for records of token ids"
      )
  if data.dataset_type not in ("grain", "hf"):
    raise UserError(
      f"use_chat_template=true: dataset_type={data.dataset_type} has no records with messages; use "
      "dataset_type=grain grain_train_files='chats/*.jsonl' train_data_columns=[messages]"
    )
  return chat_of(data, tokenizer)


def chat_of(data: DataConfig, tokenizer: Tokenizer) -> Chat:
  """Returns how conversations become tokens, wherever they come from. Raises UserError: the tokenizer
  has no chat template that works."""
  if not isinstance(tokenizer, HuggingFaceTokenizer):
    raise UserError(
      f"use_chat_template=true: tokenizer_type={data.tokenizer_type} has no chat template; use "
      "tokenizer_type=huggingface with the folder of a chat model's tokenizer as tokenizer_path"
    )
  tokens = declared_tokens(tokenizer.file)
  named = {"bos": data.bos_token, "eos": data.eos_token, "pad": data.pad_token}
  tokens |= {role: token for role, token in named.items() if token}
  named_tokens = tuple((f"{role}_token", token) for role, token in sorted(tokens.items()))
  template = _template(tokenizer)
  chat = Chat(tokenizer, template, named_tokens, data.sft_train_on_completion_only)
  try:
    assert chat._compiled is not None
  except library("jinja2", "use_chat_template=true").TemplateError as error:
    raise UserError(
      f"{tokenizer.file}: its chat template is not a Jinja template ({error}); correct it"
    ) from error
  return chat


def _template(tokenizer: HuggingFaceTokenizer) -> str:
  """Returns the template beside the vocabulary: in its own file, or in the tokenizer's settings."""
  own = tokenizer.file.path.with_name("chat_template.jinja")
  settings = own.with_name("tokenizer_config.json")
  try:
    if own.is_file():
      return own.read_text(encoding="utf-8")
    result = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    if isinstance(result, list):  # Several by name.
      result = {each.get("name"): each.get("template") for each in result}.get("default")
  except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
    raise UserError(
      f"{tokenizer.file}: its chat template cannot be read from {settings.name} ({error}); correct it, "
      f"or write {own}"
    ) from error
  if not isinstance(result, str):
    raise UserError(
      f"use_chat_template=true: {tokenizer.file} has no chat template, neither {own.name} nor "
      f"chat_template in {settings.name}; take the tokenizer of a chat model, or write {own}"
    )
  return result


def _messages(value: object) -> list[dict[str, Any]] | Bad:
  if isinstance(value, str | bytes):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError) as error:
      return Bad(f"text that is no JSON ({error}) instead of messages")
  if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
    return Bad(f"{type(value).__name__} instead of a list of messages such as {_EXAMPLE}")
  # Parquet has every field in every message, null where there is none.
  messages = [{k: v for k, v in each.items() if v is not None} for each in value]
  for number, message in enumerate(messages):
    if not isinstance(message.get("role"), str) or "content" not in message:
      return Bad(f"message {number} has no role and content; messages are such as {_EXAMPLE}")
    if message.get("weight", 1) not in (0, 1):
      return Bad(f"message {number} has weight {message['weight']!r}, which must be 0 or 1")
  return messages or Bad("no messages")


def _texts(value: object) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for each in value.values():
      yield from _texts(each)
  elif isinstance(value, list):
    for each in value:
      yield from _texts(each)


def _marked(text: str) -> tuple[str, list[_Span]]:
  """Returns the text without marks, and the spans that stood between them."""
  parts = re.split(f"([{_BEGIN}{_END}])", text)
  plain, spans, begin = "", [], 0
  for part in parts:
    if part == _BEGIN:
      begin = len(plain)
    elif part == _END:
      spans.append(_Span(begin, len(plain)))
    else:
      plain += part
  return plain, spans


def _call(tag: re.Match[str]) -> str:
  """Returns {% generation %} or {% endgeneration %} as a tag that Jinja knows."""
  return f"{{%{tag[1]} {'endcall' if tag[2] else 'call marked_generation()'} {tag[3]}%}}"
