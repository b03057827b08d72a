"""Figures in pages: which commands made them, when, of which commit, and which are older than their sources.

    python scripts/refresh_docs.py                    # lists blocks that are older than what they depend on
    python scripts/refresh_docs.py docs/compile.md    # makes a page's blocks anew, those that take minutes too
    python scripts/refresh_docs.py docs/compile.md explore     # … of those the ones whose command has the word
    python scripts/refresh_docs.py seconds            # makes all blocks anew that take seconds
    python scripts/refresh_docs.py quiet              # … those that need a quiet machine, for minutes
    python scripts/refresh_docs.py all                # … all that a command here makes: an hour or two, alone

A block of a page stands between two comments, and is what a command prints (in a fence, if it stands in one),
or what somebody wrote down of that; its last line says to readers what the comment says:

    <!-- made by: scripts/effective_microbatches.py; from: maxbatch/estimate configs/models; takes: seconds;
    at 0123abc on 2026-11-22 -->
    …
    *From `scripts/effective_microbatches.py`, at 0123abc on 2026-11-22.*

    <!-- end of made -->

`from` are the files and folders that the figures depend on, and `at` the newest commit that had changed one of
them: a later one that does makes the block old, unless it changes comments and docstrings alone. With `takes: seconds` or `minutes` the command makes the block
here, with `quiet minutes` where that is asked for; with anything else, such as another machine, it is only
listed.

A table of figures outside of blocks says above itself where they are from:

    <!-- figures: the papers that are named -->
"""

import ast
import dataclasses
import datetime
import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(
  r"<!-- made by: (?P<command>[^;]+); from: (?P<sources>[^;]+); takes: (?P<takes>[^;]+);\s+"
  r"at (?P<commit>\w+) on (?P<date>\d{4}-\d\d-\d\d) -->\n(?P<content>.*?)<!-- end of made -->",
  re.DOTALL,
)
QUICK, SLOW, QUIET = "seconds", "minutes", "quiet minutes"
_PROGRAMS = {"python": [sys.executable], "maxbatch": [sys.executable, "-m", "maxbatch"]}
ALL = {"seconds": (QUICK,), "quiet": (QUIET,), "all": (QUICK, SLOW, QUIET)}
FENCE = re.compile(r"```\w*\n")
SOURCE = re.compile(r"<!-- figures: [^>]+ -->")
TABLE = re.compile(r"^\|.*\n\|[-| :]+\|\n((?:\|.*\n?)+)", re.MULTILINE)
FIGURE = re.compile(
  r"\W*\d[\d,.]*\s?(s|ms|µs|[KMGT]i?B|%|tokens/s)(?!\w).*|\W*\d*\.\d+(?![\d.\w]).*"
)
"""A cell of a table that somebody must have measured or computed: with a unit, or with decimals."""


@dataclasses.dataclass(frozen=True)
class Block:
  """A part of a page that a command makes."""

  page: pathlib.Path
  command: Sequence[str]
  sources: Sequence[str]
  takes: str
  commit: str
  date: str
  content: str
  text: str
  """The whole block in the page."""
  place: tuple[int, int]
  """Where it stands in the page."""

  def header(self) -> str:
    """Returns the comment in front of the content."""
    return (
      f"<!-- made by: {shlex.join(self.command)}; from: {' '.join(self.sources)}; "
      f"takes: {self.takes}; at {self.commit} on {self.date} -->\n"
    )

  def footer(self) -> str:
    """Returns the line below the content, for readers of the page."""
    return f"*From `{shlex.join(self.command)}`, at {self.commit} on {self.date}.*"

  def __str__(self) -> str:
    made = f"made at {self.commit} on {self.date}"
    return f"{self.page}: {shlex.join(self.command)} (takes: {self.takes}, {made})"


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
  what = (match["takes"], match["commit"], match["date"], match["content"], match[0])
  return Block(page, words, match["sources"].split(), *what, match.span())


def changes(root: pathlib.Path, block: Block) -> list[str]:
  """Lists the commits since the block was made that change what it depends on, newest first; none where
  they change comments and docstrings alone."""
  since = f"{block.commit}..HEAD"
  try:
    names = git(root, "diff", "--name-only", since, "--", *block.sources).splitlines()
  except subprocess.CalledProcessError:
    return ["its commit is not known here"]
  if all(code(root, block.commit, name) == code(root, "HEAD", name) for name in names):
    return []
  return git(root, "log", "--format=%h %s", since, "--", *block.sources).splitlines()


def git(root: pathlib.Path, *words: str) -> str:
  """Returns what git prints. Raises CalledProcessError: it fails."""
  result = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
  return result.stdout


@functools.cache
def code(root: pathlib.Path, commit: str, name: str) -> str | None:
  """Returns a file at a commit, one of Python without comments and docstrings; None: it is not there."""
  try:
    text = git(root, "show", f"{commit}:{name}")
  except subprocess.CalledProcessError:
    return None
  if not name.endswith(".py"):
    return text
  tree = ast.parse(text)
  for node in ast.walk(tree):
    # Strings that stand alone: docstrings, and those below fields.
    body = getattr(node, "body", None)
    if isinstance(body, list):
      body[:] = [each for each in body if not _is_string(each)]
  return ast.dump(tree)


def _is_string(node: ast.AST) -> bool:
  return (
    isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
  )


def made(root: pathlib.Path, block: Block) -> str:
  """Runs a block's command: a script where it is, a command of the package in an empty folder and without
  what its user has compiled; returns what it prints, in the fence that the block has. Raises SystemExit: it
  fails."""
  program, *arguments = block.command
  is_script = program.endswith(".py")
  run = [sys.executable, program] if is_script else _PROGRAMS.get(program, [program])
  with tempfile.TemporaryDirectory() as empty:
    own = {} if is_script else {"PYTHONPATH": str(root), "XDG_CACHE_HOME": empty}
    result = subprocess.run(
      [*run, *arguments],
      cwd=root if is_script else empty,
      env=os.environ | own,
      stdout=subprocess.PIPE,
      text=True,
      check=False,
    )
  if result.returncode:
    raise SystemExit(f"{block}: exit code {result.returncode}")
  printed, fence = result.stdout.strip("\n"), FENCE.match(block.content.strip("\n"))
  return f"{fence[0]}{printed}\n```" if fence else printed


def refresh(
  root: pathlib.Path, page: pathlib.Path, takes: Sequence[str], words: Sequence[str] = ()
) -> Iterator[str]:
  """Makes anew the blocks of a page that take no longer than wanted and have the words in their commands;
  yields a line for each block. Raises SystemExit: a command fails, or what it depends on is not committed."""
  for block in blocks(root, page):
    if block.takes not in takes or not set(words) <= set(block.command):
      yield f"left as it is: {block}"
      continue
    if git(root, "status", "--porcelain", "--", *block.sources):
      raise SystemExit(f"{block}: commit the changes to what it depends on first")
    commit = git(root, "log", "-1", "--format=%h", "--", *block.sources)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = dataclasses.replace(block, commit=commit.strip(), date=today)
    # Blank lines around: a table that touches a comment is none to some readers of Markdown.
    whole = f"{new.header()}\n{made(root, block)}\n\n{new.footer()}\n\n<!-- end of made -->"
    # The page may have been edited meanwhile.
    text = page.read_text(encoding="utf-8")
    if text.count(block.text) != 1:
      raise SystemExit(f"{block}: the block was edited while it was made; it would be:\n{whole}")
    page.write_text(text.replace(block.text, whole), encoding="utf-8")
    yield f"made: {new}"


def listed(root: pathlib.Path) -> Iterator[str]:
  """Yields a line for each block that is older than what it depends on."""
  for page in pages(root):
    for block in blocks(root, page):
      if since := changes(root, block):
        yield f"{block}: {since[0]}" + (f", and {len(since) - 1} before" if since[1:] else "")


def unknown(root: pathlib.Path, page: pathlib.Path) -> Iterator[str]:
  """Yields the place of each table of figures that is in no block and names no source."""
  text = page.read_text(encoding="utf-8")
  made_places = [block.place for block in blocks(root, page)]
  for table in TABLE.finditer(text):
    cells = [cell.strip() for cell in table[1].replace("\n", "|").split("|")]
    above = text[: table.start()].rstrip().rpartition("\n")[2]
    is_made = any(begin < table.start() < end for begin, end in made_places)
    if any(map(FIGURE.fullmatch, cells)) and not is_made and not SOURCE.fullmatch(above):
      line = text.count("\n", 0, table.start()) + 1
      yield f"{page.relative_to(root)}:{line}: {table[0].partition(chr(10))[0]}"


def main(arguments: Sequence[str], root: pathlib.Path = ROOT) -> int:
  """Lists what is old, or makes anew what is named."""
  if not arguments:
    lines = list(listed(root))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} blocks of figures in pages are older than what they depend on")
    return 0
  takes = ALL.get(arguments[0], (QUICK, SLOW))
  names = [name for name in arguments if name.endswith(".md")]
  words = [word for word in arguments if word not in (*names, *ALL)]
  for page in [(root / name).resolve() for name in names] or pages(root):
    for line in refresh(root, page, takes, words):
      print(line, flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
