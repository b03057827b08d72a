"""The folder of a model that is here, or on the Hugging Face hub."""

import os
from pathlib import Path

from maxbatch.checkpoints.tensor_files import INDEX, SINGLE
from maxbatch.conversion.beside import CONFIG, GENERATION, TOKENIZER
from maxbatch.data.object_store import is_url
from maxbatch.data.tokenizers.hub import hub_folder, is_hub_name
from maxbatch.errors import UserError

_WEIGHTS = (SINGLE, INDEX, "model-*.safetensors")


def model_folder(key: str, name: str, token: str = "") -> Path:
  """The folder that `key=name` means; a name on the hub is downloaded, unless it is in its cache.

  Args:
    key: of the name, for errors.
    name: a folder, or a model as OWNER/MODEL.
    token: hf_access_token; empty: as the hub's library finds one.

  Raises:
    UserError: there is neither.
  """
  given, path = f"{key}={name}", Path(name).expanduser()
  if is_url(name):
    raise UserError(f"{given}: a model is not read from a URL; copy its folder to this machine")
  if path.is_dir():
    return path
  if os.path.lexists(path) or not is_hub_name(name):
    raise UserError(
      f"{given}: there is no such folder; give one that holds {CONFIG} and {SINGLE}, or a model's "
      "name on the Hugging Face hub, such as Qwen/Qwen3-0.6B"
    )
  files = (CONFIG, GENERATION, *TOKENIZER, *_WEIGHTS)
  return hub_folder(given, name, files, shown="*.safetensors' --include '*.json", token=token)
