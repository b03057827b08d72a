"""Files of models by their names on the Hugging Face hub, through its own library and cache."""

import re
from collections.abc import Sequence
from pathlib import Path

from maxbatch.data.optional import library
from maxbatch.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_FILE = re.compile(r"\.(json|model|tiktoken|txt)$")
BESIDE = ("tokenizer_config.json", "chat_template.jinja")
"""What says more about a vocabulary, in the same folder."""


def is_hub_name(path: str) -> bool:
  """Whether a path that is not there may be the name of a model on the hub."""
  return bool(_NAME.fullmatch(path)) and not _FILE.search(path)


def hub_folder(
  given: str, name: str, files: Sequence[str], *, shown: str = "tokenizer*", token: str = ""
) -> Path:
  """The folder of this machine that holds those of the files that the model `name` has.

  They are downloaded unless they are in the library's cache (HF_HOME). With HF_HUB_OFFLINE=1, and
  where the hub does not answer, the cache is all there is.

  Args:
    given: keys and values, for errors.
    name: as OWNER/MODEL.
    files: within the model's folder, or patterns of their names.
    shown: the same as one pattern, for errors.
    token: of an account, for models that not everyone may read; empty: as the library finds one.

  Raises:
    UserError: there is no such model, it may not be read, or it is neither cached nor reachable.
  """
  nowhere = f"{given}: there is no such file or folder here, and as a name on the Hugging Face hub"
  hub = library("huggingface_hub", f"{nowhere} it", extra="hf")
  errors = library("huggingface_hub.errors", given, extra="hf")
  try:
    return Path(hub.snapshot_download(name, allow_patterns=[*files, *BESIDE], token=token or None))
  except errors.GatedRepoError as error:
    raise UserError(
      f"{nowhere} it is gated: accept its conditions at {hub.constants.ENDPOINT}/{name}, and give a "
      "token of that account in HF_TOKEN, or by `hf auth login`"
    ) from error
  except errors.LocalEntryNotFoundError as error:
    cause = " ".join(str(error.__cause__ or error).split())[:200]
    raise UserError(
      f"{nowhere} it is not in the cache {hub.constants.HF_HUB_CACHE}, and cannot be downloaded "
      f"({cause}); give a file or folder that is here, or download it where there is a network: "
      f"hf download {name} --include '{shown}'"
    ) from error
  except (OSError, ValueError) as error:
    text = " ".join(str(error).split())[:200]
    raise UserError(
      f"{nowhere} it cannot be read ({text}); give a file or folder that is here, or a name such as "
      "meta-llama/Llama-3.1-8B (a private one needs a token in HF_TOKEN)"
    ) from error
