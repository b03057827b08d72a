"""Damages a step's folder as a disk does."""

import pathlib

_APART_BYTES = 512
"""Between the bits that flip: parts of a file are of nodes that a later one replaces, which nobody reads."""


def flip_bits(folder: pathlib.Path, files: str = "d/*") -> None:
  """Flips bits all over the files of arrays in a step's folder, so that some are of an array.

  Args:
    folder: of a step.
    files: a pattern of paths in it.
  """
  paths = list((folder / "state").rglob(files))
  assert paths, folder
  for path in paths:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2 % _APART_BYTES, len(content), _APART_BYTES):
      content[place] ^= 1
    path.write_bytes(content)
