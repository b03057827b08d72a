"""Compares balance losses of mixtures of experts: does a run depend on how its batch is split?

    .venv/bin/python scripts/compare_balance.py out=balance                  # three seeds
    .venv/bin/python scripts/compare_balance.py out=balance seeds=0 steps=50
    .venv/bin/python scripts/compare_balance.py --help

Text: Python's own standard library as bytes, or text=FILE. One small mixture is trained by maxbatch's own
step with one batch of 16 rows, split into 1, 2, 4 and 8 microbatches; rows, order, seeds and learning rate
are the same. Three forms are maxbatch's. The other four are what other trainers compute
(docs/mixture_of_experts.md), written here in place of a layer's balance; the package has none of them.
Prints each form's loss by split and how far apart its curves are, and writes balance.json and balance.html
into `out`. Finished runs are kept, so an interrupted command continues where it was.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.load import load_config
from maxbatch.core.terms import Ratio, Sum
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models.experts import BALANCE, TOKENS, Experts
from maxbatch.models.registry import build_model
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.training import expert_load
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import TrainState, shardings
from maxbatch.training.step import Trainer, step_function

ROWS, LENGTH, SPLITS = 16, 64, (1, 2, 4, 8)
APART = 1e-4
"""By as much curves are no longer called the same."""
LEAST = 1e-7
"""The smallest difference that is drawn."""
LAST = 20
"""Steps at the end over which a loss is averaged."""
RATE = np.float32(3e-3)
KEYS = (
  *("config=base", "vocab_size=256", f"max_target_length={LENGTH}", "opt_type=adamw"),
  *("base_emb_dim=64", "base_num_decoder_layers=2", "base_num_query_heads=4"),
  *("base_num_kv_heads=4", "head_dim=16", "base_moe_mlp_dim=64"),
  *("num_experts=8", "num_experts_per_tok=2"),
)
LOSS = ("load_balance_loss_weight=0.01",)
GLOBAL = (*LOSS, "load_balance_loss_type=global")
BIAS = ("routed_bias=true", "routed_score_func=sigmoid", "routed_bias_update_rate=0.001")
Sums = Callable[..., Any]
_SUMS, _MISSING = Experts._sums, expert_load._missing


def of_microbatch(layer: Experts, of_rows: Mapping[str, jax.Array], counts_BT: jax.Array) -> Any:
  """Returns E/K · Σ_e f_e · P_e of the rows of one microbatch, and its tokens."""
  tokens = jnp.maximum(counts_BT.sum().astype(jnp.float32), 1)
  load_E, share_E = of_rows["tokens"].sum(0) / tokens, of_rows["share"].sum(0) / tokens
  return layer._even * (load_E * share_E).sum(), tokens


def mean_of_microbatches(layer: Experts, of_rows: Any, counts_BT: Any, number: Any) -> Any:
  """Megatron-LM's aux_loss, OLMo-core's, transformers': f · P of each microbatch, and their mean."""
  terms, stats = _SUMS(layer, of_rows, counts_BT, number)
  value, _ = of_microbatch(layer, of_rows, counts_BT)
  return {**terms, BALANCE: Ratio(value, jnp.ones(()), terms[BALANCE].coefficient)}, stats


def divided_by_tokens(layer: Experts, of_rows: Any, counts_BT: Any, number: Any) -> Any:
  """MaxText with accumulation: the balance of a microbatch is added to its sum of cross entropy, and all of it
  is divided by the step's tokens."""
  terms, stats = _SUMS(layer, of_rows, counts_BT, number)
  own, tokens = terms[BALANCE], counts_BT.sum().astype(jnp.float32)
  return {**terms, BALANCE: Ratio(own.value(), tokens, own.coefficient)}, stats


def signs_of_microbatch(layer: Experts, of_rows: Any, counts_BT: Any, number: Any) -> Any:
  """MaxText's routed bias: an update by sign for each microbatch, summed up."""
  stats: Any
  terms, stats = _SUMS(layer, of_rows, counts_BT, number)
  signs_E = _MISSING(of_rows["tokens"].sum(0)).astype(jnp.int32)
  of_layers = jnp.zeros_like(stats[TOKENS].total).at[number].set(signs_E)
  return terms, {**stats, TOKENS: Sum(of_layers)}


@dataclasses.dataclass(frozen=True)
class Form:
  """A way to balance."""

  name: str
  keys: tuple[str, ...]
  sums: Sums = _SUMS
  """What a layer hands to the step."""
  of_one: str = ""
  """The form that it is with one microbatch; empty: itself."""
  running: bool = False
  """Whether a microbatch is weighted by the counts of the step so far (Megatron-LM's global_aux_loss)."""


FORMS = (
  Form("maxbatch, global", GLOBAL),
  Form("f·P of each microbatch", LOSS, mean_of_microbatches, "maxbatch, global"),
  Form("running counts", GLOBAL, of_one="maxbatch, global", running=True),
  Form("maxbatch, sequence", LOSS),
  Form("summed, divided by tokens", LOSS, divided_by_tokens, "maxbatch, sequence"),
  Form("maxbatch, bias", BIAS),
  Form("a sign of each microbatch", BIAS, signs_of_microbatch, "maxbatch, bias"),
)


def main(arguments: Sequence[str]) -> None:
  """Trains what is missing, and prints and draws all."""
  if "--help" in arguments:
    print(__doc__)
    return
  given = dict(argument.split("=", 1) for argument in arguments)
  out, steps = pathlib.Path(given.get("out", "balance")), int(given.get("steps", "200"))
  seeds = [int(seed) for seed in given.get("seeds", "0,1,2").split(",")]
  text = _text(given.get("text", ""))
  out.mkdir(parents=True, exist_ok=True)
  path = out / "balance.json"
  curves: dict[str, list[float]] = json.loads(path.read_text()) if path.is_file() else {}
  for form, k in itertools.product(FORMS, SPLITS):
    if k == 1 and form.of_one:
      continue
    missing = [seed for seed in seeds if len(curves.get(_key(form, k, seed), ())) != steps]
    for seed, curve in zip(missing, trained(form, k, missing, steps, text), strict=True):
      curves[_key(form, k, seed)] = curve
      print(f"{form.name}, {k}, seed {seed}: {np.mean(curve[-LAST:]):.4f}", file=sys.stderr)
      path.write_text(json.dumps(curves))
  print("\n".join(table(curves, seeds)))
  (out / "balance.html").write_bytes(picture("Balance losses by split", [chart(curves, seeds[0])]))


def _key(form: Form, k: int, seed: int) -> str:
  return f"{form.of_one or form.name if k == 1 else form.name}/{k}/{seed}"


def _text(file: str) -> np.ndarray:
  """Returns bytes: of the file, or of the standard library's modules."""
  files = [pathlib.Path(file)] if file else pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")
  return np.frombuffer(b"\n".join(one.read_bytes() for one in sorted(files)), np.uint8)


def batch(text: np.ndarray, seed: int, step: int) -> Rows:
  """Returns the rows of a step, whatever its split."""
  random = np.random.default_rng((seed, step))
  starts = random.integers(0, len(text) - LENGTH - 1, ROWS)
  tokens = text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
  weights = np.ones((ROWS, LENGTH), np.float32)
  ids = np.arange(ROWS, dtype=np.int32) + step * ROWS
  return Rows(tokens[:, :-1], tokens[:, 1:], weights, ids)  # pyright: ignore[reportArgumentType]


def trained(
  form: Form, k: int, seeds: Sequence[int], steps: int, text: np.ndarray
) -> Iterator[list[float]]:
  """Yields for each seed the cross entropy of every step, with a batch in k microbatches."""
  if not seeds:
    return
  config = load_config([*KEYS, *form.keys])
  model = build_model(config.model, LENGTH, trainable=("*",))
  dispatches = k if form.running else 1
  optimizer = make_optimizer(config.optimizer, model.axes(), dispatches)
  mesh = make_mesh(Topology.of(data=1), jax.devices()[:1])
  trainer = Trainer(model, optimizer, mesh, jax.random.key(0), streamed=form.running)
  missing = _as_counted if form.sums is signs_of_microbatch else _MISSING
  with (
    mock.patch.object(Experts, "_sums", form.sums),
    mock.patch.object(expert_load, "_missing", missing),
  ):
    yield from (_curve(trainer, k, seed, steps, text) for seed in seeds)


def _as_counted(tokens_LE: jax.Array) -> jax.Array:
  """Returns what was counted, where that already is by how much a bias moves."""
  return tokens_LE.astype(jnp.float32)


@functools.cache
def _step(trainer: Trainer, shape: tuple[int, ...]) -> Any:
  rows = jax.ShapeDtypeStruct(shape, jnp.int32)
  ids = jax.ShapeDtypeStruct(shape[:-1], jnp.int32)
  weights = jax.ShapeDtypeStruct(shape, jnp.float32)
  return step_function(trainer, Rows(rows, rows, weights, ids))  # pyright: ignore[reportArgumentType]


def _curve(trainer: Trainer, k: int, seed: int, steps: int, text: np.ndarray) -> list[float]:
  state, losses = initial(trainer, seed), []
  for number in range(steps):
    rows = jax.tree.map(lambda x: x.reshape(k, ROWS // k, *x.shape[1:]), batch(text, seed, number))
    pieces, told = [rows], [trainer.microbatches(k)]
    if trainer.streamed:
      pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], rows) for at in range(k)]
      told = _so_far([trainer.denominators([piece], state.parameters) for piece in pieces])
    step = _step(trainer, pieces[0].inputs.shape)
    metrics: Any = None  # Of the whole step, once its last piece was trained on.
    for piece, of_step in zip(pieces, told, strict=True):
      state, metrics = step(state, piece, of_step, RATE)
    losses.append(float(metrics.loss))
  return losses


def initial(trainer: Trainer, seed: int) -> TrainState:
  """Returns a state with random parameters, those of a seed the same in each form."""
  random = np.random.default_rng(seed)

  def drawn(path: Any, leaf: Any) -> np.ndarray:
    name = path[-1].key
    if name in ("kernel", "embedding", "head"):
      return (0.1 * random.normal(size=leaf.shape)).astype(leaf.dtype)
    return np.full(leaf.shape, {"scale": 1.0, "load": 2 / 8}.get(name, 0.0), leaf.dtype)

  parameters = jax.tree_util.tree_map_with_path(drawn, trainer.model.shapes())
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trainer.abstract)
  params, frozen = trainer.model.split(parameters)
  return jax.device_put(zeros._replace(params=params, frozen=frozen), shardings(trainer.abstract))


def _so_far(of_pieces: Sequence[Any]) -> list[Any]:
  """Returns the denominators of the whole step, but for each piece the counts of it and those before."""
  whole = jax.tree.map(lambda *each: functools.reduce(jnp.add, each), *of_pieces)
  counts = itertools.accumulate(piece[TOKENS] for piece in of_pieces)
  return [whole | {TOKENS: each} for each in counts]


def apart(curves: Mapping[str, Sequence[float]], form: Form, k: int, seed: int) -> np.ndarray:
  """Returns by how much each step's loss is off that of one microbatch."""
  split, whole = (np.asarray(curves[_key(form, each, seed)]) for each in (k, 1))
  return np.abs(split - whole)


def table(curves: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> Iterator[str]:
  """Yields the lines of the table in Markdown."""
  yield f"| balance | {' | '.join(map(str, SPLITS))} | steps until apart | apart, mean | at most |"
  yield f"|---|{'---|' * (len(SPLITS) + 3)}"
  for form in FORMS:
    last = [
      np.mean([np.mean(curves[_key(form, k, seed)][-LAST:]) for seed in seeds]) for k in SPLITS
    ]
    far = np.stack([apart(curves, form, k, seed) for k in SPLITS[1:] for seed in seeds])
    is_apart = (far > APART).any(0)
    until = f"{is_apart.argmax()}" if is_apart.any() else "never"
    cells = [*(f"{loss:.4f}" for loss in last), until, f"{far.mean():.1e}", f"{far.max():.1e}"]
    yield f"| {form.name} | {' | '.join(cells)} |"


def chart(curves: Mapping[str, Sequence[float]], seed: int) -> Chart:
  """Draws for each form how far its curves are from that of one microbatch."""
  panels = []
  for form in FORMS:
    lines = []
    for color, k in enumerate(SPLITS[1:]):
      far = apart(curves, form, k, seed)
      x = [list(range(1, len(far) + 1))]
      lines.append(
        Line(f"{k} microbatches", x, far.clip(LEAST).tolist(), color=color, group=str(k))
      )
    title = f"{form.name}: loss apart from that of 1 microbatch"
    panels.append(Panel(title, lines, log=True, low=LEAST, high=1.0))
  return Chart("loss by split, for each balance", ["steps"], panels)


if __name__ == "__main__":
  main(sys.argv[1:])
