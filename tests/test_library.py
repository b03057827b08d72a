"""Every block of docs/library.md runs, and its gradient is that of the whole batch."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support import mesh

import maxbatch as mb

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "library.md").read_text()
SECTIONS = {
  title: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
  for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
[PREAMBLE] = SECTIONS["What do I change?"]
PLAIN, LOOP = SECTIONS["How does it look in plain jax?"]
[OWN_STEP] = SECTIONS["What if my optimizer and my step are my own?"]
MODELS = {
  "jax": PLAIN,
  "nnx": SECTIONS["How with flax.nnx?"][0],
  "linen": SECTIONS["How with flax.linen?"][0],
  "equinox": SECTIONS["How with equinox?"][0],
}


def test_the_names_for_type_checkers_for_python_and_for_readers_are_the_same():
  assert set(mb.__all__) == set(mb._EXPORTS) <= set(dir(mb))
  assert mb.__all__ == sorted(mb.__all__)
  tree = ast.parse(Path(mb.__file__).read_text())
  checked = next(node for node in tree.body if isinstance(node, ast.If))
  declared = {
    alias.name: node.module
    for node in checked.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
  }
  assert declared == mb._EXPORTS
  for name, module in mb._EXPORTS.items():
    assert getattr(mb, name) is getattr(importlib.import_module(module), name)


def run(name: str, devices: int, *blocks: str) -> dict[str, Any]:
  names: dict[str, Any] = {}
  exec(PREAMBLE, names)
  names["mesh"] = mesh(data=devices)
  for block in (MODELS[name], *blocks):
    exec(block, names)
  return names


def relative_error(tree: Any, reference: Any) -> float:
  squares = [
    (np.square(np.subtract(a, b, dtype=np.float64)).sum(), np.square(b, dtype=np.float64).sum())
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
  ]
  error, size = np.sum(squares, axis=0)
  return float(np.sqrt(error / size))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_whole_batch(name, devices):
  names = run(name, devices, LOOP.partition("\n\n\ndef arguments")[0], OWN_STEP)
  # The rows that the block has drawn, in one piece, by jax alone.
  rows = {field: x.reshape(-1, *x.shape[2:]) for field, x in jax.device_get(names["rows"]).items()}

  def mean(params: Any) -> Any:
    keys = jax.vmap(lambda i: jax.random.fold_in(names["key"], i))(rows["id"])
    losses = jax.vmap(names["row_loss"], (None, 0, 0))(params, rows, keys)
    return losses.sum() / rows["weights"].sum()

  lengths = rows["weights"].sum(1)
  assert len(set(lengths)) > 8
  assert (lengths == 0).sum() >= 3
  value, gradient = jax.jit(jax.value_and_grad(mean))(names["params"])
  assert relative_error(*jax.device_get((names["mean"], gradient))) < 1e-6
  np.testing.assert_allclose(mb.objective(names["found"].terms), value, rtol=1e-6)
  # Replicas share the rows: each of them is counted once.
  np.testing.assert_allclose(mb.divisor(names["found"].terms), rows["weights"].sum(), rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_loop_runs_with_one_program(name, devices):
  names = run(name, devices, LOOP)
  assert names["samples"] >= 256
  assert names["size"] in (8, 16)
  assert np.isfinite(names["result"].loss)
  # One for each size that was to choose from: the ramp has the program of the chosen one.
  assert names["step"]._cache_size() == 1
  assert names["noise"].estimate().steps > 0


def test_lines_about_the_batch_are_few():
  assert LOOP.count("# yours") == 6
  lines = [line for line in LOOP.splitlines() if line.strip() and "# yours" not in line]
  assert len(lines) <= 12


def test_check_split_prints_what_the_page_shows(capsys):
  [careless] = SECTIONS["What does check_split say?"]
  names = run("jax", 1, LOOP.partition("\n\n\ndef arguments")[0], careless)
  [shown] = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)
  printed = capsys.readouterr().out
  text, parameters = re.compile(r" [\d.e%-]+(?=[, \n])"), re.compile(r"gradient of: .*")
  assert parameters.sub("", text.sub(" #", printed)) == parameters.sub("", text.sub(" #", shown))
  result = mb.check_split(names["loss"], names["params"], names["batch_from"](0, 8))
  assert result.ok, str(result)


def test_the_reference_has_every_name():
  text = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
  listed = re.findall(r"^::: maxbatch\.(?:\w+\.)+(\w+)$", text, re.M)
  assert sorted(listed) == sorted(set(mb.__all__) - {"Terms", "Stats"})
