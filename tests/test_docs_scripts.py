"""The scripts that pages name: they are there, import what exists and know their arguments.

Most take minutes to hours, or what is not here (a TPU's peer, another trainer); what they call is
tested by itself.
"""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from test_docs_site import PAGES, ROOT

from maxbatch.config.schema import fields

COMMAND = re.compile(r"(?<![\w/])scripts/(\w+\.(?:py|sh))((?: [^`\n#]*)?)")
SHOWN = sorted(
  {
    (page.name, script, words.strip())
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
    for script, words in COMMAND.findall(re.sub(r"\\\n\s*", "", page.read_text()))
  }
)
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize(("page", "script", "words"), SHOWN)
def test_a_script_of_a_page_knows_its_arguments(page, script, words):
  text = (ROOT / "scripts" / script).read_text()
  keys = {"config", *fields()}
  for option in re.findall(r"(?<!\S)--[\w-]+", words):
    assert option in text or option == "--help", option
  for key in re.findall(r"(?<!\S)(\w+)=", words):
    assert key in keys or f'"{key}' in text, key


def imports(path: Path) -> list[tuple[str, str]]:
  """What a script takes from the package: the module, the name."""
  return [
    (module, name.name)
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("maxbatch")
    for name in node.names
  ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_exists(path):
  for module, name in imports(path):
    taken = importlib.import_module(module)
    assert hasattr(taken, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
