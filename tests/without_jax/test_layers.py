"""Who may import whom, and what needs no jax.

Batch sizes are derived in one place, core/, from which all others read them: a rule for readers.
"""

import ast
import dataclasses
import graphlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

import maxbatch
from maxbatch.config import schema

PACKAGE = pathlib.Path(maxbatch.__file__).parent
PATHS = {
  ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
  for path in sorted(PACKAGE.rglob("*.py"))
}
SECTIONS = {*schema.sections(), "config", "mesh", "keys"}

# Lowest first: a folder imports from itself and from what stands before it.
FOLDERS = [
  "errors",
  "core",
  "hugging_face",
  "config",
  "command_line",
  "plots",
  "run_folder",
  "precision",
  "batch",
  "batch_rules",
  "noise",
  "pipeline_parallel",
  "estimate",
  "hardware",
  "advice",
  "data",
  "models",
  "sampling",
  "checkpoints",
  "conversion",
  "training",
  "compile",
  "tuning",
  "run_report",
  "metrics_writers",
  "modes",
  "rl",
  "input_analysis",
  "experiments",
]
COMMANDS = [
  "train",
  "train_rl",
  "sample",
  "plan",
  "advise",
  "pipeline",
  "critical_batch",
  "input_analyzer",
  "convert",
  "report",
  "runs",
  "keys",
  "__main__",
]
MOST_PRIVATE_NAMES_PATCHED = 15
"""By tests, which then know how a thing is done, not what it promises. Fewer is better."""
WITHOUT_JAX = [
  "errors",
  "hugging_face",
  "config",
  "command_line",
  "batch",
  "batch_rules",
  "noise",
  "pipeline_parallel",
  "estimate",
  "advice",
  "plan",
  "advise",
  "keys",
  "__main__",
]


def imports(nodes: Iterable[ast.AST]) -> set[str]:
  """Returns the modules imported: `from a import b` means the module a.b if there is one, else a."""
  imported = set[str]()
  for node in nodes:
    if isinstance(node, ast.Import):
      imported |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names = [f"{node.module}.{alias.name}" for alias in node.names]
      imported |= {name if name in PATHS else str(node.module) for name in names}
  return imported


@dataclasses.dataclass(frozen=True)
class Source:
  """Holds what the tests ask of a file.

  Its tree is not kept: 380,000 nodes would slow every garbage collection of all other tests.
  """

  at_top: set[str]
  nested: set[str]
  at_run_time: set[str]
  imports_by_name: bool
  reads_by_computed_name: list[str]
  functions: list[tuple[str, str]]
  """Name and first word of the docstring of each function that is no property."""

  @property
  def imports(self) -> set[str]:
    return self.at_top | self.nested

  @classmethod
  def parse(cls, text: str) -> "Source":
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, _KINDS)]
    tops = {id(node) for node in tree.body}
    inside = [node for node in nodes if id(node) not in tops]
    for_types = {id(n) for top in tree.body if _for_type_checkers(top) for n in ast.walk(top)}
    return cls(
      at_top=imports(tree.body),
      nested=imports(inside),
      at_run_time=imports(node for node in nodes if id(node) not in for_types),
      imports_by_name=any(
        isinstance(n, ast.Attribute) and n.attr == "import_module" for n in inside
      ),
      reads_by_computed_name=reads_by_computed_name(nodes),
      functions=[
        (node.name, (ast.get_docstring(node) or "Returns").split()[0].strip(",.:;"))
        for node in nodes
        if isinstance(node, ast.FunctionDef) and not _is_property(node)
      ],
    )


def reads_by_computed_name(nodes: Iterable[ast.AST]) -> list[str]:
  """Returns the calls of vars and getattr on what is named like a configuration or a section."""
  calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
  return [
    ast.unparse(call)
    for call in calls
    if isinstance(call.func, ast.Name) and call.func.id in ("vars", "getattr", "setattr")
    if re.split(r"[.\[(]", ast.unparse(call.args[0]))[-1] in SECTIONS | {"section"}
  ]


_KINDS = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.FunctionDef)


def _for_type_checkers(node: ast.stmt) -> bool:
  return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_property(node: ast.FunctionDef) -> bool:
  return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


SOURCES = {module: Source.parse(path.read_text()) for module, path in PATHS.items()}


def test_a_folder_imports_only_what_stands_before_it():
  order = [*FOLDERS, *COMMANDS, "__init__"]
  for module, source in SOURCES.items():
    own = module.split(".")[1:2]
    used = {name.split(".")[1] for name in source.imports if name.startswith("maxbatch.")}
    late = [name for name in used if [name] != own and order.index(name) > order.index(own[0])]
    assert not late, f"{module} imports {late}"


def test_what_is_imported_of_the_package_is_there():
  used = set().union(*(source.imports for source in SOURCES.values()))
  packages = {m.removesuffix(".__init__") for m in SOURCES}
  assert not {m for m in used if m.split(".")[0] == "maxbatch"} - SOURCES.keys() - packages


def test_contributing_shows_the_folders_in_this_order():
  text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
  assert re.findall(r"^\| `maxbatch/(\w+)(?:\.py|/)` \|", text, re.M) == FOLDERS


def test_no_file_imports_itself_by_way_of_others():
  list(graphlib.TopologicalSorter({m: s.imports for m, s in SOURCES.items()}).static_order())


def test_the_root_holds_the_public_api_the_commands_and_the_errors_alone():
  assert {p.stem for p in PACKAGE.glob("*.py")} == {"__init__", "errors", *COMMANDS}


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - {"maxbatch.__init__"}))
def test_the_package_is_imported_only_at_the_top_of_a_file(module):
  assert not [name for name in SOURCES[module].nested if name.startswith("maxbatch")]
  assert not SOURCES[module].imports_by_name


def test_a_run_imports_nothing_that_draws_and_no_service():
  result, waiting = set[str](), ["maxbatch.train", "maxbatch.train_rl"]
  while waiting:
    module = waiting.pop()
    result.add(module)
    waiting += SOURCES[module].at_top - result if module in SOURCES else []
  assert "maxbatch.run_report.background" in result
  assert not {name.partition(".")[0] for name in result} & {"bokeh", "jinja2", "wandb", "mlflow"}


def test_a_run_on_text_reaches_no_reinforcement_learning():
  result, waiting = set[str](), ["maxbatch.train"]
  while waiting:
    result.add(module := waiting.pop())
    waiting += {name for name in SOURCES[module].imports if name in SOURCES} - result
  assert "maxbatch.training.loop" in result
  of_rl = re.compile(r"maxbatch\.(rl\b|\w+\.rl_).*|.*rollout.*")
  assert not [module for module in result if of_rl.fullmatch(module)]


def test_the_init_files_import_nothing_of_the_package():
  # They are read before any module of their folder, jax or not. The root's, the public API, names
  # what it imports when it is asked for: parts of the core, and for type checkers alone.
  for module, source in SOURCES.items():
    if module.endswith("__init__"):
      is_root = module == "maxbatch.__init__"
      used = source.at_run_time if is_root else source.imports
      assert not {name for name in used if not is_root or name.startswith(("maxbatch", "jax"))}
  own = {name for name in SOURCES["maxbatch.__init__"].imports if name.startswith("maxbatch")}
  assert all(name.startswith(("maxbatch.core.", "maxbatch.errors")) for name in own)


def test_what_needs_no_jax_works_where_it_is_not_installed():
  modules = [m for m in SOURCES if m.split(".")[1:2] and m.split(".")[1] in WITHOUT_JAX]
  program = f"""
import sys
absent = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboard")
sys.modules.update(dict.fromkeys(absent))
import {", ".join(m.removesuffix(".__init__") for m in modules)}
config = maxbatch.config.load.load_config(["config=base"])
layout = maxbatch.batch.from_config.topology(config.mesh, 8)
print(maxbatch.batch.from_config.plan_batches(config.batch, config.run, layout).total_samples)
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    cwd=PACKAGE.parent,
  )
  assert (done.stdout, done.stderr) == ("12800\n", "")


def test_keys_of_the_configuration_are_read_by_their_names():
  results = {module for module, source in SOURCES.items() if source.reads_by_computed_name}
  assert results == {"maxbatch.config.schema"}


@pytest.mark.parametrize(
  "source", ["vars(config)", "vars(config.batch)[key]", "getattr(mesh, name)", "getattr(a.keys, b)"]
)
def test_a_key_read_by_a_computed_name_would_be_seen(source):
  assert Source.parse(source).reads_by_computed_name == [source.partition("[")[0]]


NOT_VERBS = {
  *("As", "Is", "Its", "This", "Thus", "Across", "Besides", "Unless", "Always", "Was"),
  *("Loss", "Axes", "Batches", "Bytes", "Columns", "Completions", "Devices", "Documents", "Files"),
  *("Gradients", "Groups", "Keys", "Layers", "Lines", "Metrics", "Microbatches", "Parameters"),
  *("Policies", "Prompts", "Rows", "Seconds", "Shapes", "Sizes", "Stages", "Ticks", "Tokens"),
}
"""End in s as a verb of the third person does, and begin no docstring of a function."""


@pytest.mark.parametrize("module", SOURCES)
def test_docstrings_of_functions_begin_with_what_they_do(module):
  """Properties, which are read like attributes, may begin with a noun."""
  for name, first in SOURCES[module].functions:
    is_verb = re.fullmatch("[A-Z][a-z-]+s", first) and first not in NOT_VERBS
    assert is_verb, f"{module}.{name} begins with {first!r}: Returns …, Reads …"


def private_names_patched(text: str) -> list[str]:
  """Returns the private names that a test replaces by monkeypatch or unittest.mock."""
  calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
  patches = [
    call
    for call in calls
    if re.search(r"\b(setattr|delattr|patch(\.object)?)$", ast.unparse(call.func))
  ]
  given = [
    each.value for call in patches for each in call.args[:2] if isinstance(each, ast.Constant)
  ]
  names = [str(value).rpartition(".")[2] for value in given]
  return [name for name in names if re.match("_(?!_)", name)]


def test_tests_replace_few_private_names():
  tests = {path: path.read_text() for path in pathlib.Path(__file__).parents[1].rglob("*.py")}
  quoted = re.compile(r"""["'](\w+\.)*_[a-z][\w.]*["']""", re.IGNORECASE)
  results = {
    str(path): private_names_patched(text) for path, text in tests.items() if quoted.search(text)
  }
  found = {name: names for name, names in results.items() if names}
  assert sum(map(len, found.values())) <= MOST_PRIVATE_NAMES_PATCHED, found


@pytest.mark.parametrize(
  "source",
  [
    "monkeypatch.setattr(loop, '_dispatch', f)",
    "patch.delattr('maxbatch.loop._dispatch')",
    "mock.patch.object(loop, '_dispatch')",
    "patch('maxbatch.loop._dispatch')",
  ],
)
def test_a_private_name_that_is_replaced_would_be_seen(source):
  assert private_names_patched(source) == ["_dispatch"]
  assert not private_names_patched(source.replace("_d", "d"))
