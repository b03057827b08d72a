"""The quick tier: what `scripts/test.sh` runs without --all, by `pytest -p quick_tier`.

It is everything but
- the files and tests that tests/left_out.txt names,
- the cases of a parametrized test after its first,
- most examples of a property test.

scripts/choose_quick_tests.py makes the list from measurements. A new test belongs to the quick tier
until the list names it.
"""

import collections
import pathlib
import re

import examples
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
LIST = TESTS / "left_out.txt"


def left_out() -> set[str]:
  """Returns the lines of the list: `test_file.py` or `test_file.py::test_name`."""
  lines = LIST.read_text().splitlines()
  return {line for line in lines if line and not line.startswith("#")}


def coverage() -> str:
  """Returns the share of the lines, as the list's first comment has it."""
  match = re.match(r"# (\d+%) ", LIST.read_text())
  assert match, LIST
  return match[1]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
  examples.share = 0.1


LEFT_OUT = left_out()
_counts = collections.Counter[str]()
_files = set[str]()


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
  if collection_path.name not in LEFT_OUT:
    return None
  _files.add(collection_path.name)
  _counts["files"] = len(_files)
  return True


def chosen(names: list[str]) -> set[int]:
  """Returns the places of the tests that run, of the names `file::test` of all cases in order."""
  first = {name: place for place, name in reversed([*enumerate(names)])}
  return {place for name, place in first.items() if name not in LEFT_OUT}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  names = [f"{item.path.name}::{getattr(item, 'originalname', item.name)}" for item in items]
  stay = chosen(names)
  left = [place for place in range(len(items)) if place not in stay]
  _counts["tests"] += len({names[place] for place in left} & LEFT_OUT)
  _counts["cases"] += sum(names[place] not in LEFT_OUT for place in left)
  _counts["running"] += len(stay)
  config.hook.pytest_deselected(items=[items[place] for place in left])
  items[:] = [items[place] for place in sorted(stay)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
  # A worker of pytest-xdist collects, and the process that prints does not.
  output = getattr(session.config, "workeroutput", None)
  if output is not None:
    output["quick_tier"] = dict(_counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
  _counts.update(getattr(node, "workeroutput", {}).get("quick_tier", {}) if not _counts else {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  files, tests, cases = (_counts[each] for each in ("files", "tests", "cases"))
  terminalreporter.write_line(
    f"quick tier: {_counts['running']:,} tests ran. Left out: {files} files, {tests} tests of other "
    f"files and {cases:,} more cases. Of the lines that all tests run, it runs {coverage()}. "
    "scripts/test.sh --all runs everything."
  )
