"""Figures in pages: which commands made them, at which commit, and which are older than their sources.

    python scripts/refresh_docs.py                    # lists blocks that are older than what they depend on
    python scripts/refresh_docs.py docs/compile.md    # makes a page's blocks anew, those that take minutes too
    python scripts/refresh_docs.py all                # makes all blocks anew that take seconds

A block of a page stands between two comments, and is what a command prints:

    <!-- made by: scripts/effective_microbatches.py; from: maxbatch/estimate configs/models; takes: seconds;
    at 0123abc -->
    …
    <!-- end of made -->

`from` are the files and folders that the figures depend on: a commit after `at` that changes one of them
makes the block old. With `takes: seconds` or `minutes` the command makes the block here; with anything else,
such as another machine or a quiet one, it is only listed.
"""

import dataclasses
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(
  r"<!-- made by: (?P<command>[^;]+); from: (?P<sources>[^;]+); takes: (?P<takes>[^;]+);\s+at (?P<commit>\w+) -->\n"
  r".*?<!-- end of made -->",
  re.DOTALL,
)
QUICK, SLOW = "seconds", "minutes"


@dataclasses.dataclass(frozen=True)
class Block:
  """A part of a page that a command makes."""

  page: pathlib.Path
  command: Sequence[str]
  sources: Sequence[str]
  takes: str
  commit: str
  place: tuple[int, int]
  """Of the whole block in the page's text."""

  def header(self, commit: str) -> str:
    """Returns the comment in front of the content."""
    return (
      f"<!-- made by: {shlex.join(self.command)}; from: {' '.join(self.sources)}; "
      f"takes: {self.takes}; at {commit} -->\n"
    )

  def __str__(self) -> str:
    return f"{self.page}: {shlex.join(self.command)} (takes: {self.takes}, made at {self.commit})"


def pages(root: pathlib.Path) -> list[pathlib.Path]:
  """Lists the pages that may have blocks."""
  return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def blocks(root: pathlib.Path, page: pathlib.Path) -> list[Block]:
  """Lists the blocks of a page. Raises SystemExit: one is written in another way, or names no file."""
  text = page.read_text(encoding="utf-8")
  found = [_block(page.relative_to(root), match) for match in BLOCK.finditer(text)]
  if len(found) != text.count("<!-- made by:"):
    raise SystemExit(f"{page}: a block is not written as scripts/refresh_docs.py says")
  for block in found:
    for source in (*block.sources, *(word for word in block.command if word.endswith(".py"))):
      if not (root / source).exists():
        raise SystemExit(f"{block}: there is no {source}")
  return found


def _block(page: pathlib.Path, match: re.Match[str]) -> Block:
  words = shlex.split(match["command"].replace("\\\n", " "))
  return Block(page, words, match["sources"].split(), match["takes"], match["commit"], match.span())


def changes(root: pathlib.Path, block: Block) -> list[str]:
  """Lists the commits since the block was made that change what it depends on, newest first."""
  git = ["git", "log", "--format=%h %s", f"{block.commit}..HEAD", "--", *block.sources]
  result = subprocess.run(git, cwd=root, capture_output=True, text=True, check=False)
  if result.returncode:
    return ["its commit is not known here"]
  return result.stdout.splitlines()


def made(root: pathlib.Path, block: Block) -> str:
  """Runs a block's command. Raises SystemExit: it fails."""
  words = [sys.executable if word == "python" else word for word in block.command]
  if words[0].endswith(".py"):
    words.insert(0, sys.executable)
  result = subprocess.run(words, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
  if result.returncode:
    raise SystemExit(f"{block}: exit code {result.returncode}")
  return result.stdout


def refresh(root: pathlib.Path, page: pathlib.Path, takes: Sequence[str]) -> Iterator[str]:
  """Makes anew the blocks of a page that take no longer than wanted; yields a line for each block."""
  head = ["git", "rev-parse", "--short", "HEAD"]
  commit = subprocess.run(head, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
  # From the last to the first: places of those before stay.
  for block in reversed(blocks(root, page)):
    if block.takes not in takes:
      yield f"left as it is: {block}"
      continue
    if _is_changed(root, block.sources):
      raise SystemExit(f"{block}: commit the changes to what it depends on first")
    content = made(root, block)
    text, (begin, end) = page.read_text(encoding="utf-8"), block.place
    # Blank lines around: a table that touches a comment is none to some readers of Markdown.
    whole = f"{block.header(commit)}\n{content.strip(chr(10))}\n\n<!-- end of made -->"
    page.write_text(text[:begin] + whole + text[end:], encoding="utf-8")
    yield f"made: {dataclasses.replace(block, commit=commit)}"


def _is_changed(root: pathlib.Path, sources: Sequence[str]) -> bool:
  git = ["git", "status", "--porcelain", "--", *sources]
  return bool(subprocess.run(git, cwd=root, capture_output=True, text=True, check=True).stdout)


def listed(root: pathlib.Path) -> Iterator[str]:
  """Yields a line for each block that is older than what it depends on."""
  for page in pages(root):
    for block in blocks(root, page):
      if since := changes(root, block):
        yield f"{block}: {since[0]}" + (f", and {len(since) - 1} before" if since[1:] else "")


def main(arguments: Sequence[str], root: pathlib.Path = ROOT) -> int:
  """Lists what is old, or makes anew what is named."""
  if not arguments:
    lines = list(listed(root))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} blocks of figures in pages are older than what they depend on")
    return 0
  is_all = list(arguments) == ["all"]
  named = pages(root) if is_all else [(root / name).resolve() for name in arguments]
  for page in named:
    for line in refresh(root, page, (QUICK,) if is_all else (QUICK, SLOW)):
      print(line, flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
