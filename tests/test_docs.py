"""The documentation shows what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from maxbatch import __main__ as console
from maxbatch import pipeline as pipeline
from maxbatch.plan import main as plan_command

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs"
COMMANDS = {"plan": plan_command, "pipeline": pipeline.main}
PAGES = {
  "../README.md": 1,
  "batch_size.md": 10,
  "pipeline.md": 5,
  "goodput.md": 0,
  "who_loads.md": 0,
  "reinforcement_learning.md": 0,
}
"""Each with a number of blocks that it has at least."""
BLOCK = re.compile(r"```console\n\$ (?:python -m maxbatch\.|maxbatch )(\w+) (.*)\n((?:.*\n)*?)```")
SHOWN = [match for page in PAGES for match in BLOCK.findall((FOLDER / page).read_text())]


def selected(text: str, grep: str) -> str:
  """What `grep` leaves of `text`: with -A n, from the first line found on at most n more."""
  words = shlex.split(grep)
  lines, pattern = text.splitlines(keepends=True), words[-1]
  if "-A" not in words:
    return "".join(line for line in lines if re.search(pattern, line))
  first = next(n for n, line in enumerate(lines) if re.search(pattern, line))
  return "".join(lines[first : first + int(words[words.index("-A") + 1]) + 1])


def printed(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
  arguments, _, grep = words.partition(" | grep ")
  COMMANDS[command](shlex.split(arguments))
  output = capsys.readouterr()
  text = output.out + output.err
  return selected(text, grep) if grep else text


@pytest.mark.parametrize(
  ("command", "words", "expected"), SHOWN, ids=[f"{a} {b}" for a, b, _ in SHOWN]
)
def test_a_command_prints_what_the_page_shows(command, words, expected, capsys):
  assert printed(command, words, capsys) == expected


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_is_run(page):
  text = (FOLDER / page).read_text()
  assert len(BLOCK.findall(text)) == text.count("```console") > PAGES[page]


PATH = re.compile(r"(?<![\w/])(?:maxbatch|scripts|tests)/[\w/.]*\w(?:/|\.\w+)")
COMMAND = re.compile(
  r"(?:python -m\s+maxbatch\.|(?:`|\$ |^ +|bin/)maxbatch )([a-z_]+)", re.MULTILINE
)
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(FOLDER.glob("*.md"))]
ELSEWHERE = {"docs/peers.md"}
"""Its paths are inside other repositories."""


@pytest.mark.parametrize("file", TEXTS, ids=[file.name for file in TEXTS])
def test_every_path_and_command_of_a_page_exists(file):
  text = file.read_text()
  missing = [name for name in COMMAND.findall(text) if name not in {*console.COMMANDS, "help"}]
  if str(file.relative_to(ROOT)) not in ELSEWHERE:
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
  assert not missing


LINK = re.compile(r'\]\((?!https?:)([^)#\s]+)|src(?:set)?="([^"]+)"')


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_of_a_file_outside_of_the_site_leads_somewhere(name):
  links = [one or other for one, other in LINK.findall((ROOT / name).read_text())]
  assert links
  assert not [link for link in links if not (ROOT / link).exists()]


def test_the_figures_beside_a_report_are_the_reports():
  said = re.search(r"\]\((reports/\S+)\): a step of [^*]*", (FOLDER / "compile.md").read_text())
  assert said
  report = (FOLDER / said[1]).read_text()
  figures = re.findall(r"\d+\.\d+(?: s|%| GiB)", said[0])
  assert len(figures) == 3
  assert all(figure in report for figure in figures)


def test_the_readme_is_read_in_a_minute():
  assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_a_path_and_a_command_are_found_in_a_page():
  assert PATH.findall("See `maxbatch/core/plan.py`, maxbatch/batch/.") == [
    "maxbatch/core/plan.py",
    "maxbatch/batch/",
  ]
  assert COMMAND.findall("python -m\n  maxbatch.plan, `maxbatch keys`\n    maxbatch runs") == [
    "plan",
    "keys",
    "runs",
  ]
