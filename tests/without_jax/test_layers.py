"""Who may import whom, and what needs no jax.

Batch sizes are derived in one place, core/, from which all others read them: a rule for readers.
"""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import maxbatch
from maxbatch.config import schema

PACKAGE = pathlib.Path(maxbatch.__file__).parent
TREES = {
  ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(path.read_text())
  for path in sorted(PACKAGE.rglob("*.py"))
}

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


def imports(tree: ast.AST) -> set[str]:
  """What is imported anywhere in a file: `from a import b` means the module a.b, else a."""
  nodes = list(ast.walk(tree))
  named = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
  pairs = [(n.module, a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
  return named | {f"{m}.{name}" if f"{m}.{name}" in TREES else str(m) for m, name in pairs}


def test_a_folder_imports_only_what_stands_before_it():
  order = [*FOLDERS, *COMMANDS, "__init__"]
  for module, tree in TREES.items():
    own = module.split(".")[1:2]
    used = {name.split(".")[1] for name in imports(tree) if name.startswith("maxbatch.")}
    late = [name for name in used if [name] != own and order.index(name) > order.index(own[0])]
    assert not late, f"{module} imports {late}"


def test_what_is_imported_of_the_package_is_there():
  used = set().union(*map(imports, TREES.values()))
  packages = {m.removesuffix(".__init__") for m in TREES}
  assert not {m for m in used if m.split(".")[0] == "maxbatch"} - TREES.keys() - packages


def test_contributing_shows_the_folders_in_this_order():
  text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
  assert re.findall(r"^\| `maxbatch/(\w+)(?:\.py|/)` \|", text, re.M) == FOLDERS


def test_no_file_imports_itself_by_way_of_others():
  list(graphlib.TopologicalSorter({m: imports(t) for m, t in TREES.items()}).static_order())


def test_the_root_holds_the_public_api_the_commands_and_the_errors_alone():
  assert {p.stem for p in PACKAGE.glob("*.py")} == {"__init__", "errors", *COMMANDS}


@pytest.mark.parametrize("module", sorted(TREES.keys() - {"maxbatch.__init__"}))
def test_the_package_is_imported_only_at_the_top_of_a_file(module):
  inside = [node for top in TREES[module].body for node in ast.walk(top) if node is not top]
  assert not [n for node in inside for n in imports_of_one(node) if n.startswith("maxbatch")]
  by_name = [n for n in inside if isinstance(n, ast.Attribute) and n.attr == "import_module"]
  assert not by_name


def imports_of_one(node: ast.AST) -> set[str]:
  return imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else set()


def test_a_run_imports_nothing_that_draws_and_no_service():
  result, waiting = set[str](), ["maxbatch.train", "maxbatch.train_rl"]
  while waiting:
    module = waiting.pop()
    result.add(module)
    tops = TREES[module].body if module in TREES else []
    waiting += set().union(*map(imports_of_one, tops)) - result
  assert "maxbatch.run_report.background" in result
  assert not {name.partition(".")[0] for name in result} & {"bokeh", "jinja2", "wandb", "mlflow"}


def test_a_run_on_text_reaches_no_reinforcement_learning():
  result, waiting = set[str](), ["maxbatch.train"]
  while waiting:
    result.add(module := waiting.pop())
    waiting += {name for name in imports(TREES[module]) if name in TREES} - result
  assert "maxbatch.training.loop" in result
  of_rl = re.compile(r"maxbatch\.(rl\b|\w+\.rl_).*|.*rollout.*")
  assert not [module for module in result if of_rl.fullmatch(module)]


def test_the_init_files_import_nothing_of_the_package():
  # They are read before any module of their folder, jax or not. The root's, the public API, names
  # what it imports when it is asked for: parts of the core, and for type checkers alone.
  for module, tree in TREES.items():
    if module.endswith("__init__"):
      is_root = module == "maxbatch.__init__"
      tops = [node for node in tree.body if not (is_root and for_type_checkers(node))]
      used = set().union(*map(imports, tops))
      assert not {name for name in used if not is_root or name.startswith(("maxbatch", "jax"))}
  own = {name for name in imports(TREES["maxbatch.__init__"]) if name.startswith("maxbatch")}
  assert all(name.startswith(("maxbatch.core.", "maxbatch.errors")) for name in own)


def for_type_checkers(node: ast.stmt) -> bool:
  return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_what_needs_no_jax_works_where_it_is_not_installed():
  modules = [m for m in TREES if m.split(".")[1:2] and m.split(".")[1] in WITHOUT_JAX]
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


SECTIONS = {*schema.sections(), "config", "mesh", "keys"}


def reads_by_computed_name(tree: ast.AST) -> list[str]:
  """Calls of vars and getattr on what is called as a configuration or one of its sections is."""
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
  return [
    ast.unparse(call)
    for call in calls
    if isinstance(call.func, ast.Name) and call.func.id in ("vars", "getattr", "setattr")
    if re.split(r"[.\[(]", ast.unparse(call.args[0]))[-1] in SECTIONS | {"section"}
  ]


def test_keys_of_the_configuration_are_read_by_their_names():
  results = {module for module, tree in TREES.items() if reads_by_computed_name(tree)}
  assert results == {"maxbatch.config.schema"}


@pytest.mark.parametrize(
  "source", ["vars(config)", "vars(config.batch)[key]", "getattr(mesh, name)", "getattr(a.keys, b)"]
)
def test_a_key_read_by_a_computed_name_would_be_seen(source):
  assert reads_by_computed_name(ast.parse(source)) == [source.partition("[")[0]]


NOT_VERBS = {
  *("As", "Is", "Its", "This", "Thus", "Across", "Besides", "Unless", "Always", "Was"),
  *("Loss", "Axes", "Batches", "Bytes", "Columns", "Completions", "Devices", "Documents", "Files"),
  *("Gradients", "Groups", "Keys", "Layers", "Lines", "Metrics", "Microbatches", "Parameters"),
  *("Policies", "Prompts", "Rows", "Seconds", "Shapes", "Sizes", "Stages", "Ticks", "Tokens"),
}
"""End in s as a verb of the third person does, and begin no docstring of a function."""


@pytest.mark.parametrize("module", TREES)
def test_docstrings_of_functions_begin_with_what_they_do(module):
  """Properties, which are read like attributes, may begin with a noun."""
  for node in ast.walk(TREES[module]):
    if not isinstance(node, ast.FunctionDef) or _is_property(node):
      continue
    first = (ast.get_docstring(node) or "Returns").split()[0].strip(",.:;")
    is_verb = re.fullmatch("[A-Z][a-z-]+s", first) and first not in NOT_VERBS
    assert is_verb, f"{module}.{node.name} begins with {first!r}: Returns …, Reads …"


def _is_property(node: ast.FunctionDef) -> bool:
  return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
