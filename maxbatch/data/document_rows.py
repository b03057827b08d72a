"""Which rows the documents of a token cache make, by the configuration."""

from pathlib import Path

from maxbatch.config.schema import DataConfig
from maxbatch.data.dataset import RowSource
from maxbatch.data.pack_index import Layout, open_or_build
from maxbatch.data.packed_rows import PackedRows
from maxbatch.data.token_cache import TokenCache
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.data.windows import TokenWindows
from maxbatch.errors import UserError


def layout_of(data: DataConfig, length: int) -> Layout | None:
  """How documents are packed into rows of `length` tokens; None: concatenated and then divided.

  Raises:
    UserError: use_truncation=true where no document is longer than its row.
  """
  if not data.packing:
    return Layout(length, "alone", data.use_truncation)
  if data.grain_packing_type != "concat_then_split":
    return Layout(length, data.grain_packing_type, data.use_truncation)
  if data.use_truncation:
    raise UserError(
      "use_truncation=true: grain_packing_type=concat_then_split divides documents where a row "
      "ends, so none is cut; set use_truncation=false, or grain_packing_type=best_fit to keep the "
      "beginning of each document that is longer than a row"
    )
  return None


def rows_name(data: DataConfig, length: int) -> str:
  """What a fingerprint says of the rows, besides that of their tokens; nothing for the default."""
  layout = layout_of(data, length)
  name = f"-{layout.name}" if layout else ""
  return name if data.segmented or not data.packing else f"{name}-unsegmented"


def document_rows(
  cache: TokenCache,
  data: DataConfig,
  tokenizer: Tokenizer,
  length: int,
  folder: Path,
  part: str,
) -> RowSource:
  """The rows of `length` tokens of the documents of `cache`.

  Args:
    cache: the tokens.
    data: the keys that say how documents become rows.
    tokenizer: of the tokens.
    length: tokens of a row.
    folder: where caches are kept, and the pack index too.
    part: "train" or "validation".

  Raises:
    UserError: keys that exclude each other, the index cannot be written, or there is no row.
  """
  layout = layout_of(data, length)
  if layout is None:
    return TokenWindows(cache, length, data.segmented, tokenizer.pad_id)
  index = open_or_build(folder, part, cache, layout)
  return PackedRows(cache, index, tokenizer.pad_id, segmented=data.segmented)
