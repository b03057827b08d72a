"""Conversations: the tokenizer's own template, and loss on what the assistant says alone."""

import dataclasses
import json
from pathlib import Path

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import base
from vocabularies import END, huggingface

from maxbatch.config.schema import DataConfig
from maxbatch.data.chat import Chat, Conversation, build_chat
from maxbatch.data.formats.format import Bad
from maxbatch.data.registry import build_dataset, build_tokenizer
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError

CHATML = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
  "{% for message in messages %}\n"
  "  {% if message['role'] == 'assistant' %}\n"
  "<|im_start|>assistant\n{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
  "  {% else %}\n"
  "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
  "  {% endif %}\n"
  "{% endfor %}\n"
)
# As templates of models that think: what earlier answers hold before </think> is left out.
FORGETFUL = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
  "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", END)
ENDS = {"bos_token": END, "eos_token": END}
TALK: list[dict[str, object]] = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "Who follows 7?"},
  {"role": "assistant", "content": "8 follows 7."},
  {"role": "user", "content": "And naïve 🎉?"},
  {"role": "assistant", "content": "Nobody."},
]


def keys(folder: Path, **changes: object) -> DataConfig:
  given = {
    "dataset_type": "grain",
    "tokenizer_type": "huggingface",
    "tokenizer_path": str(folder / "model"),
    "train_data_columns": ("messages",),
    "use_chat_template": True,
    "sft_train_on_completion_only": True,
    "dataset_cache_directory": str(folder / "cache"),
    "eval_fraction": 0.0,
    "grain_packing_type": "best_fit",
  }
  return dataclasses.replace(base().data, **(given | changes))


def chat_of(folder: Path, template: str = CHATML, **changes: object) -> Chat:
  huggingface(folder / "model", SPECIAL, **ENDS, chat_template=template)
  data = keys(folder, **changes)
  chat = build_chat(data, build_tokenizer(data))
  assert chat is not None
  return chat


def said(chat: Chat, messages: object) -> tuple[str, str]:
  """The whole text, and that of the tokens that count."""
  result = chat(messages)
  assert isinstance(result, Conversation), result
  whole = chat._inner.decode(result.ids.tolist(), skip_special_tokens=False)
  counted = chat._inner.decode(result.ids[result.counted == 1].tolist(), skip_special_tokens=False)
  return whole, counted


def refusal(chat: Chat, messages: object) -> str:
  result = chat(messages)
  assert isinstance(result, Bad)
  return result.reason


def test_only_what_the_assistant_says_counts(tmp_path):
  whole, counted = said(chat_of(tmp_path), TALK)
  assert whole.startswith(
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho follows 7?"
  )
  assert counted == "8 follows 7.<|im_end|>\nNobody.<|im_end|>\n"


def test_a_template_may_mark_it(tmp_path):
  whole, counted = said(chat_of(tmp_path, MARKED), TALK)
  assert whole.count("<|im_start|>assistant\n8 follows 7.<|im_end|>") == 1
  assert counted == "8 follows 7.<|im_end|>Nobody.<|im_end|>"


def test_marks_follow_the_rules_for_white_space(tmp_path):
  """As transformers' own tag: a line break after it belongs to the tag, and - takes white space."""
  lines = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:\n"
    "  {%- generation %}\n{{ message['content'] }}\n{%- endgeneration -%}\n ;{% else %}"
    "U:{{ message['content'] }};{% endif %}{% endfor %}"
  )
  talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]
  assert said(chat_of(tmp_path, lines), talk) == ("U:q;A:a b;", "a b")


def test_all_of_it_counts_if_so_asked(tmp_path):
  chat = chat_of(tmp_path, MARKED, sft_train_on_completion_only=False)
  whole, counted = said(chat, TALK)
  assert whole == counted == said(chat_of(tmp_path, MARKED), TALK)[0]


def test_an_answer_of_weight_0_does_not_count(tmp_path):
  talk = [dict(message) for message in TALK]
  talk[2]["weight"] = 0
  for template in (CHATML, MARKED):
    assert said(chat_of(tmp_path, template), talk)[1].startswith("Nobody.<|im_end|>")


def test_special_tokens_of_the_template_are_single_ids(tmp_path):
  chat = chat_of(tmp_path)
  result = chat(TALK)
  assert isinstance(result, Conversation)
  assert (result.ids == chat._inner.token_to_id("<|im_start|>")).sum() == len(TALK)


def test_messages_may_be_json_and_have_null_fields(tmp_path):
  chat = chat_of(tmp_path)
  wanted = said(chat, TALK)
  assert said(chat, json.dumps(TALK)) == wanted
  assert said(chat, [message | {"name": None} for message in TALK]) == wanted


def test_the_same_in_a_worker(tmp_path):
  chat = chat_of(tmp_path)
  said(chat, TALK)
  sent = cloudpickle.loads(cloudpickle.dumps(chat))
  assert said(sent, TALK) == said(chat, TALK)


@pytest.mark.parametrize(
  ("messages", "reason"),
  [
    ("{", "text that is no JSON"),
    (None, "NoneType instead of a list of messages such as [{"),
    ([], "no messages"),
    (["hi"], "list instead of a list of messages"),
    ([{"role": "user"}], "message 0 has no role and content"),
    ([{"role": "user", "content": "Hi"}], "there is no message of an assistant to train on"),
    (
      [{"role": "user", "content": "x<|im_end|>"}, {"role": "assistant", "content": "y"}],
      "a message holds '<|im_end|>', which the template uses to end or mark one",
    ),
    ([{"role": "assistant", "content": "\U000f0000"}], r"a message holds '\U000f0000', which"),
    ([{"role": "assistant", "content": "y", "weight": 2}], "message 0 has weight 2"),
  ],
)
def test_what_is_no_conversation(tmp_path, messages, reason):
  assert reason in refusal(chat_of(tmp_path), messages)


def test_a_template_that_refuses_a_conversation_says_why(tmp_path):
  chat = chat_of(tmp_path, "{{ raise_exception('roles must alternate') }}")
  assert refusal(chat, TALK) == "the chat template refuses it: roles must alternate"


def test_a_template_that_changes_earlier_messages_is_no_guess(tmp_path):
  talk = [dict(message) for message in TALK]
  assert (
    said(chat_of(tmp_path, FORGETFUL), talk)[1] == "8 follows 7.<|im_end|>\nNobody.<|im_end|>\n"
  )
  talk[2]["content"] = "Hm.</think>8 follows 7."
  assert "messages before and after answer 2 change" in refusal(chat_of(tmp_path, FORGETFUL), talk)


def test_templates_run_in_a_sandbox(tmp_path):
  chat = chat_of(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
  assert "the chat template refuses it: access to attribute" in refusal(chat, TALK)


# --- rows ------------------------------------------------------------------------------------------


def build(folder: Path, path: Path, **changes: object) -> Dataset:
  return build_dataset(keys(folder, grain_train_files=str(path), **changes), 64)


def counted_text(folder: Path, dataset: Dataset) -> str:
  tokenizer = build_tokenizer(keys(folder))
  rows = dataset.train.rows(np.arange(len(dataset.train)))
  return tokenizer.decode(rows["targets"][rows["weights"] == 1])


def write(folder: Path) -> Path:
  talks = [
    [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": f"[{n}]"}]
    for n in range(20)
  ]
  path = folder / "talks.jsonl"
  path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
  columns = {"messages": talks}
  pq.write_table(pa.table(columns), folder / "talks.parquet")
  return path


@pytest.mark.parametrize(
  "packing",
  [{}, {"packing": False}, {"grain_packing_type": "concat_then_split"}],
)
def test_weights_of_rows_are_those_of_the_tokens(tmp_path, packing):
  path = write(tmp_path)
  chat_of(tmp_path)
  dataset = build(tmp_path, path, **packing)
  text = counted_text(tmp_path, dataset)
  assert sorted(text.split()) == sorted(f"[{n}]" for n in range(20))
  other = build(tmp_path, path, sft_train_on_completion_only=False, **packing)
  assert other.fingerprint != dataset.fingerprint
  assert "number 19" in counted_text(tmp_path, other)


def test_parquet_holds_the_same_conversations(tmp_path):
  path = write(tmp_path)
  chat_of(tmp_path)
  of_parquet = build(tmp_path, path.with_suffix(".parquet"))
  assert of_parquet.fingerprint == build(tmp_path, path).fingerprint


def test_a_bad_conversation_is_named_with_its_line(tmp_path):
  path = write(tmp_path)
  chat_of(tmp_path)
  path.write_text(path.read_text() + '\n{"messages": []}')
  with pytest.raises(UserError, match="line 21: no messages; correct it, or set max_bad_records"):
    build(tmp_path, path)
  assert "1 bad" in build(tmp_path, path, max_bad_records=1).description


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"use_chat_template": False}, "sft_train_on_completion_only=true needs conversations"),
    ({"tokenizer_type": "byte", "tokenizer_path": ""}, "tokenizer_type=byte has no chat template"),
    ({"dataset_type": "text"}, "dataset_type=text has no records with messages"),
    ({"tokenize_train_data": False}, "use_chat_template=true tokenize_train_data=false: conversat"),
    ({"tokenize_eval_data": False}, "tokenize_eval_data=false: conversations are text"),
  ],
)
def test_keys_that_need_each_other(tmp_path, changes, message):
  chat_of(tmp_path)
  data = keys(tmp_path, **changes)
  with pytest.raises(UserError, match=message):
    build_chat(data, build_tokenizer(data))


def test_a_tokenizer_without_a_template_is_named(tmp_path):
  huggingface(tmp_path / "model", SPECIAL, **ENDS)
  data = keys(tmp_path)
  with pytest.raises(UserError, match=r"has no chat template, neither chat_template\.jinja nor"):
    build_chat(data, build_tokenizer(data))
  (tmp_path / "model" / "chat_template.jinja").write_text("{% for %}")
  with pytest.raises(UserError, match="is not a Jinja template"):
    build_chat(data, build_tokenizer(data))


def test_messages_without_the_key_are_explained(tmp_path):
  path = write(tmp_path)
  chat_of(tmp_path)
  plain = {"use_chat_template": False, "sft_train_on_completion_only": False}
  with pytest.raises(UserError, match=r"a list of messages instead of text \(use_chat_template"):
    build(tmp_path, path, **plain)
