"""Blocks of figures in pages: made by their commands, and listed once their sources have changed."""

import datetime
import importlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

refresh_docs = importlib.import_module("refresh_docs")

PAGE = """Before.

<!-- made by: scripts/figures.py 3; from: source data; takes: {takes};
at {commit} on 2026-01-02 -->
old
<!-- end of made -->

After.
"""


def git(root: pathlib.Path, *words: str) -> str:
  who = ["-c", "user.name=a", "-c", "user.email=a@b"]
  return subprocess.run(
    ["git", *who, *words], cwd=root, check=True, capture_output=True, text=True
  ).stdout.strip()


def commit(root: pathlib.Path) -> str:
  git(root, "add", "-A")
  git(root, "commit", "-qm", "a change")
  return git(root, "rev-parse", "--short", "HEAD")


@pytest.fixture
def root(tmp_path):
  git(tmp_path, "init", "-q")
  for folder in ("docs", "scripts", "data"):
    (tmp_path / folder).mkdir()
  (tmp_path / "source").write_text("1")
  (tmp_path / "data" / "a").write_text("1")
  script = "import sys\nprint('| figure |', open('source').read(), sys.argv[1])\n"
  (tmp_path / "scripts" / "figures.py").write_text(script)
  first = commit(tmp_path)
  (tmp_path / "docs" / "page.md").write_text(PAGE.format(takes="seconds", commit=first))
  commit(tmp_path)
  return tmp_path


def test_a_block_is_old_once_a_source_has_changed(root, capsys):
  assert refresh_docs.main([], root) == 0
  assert capsys.readouterr().out.startswith("0 blocks")
  (root / "data" / "a").write_text("2")
  newest = commit(root)
  assert refresh_docs.main([], root) == 0
  said = capsys.readouterr().out
  assert said.startswith("docs/page.md: scripts/figures.py 3 (takes: seconds, made at ")
  assert f"): {newest} a change\n" in said
  assert "1 blocks of figures" in said


@pytest.mark.parametrize("name", ["all", "docs/page.md"])
def test_a_block_is_made_anew_with_its_commit(root, capsys, name):
  (root / "source").write_text("2")
  newest = commit(root)
  assert refresh_docs.main([name], root) == 0
  page = (root / "docs" / "page.md").read_text()
  today = datetime.datetime.now(datetime.UTC).date()
  made = f"at {newest} on {today}"
  line = f"*From `scripts/figures.py 3`, {made}.*"
  assert f"{made} -->\n\n| figure | 2 3\n\n{line}\n\n<!-- end of made -->" in page
  assert page.startswith("Before.\n\n<!-- made by: scripts/figures.py 3; from: source data; takes")
  assert page.endswith("<!-- end of made -->\n\nAfter.\n")
  capsys.readouterr()
  assert refresh_docs.main([], root) == 0
  assert capsys.readouterr().out.startswith("0 blocks")


@pytest.mark.parametrize(
  ("new", "is_old"),
  [
    ('"""Says more."""\nA = 1  # one\n"""Of A."""\n', False),
    ('"""Says."""\nA = 2\n', True),
    (None, True),
  ],
)
def test_comments_and_docstrings_alone_make_no_block_old(root, capsys, new, is_old):
  file = root / "data" / "code.py"
  file.write_text('"""Says."""\nA = 1\n')
  first = commit(root)
  page = root / "docs" / "page.md"
  page.write_text(PAGE.format(takes="seconds", commit=first))
  if new is None:
    file.unlink()
  else:
    file.write_text(new)
  commit(root)
  assert refresh_docs.main([], root) == 0
  assert capsys.readouterr().out.splitlines()[-1].startswith(f"{int(is_old)} blocks")


def test_a_block_carries_the_newest_commit_of_what_it_depends_on(root):
  (root / "source").write_text("2")
  newest = commit(root)
  (root / "docs" / "other.md").write_text("no figures")
  commit(root)
  assert refresh_docs.main(["all"], root) == 0
  assert f"at {newest} on " in (root / "docs" / "page.md").read_text()


def test_quiet_makes_what_needs_a_quiet_machine_alone(root, capsys):
  page = root / "docs" / "page.md"
  before = page.read_text()
  assert refresh_docs.main(["quiet"], root) == 0
  assert page.read_text() == before
  page.write_text(before.replace("takes: seconds", "takes: quiet minutes"))
  assert refresh_docs.main(["quiet"], root) == 0
  assert "| figure | 1 3" in page.read_text()
  capsys.readouterr()


def test_words_choose_among_the_blocks_of_a_page(root):
  page = root / "docs" / "page.md"
  before = page.read_text()
  page.write_text(before + before.replace("figures.py 3", "figures.py 4"))
  assert refresh_docs.main(["docs/page.md", "4"], root) == 0
  assert page.read_text().startswith(before)
  assert "| figure | 1 4" in page.read_text()


def test_what_a_command_prints_stays_in_its_fence(root):
  page = root / "docs" / "page.md"
  page.write_text(page.read_text().replace("old", "```text\nold\n```"))
  assert refresh_docs.main(["all"], root) == 0
  assert "\n```text\n| figure | 1 3\n```\n" in page.read_text()


def test_a_command_of_the_package_runs_in_an_empty_folder(root):
  (root / "maxbatch").mkdir()
  command = "import os\nprint(os.listdir(), os.environ['XDG_CACHE_HOME'] == os.getcwd())\n"
  (root / "maxbatch" / "__init__.py").touch()
  (root / "maxbatch" / "plan.py").write_text(command)
  commit(root)
  page = root / "docs" / "page.md"
  page.write_text(page.read_text().replace("scripts/figures.py 3", "python -m maxbatch.plan"))
  assert refresh_docs.main(["all"], root) == 0
  assert "\n[] True\n" in page.read_text()


@pytest.mark.parametrize("takes", ["seconds", "minutes", "quiet minutes", "a day, by hand"])
def test_all_makes_what_a_command_makes_here_and_seconds_what_takes_seconds(root, capsys, takes):
  page = root / "docs" / "page.md"
  page.write_text(page.read_text().replace("takes: seconds", f"takes: {takes}"))
  before = page.read_text()
  for word, made in (("seconds", ["seconds"]), ("all", ["seconds", "minutes", "quiet minutes"])):
    page.write_text(before)
    assert refresh_docs.main([word], root) == 0
    assert (page.read_text() == before) == (takes not in made)
    assert ("left as it is: docs/page.md" in capsys.readouterr().out) == (takes not in made)


def test_figures_of_changes_that_are_not_committed_are_refused(root):
  (root / "source").write_text("2")
  with pytest.raises(SystemExit, match="commit the changes"):
    refresh_docs.main(["docs/page.md"], root)


@pytest.mark.parametrize(
  ("old", "new", "said"),
  [("; takes: seconds", "", "not written"), ("source data", "elsewhere", "there is no elsewhere")],
)
def test_a_marker_that_says_too_little_is_refused(root, old, new, said):
  page = root / "docs" / "page.md"
  page.write_text(page.read_text().replace(old, new))
  with pytest.raises(SystemExit, match=said):
    refresh_docs.main([], root)


def test_a_commit_that_is_not_known_is_said(root, capsys):
  page = root / "docs" / "page.md"
  page.write_text(PAGE.format(takes="seconds", commit="0123abc"))
  assert refresh_docs.main([], root) == 0
  assert "made at 0123abc on 2026-01-02): its commit is not known" in capsys.readouterr().out


TABLE = "| | a step |\n|---|---|\n| fsdp 16 | {cell} |\n"


@pytest.mark.parametrize(
  "cell", ["3.76 s", "45.7%", "≈ 12 GiB (8–13)", "0.98", ".111, .496", "**+0.5**"]
)
def test_a_table_of_figures_says_where_they_are_from(root, cell):
  page = root / "docs" / "page.md"
  blocks = PAGE.format(takes="seconds", commit="0123abc")
  table = TABLE.format(cell=cell)
  page.write_text(blocks + "\n" + table)
  assert list(refresh_docs.unknown(root, page)) == ["docs/page.md:10: | | a step |"]
  page.write_text(f"{blocks}\n<!-- figures: a paper -->\n{table}")
  assert not list(refresh_docs.unknown(root, page))
  page.write_text(blocks.replace("old\n", table))
  assert not list(refresh_docs.unknown(root, page))


@pytest.mark.parametrize(
  "cell", ["a step", "4", "0.12.0.1", "1,024", "after 300 s it ends", "2p − 1"]
)
def test_a_table_of_words_and_counts_needs_no_source(root, cell):
  page = root / "docs" / "page.md"
  page.write_text(TABLE.format(cell=cell))
  assert not list(refresh_docs.unknown(root, page))


def test_each_table_of_figures_in_the_pages_here_says_where_they_are_from():
  assert not [
    line for page in refresh_docs.pages(ROOT) for line in refresh_docs.unknown(ROOT, page)
  ]


def test_the_line_below_each_block_here_says_what_the_comment_says():
  for page in refresh_docs.pages(ROOT):
    for block in refresh_docs.blocks(ROOT, page):
      assert block.content.endswith(f"\n\n{block.footer()}\n\n"), str(block)


def test_markers_of_the_pages_here_are_read():
  found = [block for page in refresh_docs.pages(ROOT) for block in refresh_docs.blocks(ROOT, page)]
  assert {str(block.page) for block in found} >= {
    "docs/effective_microbatches.md",
    "docs/compile.md",
  }
