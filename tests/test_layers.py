"""Who may import whom, what needs no jax, and who may multiply batch sizes."""

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
  for path in PACKAGE.rglob("*.py")
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
]


def imports(tree: ast.AST) -> set[str]:
  """What is imported anywhere in a file: `from a import b` means the module a.b, else a."""
  nodes = list(ast.walk(tree))
  named = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
  pairs = [(n.module, a.name) for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names]
  return named | {f"{m}.{name}" if f"{m}.{name}" in TREES else str(m) for m, name in pairs}


def test_a_folder_imports_only_what_stands_before_it():
  order = [*FOLDERS, *COMMANDS]
  for module, tree in TREES.items():
    own = module.split(".")[1:2]
    used = {name.split(".")[1] for name in imports(tree) if name.startswith("maxbatch.")}
    late = [name for name in used if [name] != own and order.index(name) > order.index(own[0])]
    assert not late, f"{module} imports {late}"


def test_the_readme_shows_the_folders_in_this_order():
  text = (PACKAGE.parent / "README.md").read_text()
  assert re.findall(r"^\| `maxbatch/(\w+)(?:\.py|/)` \|", text, re.M) == FOLDERS


def test_no_file_imports_itself_by_way_of_others():
  list(graphlib.TopologicalSorter({m: imports(t) for m, t in TREES.items()}).static_order())


def test_the_root_holds_the_commands_and_the_errors_alone():
  assert {p.stem for p in PACKAGE.glob("*.py")} == {"__init__", "errors", *COMMANDS}


@pytest.mark.parametrize("module", TREES)
def test_the_package_is_imported_only_at_the_top_of_a_file(module):
  inside = [node for top in TREES[module].body for node in ast.walk(top) if node is not top]
  assert not [n for node in inside for n in imports_of_one(node) if n.startswith("maxbatch")]
  by_name = [n for n in inside if isinstance(n, ast.Attribute) and n.attr == "import_module"]
  assert not by_name


def imports_of_one(node: ast.AST) -> set[str]:
  return imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else set()


def test_a_run_imports_nothing_that_draws_and_no_service():
  found, waiting = set[str](), ["maxbatch.train", "maxbatch.train_rl"]
  while waiting:
    module = waiting.pop()
    found.add(module)
    tops = TREES[module].body if module in TREES else []
    waiting += set().union(*map(imports_of_one, tops)) - found
  assert "maxbatch.run_report.background" in found
  assert not {name.partition(".")[0] for name in found} & {"bokeh", "jinja2", "wandb", "mlflow"}


def test_the_init_files_import_nothing():
  # They are read before any module of their folder, jax or not.
  assert not [
    m for m, tree in TREES.items() if (path_of(m) / "__init__.py").exists() and imports(tree)
  ]


def path_of(module: str) -> pathlib.Path:
  return PACKAGE.parent.joinpath(*module.split("."))


def test_what_needs_no_jax_works_where_it_is_not_installed():
  modules = [m for m in TREES if m.split(".")[1:2] and m.split(".")[1] in WITHOUT_JAX]
  program = f"""
import sys
absent = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboard")
sys.modules.update(dict.fromkeys(absent))
import {", ".join(m.removesuffix(".__init__") for m in modules)}
config = maxbatch.config.load.load_config(["config=base"])
layout = maxbatch.batch.topology.topology(config.mesh, 8)
print(maxbatch.batch.plan.plan_batches(config.batch, config.run, layout).total_samples)
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    cwd=PACKAGE.parent,
  )
  assert (done.stdout, done.stderr) == ("12800\n", "")


# The number of microbatches is a count, not a size: it also multiplies seconds and FLOPs.
BATCH_SIZE = re.compile(
  r"(?!num_(pipeline_)?microbatches)(.*_)?(batch|batch_size|batch_to_train|batch_to_load"
  r"|accumulation_steps|microbatches|devices"
  r"|num_slices|num_batch_groups|expansion_factor_real_data|tokens_per_step|batch_tokens)"
)
PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def batch_products(tree: ast.AST) -> list[str]:
  """Products and quotients in which the name of a batch size takes part.

  What is passed on as `num_devices` counts devices, and what is divided by seconds is a speed.
  """
  keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
  counts = {id(keyword.value) for keyword in keywords if keyword.arg == "num_devices"}
  return [
    ast.unparse(node)
    for node in ast.walk(tree)
    if isinstance(node, ast.BinOp)
    and isinstance(node.op, PRODUCTS)
    and any(is_batch_size(side) for side in (node.left, node.right))
    and id(node) not in counts
    and not (isinstance(node.op, ast.Div) and name_of(node.right).endswith("seconds"))
  ]


def name_of(node: ast.expr) -> str:
  return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_batch_size(node: ast.expr) -> bool:
  return BATCH_SIZE.fullmatch(name_of(node)) is not None


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
  found = {module for module, tree in TREES.items() if reads_by_computed_name(tree)}
  assert found == {"maxbatch.config.schema"}


@pytest.mark.parametrize(
  "source", ["vars(config)", "vars(config.batch)[key]", "getattr(mesh, name)", "getattr(a.keys, b)"]
)
def test_a_key_read_by_a_computed_name_would_be_seen(source):
  assert reads_by_computed_name(ast.parse(source)) == [source.partition("[")[0]]


def test_batch_sizes_are_multiplied_and_divided_in_one_place():
  elsewhere = {m for m, tree in TREES.items() if batch_products(tree)}
  # The rules are formulas of papers, in tokens of a step.
  allowed = ("maxbatch.core.", "maxbatch.batch.", "maxbatch.batch_rules.")
  assert not {m for m in elsewhere if not m.startswith(allowed)}


@pytest.mark.parametrize(
  "source",
  [
    "plan.micro_batch_to_train * 2",
    "x // batch_size",
    "a.global_batch % k",
    "tokens / num_devices",
    "asked.tokens / advice.batch_tokens",
  ],
)
def test_a_product_of_batch_sizes_would_be_seen(source):
  assert batch_products(ast.parse(source)) == [source]


@pytest.mark.parametrize(
  "source",
  ["batch / step_seconds", "seconds * num_microbatches", "Slice(num_devices=num_devices * count)"],
)
def test_a_speed_or_a_count_is_no_batch_size(source):
  assert not batch_products(ast.parse(source))
