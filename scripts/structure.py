"""Prints how much of the package its parts need, for one or several checkouts beside each other.

    python scripts/structure.py [PACKAGE_FOLDER ...]

For example, against an older commit: `git worktree add ../before COMMIT`, then
`python scripts/structure.py ../before/maxbatch maxbatch`. Files are read, nothing is imported.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

from maxbatch.command_line.screen import Table

KEY = "gradient_accumulation_steps"
ACCUMULATE = ("core.accumulate", "training.accumulate")
"""Where accumulation is: the first that a checkout has."""


class Package:
  """The files of a package, by the names of their modules."""

  def __init__(self, folder: pathlib.Path):
    self.texts = {self._name(folder, path): path.read_text() for path in folder.rglob("*.py")}
    self.root = folder.name

  @staticmethod
  def _name(folder: pathlib.Path, path: pathlib.Path) -> str:
    parts = folder.name, *path.relative_to(folder).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")

  @property
  def lines(self) -> int:
    return sum(text.count("\n") for text in self.texts.values())

  def reached(self, *modules: str) -> set[str]:
    """Returns what importing the first of these modules that exists imports, itself included."""
    first = next((name for m in modules if (name := f"{self.root}.{m}") in self.texts), None)
    result, waiting = set[str](), [first] if first else []
    while waiting:
      name = waiting.pop()
      if name not in result:
        result.add(name)
        waiting += [each for each in self._imports(name) if each in self.texts]
    return result

  def _imports(self, module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(self.texts[module])):
      if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
      elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)

  def lines_of(self, modules: set[str]) -> int:
    return sum(self.texts[name].count("\n") for name in modules)

  def fields(self, name: str) -> int:
    """Returns the number of fields of the class of this name."""
    for text in self.texts.values():
      for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
          return sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return 0

  def files_with(self, word: str) -> int:
    """Returns the number of files whose code, strings and comments apart, has this word."""
    return sum(
      any(
        getattr(node, field, None) == word
        for node in ast.walk(ast.parse(text))
        for field in ("id", "attr", "arg", "name")
      )
      for text in self.texts.values()
    )


FIGURES: dict[str, Callable[[Package], int]] = {
  "files": lambda p: len(p.texts),
  "lines": lambda p: p.lines,
  "files that accumulation reaches": lambda p: len(p.reached(*ACCUMULATE)),
  "lines that accumulation reaches": lambda p: p.lines_of(p.reached(*ACCUMULATE)),
  "files that the trainer's step reaches": lambda p: len(p.reached("training.step")),
  "files that train.py reaches": lambda p: len(p.reached("train")),
  "of these, of reinforcement learning": lambda p: sum(
    bool(re.search(r"\.rl[._]|_rl\b", name)) for name in p.reached("train")
  ),
  f"files with {KEY} in their code": lambda p: p.files_with(KEY),
  "fields of Job": lambda p: p.fields("Job"),
}


def main(arguments: list[str]) -> None:
  packages = [Package(pathlib.Path(each).resolve()) for each in arguments or ["maxbatch"]]
  rows = [[name, *(f"{figure(each):,}" for each in packages)] for name, figure in FIGURES.items()]
  table = Table(["", *(arguments or ["maxbatch"])], rows, left=(0,))
  print("\n".join(table.lines()))


if __name__ == "__main__":
  main(sys.argv[1:])
