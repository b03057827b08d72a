"""Who may import whom, and who may multiply batch sizes."""

import ast
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import maxbatch

PACKAGE = pathlib.Path(maxbatch.__file__).parent

# Lowest first. A module imports only from layers below its own and from modules before it in its
# own, so there are no cycles. A new module gets its place here.
LAYERS = {
  "L0: no jax": [
    "errors",
    "stop",
    "config.schema",
    "config.find",
    "config.registered",
    "config.yaml_words",
    "config.yaml_file",
    "config.value",
    "config.load",
    "config.help",
    "topology",
    "noise.decisions",
    "batch.solve",
    "batch.stages",
    "batch.schedule",
    "batch.plan",
    "batch.interval",
    "batch.resumed",
    "batch.branching",
    "pipeline.timetable",
    "pipeline.slots",
    "pipeline.schedule",
    "pipeline.machine",
    "pipeline.works",
    "pipeline.cost",
    "batch.ways_out",
    "batch.pipeline",
    "batch.pipelining",
    "batch.evaluation",
    "pipeline.rows_of_ticks",
    "pipeline.forward_only",
    "pipeline.refusal",
    "pipeline.csv_file",
    "pipeline.text_grid",
    "pipeline.svg",
    "pipeline.chrome_trace",
    "pipeline.report",
    "batch.limits",
    "batch.candidates",
    "batch.search",
    "batch.exploration",
    "pipeline.tick_fit",
    "pipeline.ranking",
    "batch.remembered",
    "batch.loading",
    "noise.estimators",
    "noise.confidence",
    "noise.window",
    "noise.tracker",
    "noise.advice",
    "noise.controller",
    "noise.steering",
    "noise.requirements",
    "data.row_plan",
    "learning_rate",
    "accelerators",
    "estimate.replica_groups",
    "estimate.hlo",
    "estimate.loops",
    "estimate.flops",
    "estimate.traffic",
    "estimate.costs",
    "estimate.chips",
    "estimate.step_time",
    "plan_plot",
    "plan_report",
    "svg_parts",
    "branches.losses",
    "branches.report",
    "branches.plot",
    "identity",
  ],
  "L1: data, models, what a run writes": [
    "agreement",
    "devices",
    "topology_devices",
    "quiet_orbax",
    "fingerprint",
    "metrics",
    "progress",
    "rows",
    "data.dataset",
    "data.tokenizer",
    "data.sources",
    "data.documents",
    "data.token_cache",
    "data.windows",
    "data.text",
    "data.synthetic",
    "data.registry",
    "data.stream",
    "data.reading",
    "data.loader",
    "sharding",
    "partial_sums",
    "dropout",
    "models.probes",
    "models.layers",
    "models.dot_product",
    "models.flash",
    "models.attention",
    "models.transformer",
    "models.registry",
    "generate",
    "loss",
    "optim",
  ],
  "L2: the step": [
    "state",
    "accumulate",
    "pipeline.parts",
    "pipeline.kept",
    "pipeline.stash",
    "pipeline.tick",
    "pipeline.run",
    "pipeline.evaluate",
    "pipeline.stage_order",
    "step",
    "noise.groups",
    "noise.meter",
  ],
  "L3: around the step": [
    "checkpoint_record",
    "checkpoint",
    "branches.origin",
    "programs",
    "prepare",
    "measure",
    "compile.cache",
    "compile.coupling",
    "compile.made_from",
    "compile.step_file",
    "compile.validate",
    "compile.flops",
    "compile.program",
    "compile.ticks",
    "compile.step_time",
    "compile.report",
    "compile.compile_only",
    "compile.remembering",
    "batch.autotune",
    "compile.microbatches",
    "compile.modes",
    "pipeline.kept_bytes",
    "noise.run",
    "noise.prepare",
    "loop",
  ],
  "L4: the commands": [
    "command",
    "train",
    "plan",
    "pipeline.__main__",
    "branches.running",
    "critical_batch",
  ],
}
ORDER = [module for modules in LAYERS.values() for module in modules]


def path_of(module: str) -> pathlib.Path:
  return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def tree_of(module: str) -> ast.Module:
  return ast.parse(path_of(module).read_text())


def all_modules() -> set[str]:
  """Every module of the package but the empty __init__ files."""
  files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
  return {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files}


def imports(node: ast.AST) -> Iterator[str]:
  """Full names that an import statement may mean: `from a import b` means a, or the module a.b."""
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
  elif isinstance(node, ast.ImportFrom):
    assert node.level == 0, "imports are absolute"
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (name if is_module(name) else str(node.module) for name in names)


def is_module(name: str) -> bool:
  package, _, module = name.partition(".")
  return package == "maxbatch" and module in all_modules()


def imported_modules(module: str) -> set[str]:
  """The modules of the package that `module` imports."""
  found = {name for node in ast.walk(tree_of(module)) for name in imports(node)}
  return {name.partition(".")[2] for name in found if name.startswith("maxbatch.")}


def test_every_module_has_its_place():
  assert sorted(ORDER) == sorted(all_modules())


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_what_is_before_it(module):
  allowed = set(ORDER[: ORDER.index(module)])
  assert imported_modules(module) - allowed == set()


@pytest.mark.parametrize("module", ORDER)
def test_the_package_is_imported_only_at_the_top_of_a_file(module):
  tree = tree_of(module)
  inside = [
    name
    for node in ast.walk(tree)
    if node not in tree.body
    for name in imports(node)
    if name.split(".")[0] == "maxbatch"
  ]
  assert inside == []


def test_the_init_files_import_nothing():
  # They are read before any module of their folder, jax or not.
  for path in PACKAGE.rglob("__init__.py"):
    assert not [n for n in ast.walk(ast.parse(path.read_text())) for _ in imports(n)], path


def test_the_lowest_layer_works_where_jax_is_not_installed():
  modules = [f"maxbatch.{module}" for module in LAYERS["L0: no jax"]]
  program = f"""
import sys
absent = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboardX")
sys.modules.update(dict.fromkeys(absent))
import {", ".join(modules)}
config = maxbatch.config.load.load_config(["config=base"])
layout = maxbatch.topology.topology(config.mesh, 8)
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


# One place for the arithmetic of batch sizes; row_plan and the arrays laid out by it count rows.
ARITHMETIC = {
  "batch.solve",
  "batch.stages",
  "batch.schedule",
  "batch.plan",
  "batch.interval",
  "batch.resumed",
  "batch.evaluation",
  "batch.branching",
  "batch.limits",
  "batch.loading",
  "batch.candidates",
  "batch.pipeline",
  "batch.pipelining",
  "noise.estimators",
  "noise.controller",
  "data.row_plan",
}
BATCH_SIZE = re.compile(
  r"(.*_)?(batch|batch_size|batch_to_train|batch_to_load|accumulation_steps|microbatches|devices"
  r"|num_slices|num_batch_groups|expansion_factor_real_data|tokens_per_step)"
)
PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)


def batch_products(tree: ast.AST) -> list[str]:
  """Products and quotients in which the name of a batch size takes part."""
  return [
    ast.unparse(node)
    for node in ast.walk(tree)
    if isinstance(node, ast.BinOp)
    and isinstance(node.op, PRODUCTS)
    and any(is_batch_size(side) for side in (node.left, node.right))
  ]


def is_batch_size(node: ast.expr) -> bool:
  name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
  return BATCH_SIZE.fullmatch(name) is not None


@pytest.mark.parametrize(
  "module", [m for m in ORDER if m not in ARITHMETIC | {"topology", "accelerators"}]
)
def test_batch_sizes_are_multiplied_and_divided_in_one_place(module):
  assert batch_products(tree_of(module)) == []


@pytest.mark.parametrize(
  "source",
  [
    "plan.micro_batch_to_train * 2",
    "x // batch_size",
    "a.global_batch % k",
    "tokens / num_devices",
  ],
)
def test_a_product_of_batch_sizes_would_be_seen(source):
  assert batch_products(ast.parse(source)) == [source]
