"""What tokenizers that are read from a file have in common: the file, here or on the hub, and special tokens."""

import abc
import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxbatch.config.find import did_you_mean, user_path
from maxbatch.config.registry import library
from maxbatch.config.schema import DataConfig
from maxbatch.data.object_store import is_url
from maxbatch.data.tokenizer import Ids
from maxbatch.errors import UserError, first_of

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_FILE = re.compile(r"\.(json|model|tiktoken|txt)$")
BESIDE = ("tokenizer_config.json", "chat_template.jinja")
"""What says more about a vocabulary, in the same folder."""


def is_hub_name(path: str) -> bool:
  """Returns whether a path that does not exist may be the name of a model on the hub."""
  return bool(_NAME.fullmatch(path)) and not _FILE.search(path)


def hub_folder(
  given: str, name: str, files: Sequence[str], *, shown: str = "tokenizer*", token: str = ""
) -> Path:
  """Returns the local folder that holds those of the files that the model `name` has.

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
      f"{nowhere} it is gated: accept its conditions at {hub.constants.ENDPOINT}/{name}, and give "
      "a token of that account in HF_TOKEN, or by `hf auth login`"
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
      f"{nowhere} it cannot be read ({text}); give a file or folder that is here, or a name such "
      "as meta-llama/Llama-3.1-8B (a private one needs a token in HF_TOKEN)"
    ) from error


_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000
# Regular expressions of tokenizers take quadratic time or all of the stack for longer runs; Llama's
# and MaxText's tokenizers divide them in the same places.
_LONG_RUN = re.compile(rf"\S{{{_MAX_RUN}}}(?=\S)|\s{{{_MAX_RUN}}}(?=\s)")


@dataclasses.dataclass(frozen=True)
class VocabularyFile:
  """A vocabulary's file, and what to call it in errors."""

  tokenizer_type: str
  path: Path
  content: bytes = dataclasses.field(repr=False)

  def __str__(self) -> str:
    return f"tokenizer_type={self.tokenizer_type} tokenizer_path={self.path}"

  @functools.cached_property
  def hash(self) -> str:
    return hashlib.blake2b(self.content, digest_size=12).hexdigest()

  def damaged(self, reason: object) -> UserError:
    """Returns the error for a file that is no such vocabulary."""
    other = _type_of(self.content)
    offer = (
      f"it looks as tokenizer_type={other} has it"
      if other and other != self.tokenizer_type
      else "give the file as it was published, whole"
    )
    text = " ".join(str(reason).split())[:300]
    return UserError(f"{self}: this is not such a vocabulary ({text}); {offer}")


def read_vocabulary(data: DataConfig, *names: str) -> VocabularyFile:
  """Reads the file that `tokenizer_path` means; in a folder, or of a model on the Hugging Face hub,
  the first of `names` that is there. Raises UserError: there is none, or it cannot be read."""
  given = f"tokenizer_type={data.tokenizer_type} tokenizer_path={data.tokenizer_path}"
  if not data.tokenizer_path:
    raise UserError(
      f"tokenizer_type={data.tokenizer_type} needs the vocabulary's file: for example "
      f"tokenizer_path=my_tokenizer/{names[0]}; or use tokenizer_type=byte, which needs none"
    )
  if is_url(data.tokenizer_path):
    raise UserError(
      f"{given}: a vocabulary cannot be read from a URL; copy it to this machine, and give the "
      "file or its folder, for example tokenizer_path=my_tokenizer"
    )
  path = user_path(data.tokenizer_path)
  if not os.path.lexists(path) and is_hub_name(data.tokenizer_path):
    path = hub_folder(given, data.tokenizer_path, names)
  if path.is_dir():
    there = [path / name for name in names if (path / name).is_file()]
    if not there:
      raise UserError(f"{given}: the folder holds no {' or '.join(names)}; give the file itself")
    path = there[0]
  try:
    return VocabularyFile(data.tokenizer_type, path, path.read_bytes())
  except OSError as error:
    raise UserError(
      f"{given}: cannot read {path}: {error.strerror}; give a file or folder that is on this "
      "machine, or a model's name on the Hugging Face hub, such as meta-llama/Llama-3.1-8B"
    ) from error


def _type_of(content: bytes) -> str:
  """Returns the tokenizer_type whose files begin as this one does; empty if none does."""
  if content.lstrip()[:1] == b"{":
    return "huggingface"
  if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
    return "tiktoken"
  return "sentencepiece" if content[:1] == b"\n" else ""


class SpecialIds(NamedTuple):
  """The ids that begin and end a document and fill up rows."""

  bos_id: int
  eos_id: int
  pad_id: int


@dataclasses.dataclass(frozen=True)
class FileTokenizer(abc.ABC):
  """See `maxbatch.data.tokenizer.Tokenizer`; loaded from its file again where it is unpickled.

  What looks like a special token in a text is text: no document can end another.
  """

  file: VocabularyFile
  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int

  @staticmethod
  @abc.abstractmethod
  def load(file: VocabularyFile) -> Any:
    """Loads the library's own tokenizer. Raises UserError if the file is damaged."""

  @abc.abstractmethod
  def ids_of(self, text: str) -> list[int]:
    """Returns the ids of a text, without special ones."""

  @abc.abstractmethod
  def text_of(self, ids: list[int]) -> str:
    """Returns the text of ids of the vocabulary; special ids stand for none."""

  @functools.cached_property
  def inner(self) -> Any:
    """The library's own tokenizer."""
    return self.load(self.file)

  def __getstate__(self) -> dict[str, object]:
    return {field.name: self.__dict__[field.name] for field in dataclasses.fields(self)}

  @property
  def version(self) -> str:
    return f"{self.file.hash}-{self.bos_id}-{self.eos_id}-{self.pad_id}"

  def encode(self, text: bytes) -> np.ndarray:
    ids = self.ids_of(text.decode(errors="replace"))
    return np.array(ids, np.uint16 if self.vocab_size <= 2**16 else np.uint32)

  def decode(self, ids: Ids) -> str:
    """Returns the text of `ids` (`Tokenizer.decode`); broken UTF-8 becomes U+FFFD."""
    numbers = np.asarray(ids).reshape(-1).tolist()
    return self.text_of([id_ for id_ in numbers if 0 <= id_ < self.vocab_size])


def special_ids(
  data: DataConfig,
  file: VocabularyFile,
  own: Mapping[str, int | None],
  find: Callable[[str], int | None],
  known: list[str],
) -> SpecialIds:
  """Returns the special ids: those that the configuration names, else the tokenizer's own.

  Without a pad token rows are filled with the one that ends a document: that has no weight.

  Args:
    own: of bos, eos and pad, the id that the tokenizer itself gives it, if any.
    find: the id of a token, None if there is no such.
    known: the special tokens by name, for errors.

  Raises UserError: a named token does not exist, or one that add_bos or add_eos needs is not known.
  """
  named = {"bos": data.bos_token, "eos": data.eos_token, "pad": data.pad_token}
  ids = dict(own)
  for role, token in named.items():
    if token:
      ids[role] = find(token)
      if ids[role] is None:
        raise UserError(
          f"{role}_token={token}: {file} has no such token.{did_you_mean(token, known)} "
          f"Its special tokens: {first_of(known, 8) or 'none'}"
        )
  for role, is_used in (("bos", data.add_bos), ("eos", data.add_eos)):
    if is_used and ids.get(role) is None:
      example = f"{role}_token='{known[0]}' or " if known else ""
      does = "begins" if role == "bos" else "ends"
      raise UserError(
        f"{file} does not say which token {does} a document, and add_{role}=true; use for example "
        f"{example}add_{role}=false. Its special tokens: {first_of(known, 8) or 'none'}"
      )
  bos, eos, pad = (ids.get(role) for role in ("bos", "eos", "pad"))
  last = next((id_ for id_ in (eos, bos, pad) if id_ is not None), 0)
  ids = [each if each is not None else last for each in (bos, eos, pad)]
  return SpecialIds(*ids)


def bounded_pieces(text: str) -> Iterator[str]:
  """Yields the text in pieces with no run of over 25,000 characters that are all spaces or none."""
  for start in range(0, len(text), _MAX_CHARACTERS):
    part = text[start : start + _MAX_CHARACTERS]
    begin = 0
    for run in _LONG_RUN.finditer(part):
      yield part[begin : run.end()]
      begin = run.end()
    yield part[begin:]
