"""What a Hugging Face folder says of its texts: the tokenizer, what begins and what ends them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizers.huggingface import HuggingFaceTokenizer
from maxbatch.errors import UserError

_TOKENIZERS = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}
_GENERATION = "generation_config.json"


def config_of_folder(folder: Path, arguments: Sequence[str]) -> Config:
  """The configuration of a folder's model, with its tokenizer, and rows as long as it is made for.

  Args:
    arguments: keys on top of what the folder says.

  Raises UserError: it has no tokenizer that can be read, or a key is wrong.
  """
  found = next((name for name in _TOKENIZERS if (folder / name).is_file()), None)
  given = {argument.partition("=")[0] for argument in arguments}
  if found is None and "tokenizer_type" not in given:
    raise UserError(
      f"{folder} has neither {' nor '.join(_TOKENIZERS)}; give the tokenizer, for example "
      "tokenizer_type=huggingface tokenizer_path=my_tokenizer"
    )
  own = [f"tokenizer_type={_TOKENIZERS[found]}", f"tokenizer_path={folder}"] if found else []
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
  """The ids that end a text by a folder's generation_config.json, such as those of a chat's
  answers. Raises UserError: it cannot be read."""
  path = folder / _GENERATION
  try:
    found = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
  except (FileNotFoundError, KeyError):
    return []
  except (OSError, ValueError, TypeError) as error:
    raise UserError(f"{path} cannot be read ({error}); correct it, or remove it") from error
  ids = found if isinstance(found, list) else [found]
  return [id_ for id_ in ids if isinstance(id_, int)]
