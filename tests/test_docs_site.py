"""docs/ as a site: it builds without a dead link, its index is the questions, its commands are read."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxbatch.__main__ import COMMANDS
from maxbatch.command_line.arguments import parse
from maxbatch.config.load import load_config
from maxbatch.config.schema import documented_keys
from maxbatch.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")
START = re.compile(
  rf"^\s*(?:\$ )?(?:(?:\.venv/bin/)?(?:python -m maxbatch\.|maxbatch (?=(?:{'|'.join(COMMANDS)})\b))(\w+)"
  r"|scripts/(train)\.sh)(.*)"
)
SOMEBODYS = ("module:", "my_", "MY_", "somebodys", "runs/", "adapter", "chatty")


def build(root: Path, into: Path) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
  return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
  shutil.copytree(ROOT / "docs", tmp_path / "docs")
  shutil.copy(ROOT / "mkdocs.yml", tmp_path)
  (tmp_path / "scripts").mkdir()
  shutil.copy(ROOT / "scripts" / "site_pages.py", tmp_path / "scripts")
  return tmp_path


def test_the_site_builds_and_every_page_is_in_it(checkout):
  done = build(checkout, checkout / "site")
  assert done.returncode == 0, done.stderr
  for page in PAGES:
    assert (checkout / "site" / f"{page.stem}.html").is_file()
  keys = (checkout / "site" / "keys.html").read_text()
  assert all(f"<code>{one.key}</code>" in keys for one in documented_keys())
  assert "<code>maxbatch critical_batch</code>" in (checkout / "site" / "commands.html").read_text()
  # From another host comes nothing but what one clicks on.
  index = (checkout / "site" / "index.html").read_text()
  assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', index)


def test_a_dead_link_and_a_page_that_is_not_in_the_index_are_found(checkout):
  """Of pages that are no more than their headings, or building them would take longest."""
  for page in (checkout / "docs").glob("*.md"):
    page.write_text(page.read_text().partition("\n")[0])
  with (checkout / "docs" / "data.md").open("a") as file:
    file.write("\n\n[x](batch_size.md#no-such-heading) [y](no_such_page.md)\n")
  (checkout / "docs" / "forgotten.md").write_text("# Forgotten?\n")
  done = build(checkout, checkout / "site")
  assert done.returncode != 0
  for name in ("no-such-heading", "no_such_page.md", "forgotten.md"):
    assert name in done.stderr


def test_the_index_is_the_questions():
  index = (ROOT / "docs" / "index.md").read_text()
  listed = dict(re.findall(r"- \[(.+?)\]\((\w+\.md)\)", index))
  titles = {page.read_text().splitlines()[0].removeprefix("# "): page.name for page in PAGES}
  assert listed == titles
  assert all("?" in title or title.endswith("…") for title in titles)


def commands(text: str) -> list[tuple[str, str]]:
  """Every command of a page that could be typed as it stands: its module, its arguments."""
  results = []
  for line in re.sub(r"\\\n\s*", " ", text).splitlines():
    if (match := START.match(line)) and "…" not in line:
      words = re.split(r"\s#|\s[|>]\s", match[3])[0]
      results.append((match[1] or match[2], words))
  return results


SHOWN = [
  (page.name, *one) for page in [ROOT / "README.md", *PAGES] for one in commands(page.read_text())
]
IN_TABLES = [
  ("README.md", module, words)
  for module, words in re.findall(r"`maxbatch (\w+)([^`]*)`", (ROOT / "README.md").read_text())
  if "…" not in words
]


@pytest.mark.parametrize(("page", "module", "words"), [*SHOWN, *IN_TABLES])
def test_every_command_of_a_page_is_understood(page, module, words):
  command = importlib.import_module(f"maxbatch.{module}").COMMAND
  arguments = parse(command, shlex.split(words)).configuration
  if not command.takes_keys or "--help" in arguments:
    return
  # Files, folders and plug-ins of somebody's are not here, nor their keys.
  keys = [
    one
    for one in arguments
    if not one.partition("=")[2].startswith(SOMEBODYS) and not one.startswith("my_")
  ]
  if not any(one.startswith("config=") for one in keys):
    keys.append("config=base")
  # What a page shows being refused is refused by more than its keys.
  assert "there is no key" not in refusal(keys), page


def refusal(keys: list[str]) -> str:
  """Why a configuration is refused; empty if it is not."""
  try:
    load_config(keys)
  except UserError as error:
    return str(error)
  return ""


def test_a_key_that_does_not_exist_would_be_seen():
  [(module, words)] = commands(
    "    python -m maxbatch.plan config=base \\\n      stepz=3  # a word\n"
  )
  with pytest.raises(AssertionError, match="stepz"):
    test_every_command_of_a_page_is_understood("x", module, words)
