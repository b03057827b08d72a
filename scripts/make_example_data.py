"""Makes data of every kind out of the Python standard library, without a network.

  python scripts/make_example_data.py FOLDER [--modules 300] [--vocab-size 4096]

FOLDER/code/*.parquet      functions and classes, a document each, in the column `text`
FOLDER/prose/*.parquet     what their docstrings say, likewise
FOLDER/chats.jsonl         questions about them and answers, in the column `messages`
FOLDER/tokenizer/          a byte-level BPE trained on both, with a chat template
"""

import argparse
import ast
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import tokenizers

from maxbatch.data.sources import STDLIB_SKIPPED_FOLDERS
from maxbatch.run_folder.atomic import write_whole

FILES = 4
"""Of each source, as a corpus has several."""
_SMALLEST_VOCABULARY = 260
"""A byte each, and four special tokens."""
_END, _USER, _ASSISTANT, _END_OF_TURN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
_CHAT_TEMPLATE = (
  "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>"
  "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
  "{% else %}<|user|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)


class Definition(NamedTuple):
  """A function, a method or a class of a module."""

  name: str
  """With its module's."""
  kind: str
  is_method: bool
  code: str
  docstring: str


def definitions(modules: int) -> Iterator[Definition]:
  """What the first `modules` files of the standard library define, by their paths in order."""
  library = Path(sysconfig.get_path("stdlib"))
  files = [
    path
    for path in sorted(library.rglob("*.py"))
    if STDLIB_SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts)
  ]
  for path in files[:modules]:
    try:
      source = path.read_text()
      with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):  # The library has examples of both.
      continue
    module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
    yield from _defined(tree, module, source.splitlines())


def _defined(
  tree: ast.Module | ast.ClassDef, name: str, lines: Sequence[str]
) -> Iterator[Definition]:
  is_method = isinstance(tree, ast.ClassDef)
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      own, docstring = f"{name}.{node.name}", ast.get_docstring(node) or ""
      kind = "class" if isinstance(node, ast.ClassDef) else "function"
      code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
      yield Definition(own, kind, is_method, code, docstring)
      if isinstance(node, ast.ClassDef):
        yield from _defined(node, own, lines)


def write_parquet(folder: Path, documents: Sequence[object], column: str = "text") -> None:
  """The documents in a few files."""
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(FILES):
    table = pyarrow.table({column: documents[number::FILES]})
    pyarrow.parquet.write_table(table, folder / f"{number:05}-of-{FILES:05}.parquet")


def conversation(definition: Definition) -> list[dict[str, str]]:
  """A question about what is defined, and one about its code if that is short."""
  summary = definition.docstring.partition("\n\n")[0]
  turns = [(f"What does the {definition.kind} {definition.name} do?", summary)]
  if len(definition.code) < 1000:
    turns.append(("Show me its code.", definition.code))
  return [
    {"role": role, "content": content}
    for question, answer in turns
    for role, content in (("user", question), ("assistant", answer))
  ]


def write_tokenizer(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
  """A byte-level BPE, as GPT-2's is, in the files of Hugging Face."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[_END, _USER, _ASSISTANT, _END_OF_TURN],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(texts, trainer)
  folder.mkdir(parents=True, exist_ok=True)
  made.save(str(folder / "tokenizer.json"))
  said = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _END,
    "eos_token": _END,
    "pad_token": _END,
    "chat_template": _CHAT_TEMPLATE,
  }
  write_whole(folder / "tokenizer_config.json", json.dumps(said, indent=1))


def main() -> None:
  """Writes the folder, and says what is in it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("folder", type=Path)
  parser.add_argument("--modules", type=int, default=300, help="files that are read")
  parser.add_argument("--vocab-size", type=int, default=4096)
  options = parser.parse_args()
  if options.modules < 1 or options.vocab_size < _SMALLEST_VOCABULARY:
    parser.error(
      f"--modules {options.modules} --vocab-size {options.vocab_size}: at least 1 file is read, and the "
      f"vocabulary has {_SMALLEST_VOCABULARY} tokens for bytes and special ones; for example --modules "
      "300 --vocab-size 4096"
    )
  try:
    print(write(options.folder, options.modules, options.vocab_size))
  except OSError as error:
    parser.error(
      f"{options.folder}: {error.filename or options.folder} cannot be written: "
      f"{error.strerror or error}; name a folder that can, for example example_data"
    )


def write(folder: Path, modules: int, vocab_size: int) -> str:
  """Writes the folder. Returns what is in it; raises OSError if it cannot be written."""
  results = list(definitions(modules))
  code = [each.code for each in results if not each.is_method]  # Those are in their classes.
  described = [each for each in results if each.docstring]
  prose = [f"{each.name}\n\n{each.docstring}" for each in described]
  write_parquet(folder / "code", code)
  write_parquet(folder / "prose", prose)
  chats = [json.dumps({"messages": conversation(each)}) for each in described]
  write_whole(folder / "chats.jsonl", "\n".join(chats) + "\n")
  write_tokenizer(folder / "tokenizer", [*code, *prose], vocab_size)
  return (
    f"{folder}: {len(code):,} documents of code, {len(prose):,} of prose, "
    f"{len(chats):,} conversations, a tokenizer"
  )


if __name__ == "__main__":
  main()
