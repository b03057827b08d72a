"""The functions on the stack when each operation was traced, from the tables at the top of HLO text.

jax 0.12 writes them: FileNames, FunctionNames, FileLocations (a function and a line) and StackFrames
(a location and the frame that called it). Operations name a frame.
"""

import re
from collections.abc import Mapping

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"(\d+) (.*)")
_FIELD = re.compile(r"(\w+)=(\d+)")


def stack_frames(text: str) -> Mapping[int, tuple[str, ...]]:
  """Names of functions by frame, the innermost first; empty if the text has no such tables."""
  tables = _tables(text)
  functions = {number: name.strip('"') for number, name in tables["FunctionNames"].items()}
  function_of = {
    number: functions.get(dict(_FIELD.findall(row)).get("function_name_id", ""), "")
    for number, row in tables["FileLocations"].items()
  }
  frames = {number: dict(_FIELD.findall(row)) for number, row in tables["StackFrames"].items()}
  # The number written for a caller is one more than its frame's; 1, or none, is no caller.
  callers = {number: int(fields.get("parent_frame_id", 1)) - 1 for number, fields in frames.items()}
  named: dict[int, tuple[str, ...]] = {}
  for number in sorted(frames, key=int):
    own = function_of.get(frames[number].get("file_location_id", ""), "")
    named[int(number)] = (own, *named.get(callers[number], ()))
  return named


def _tables(text: str) -> dict[str, dict[str, str]]:
  tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
  current: dict[str, str] | None = None
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      break
    if line in tables:
      current = tables[line]
    elif current is not None and (entry := _ENTRY.fullmatch(line)):
      current[entry[1]] = entry[2]
  return tables
