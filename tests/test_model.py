"""What each token sees, and what must not change the result: loops, recomputation, precision.

B rows, T tokens, D width.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import PUBLISHED_PARAMETERS
from tiny_model import (
  GEMMA_LIKE,
  GPT2_LIKE,
  OLMO_LIKE,
  VOCABULARY,
  loud_parameters,
  random_rows,
  tiny_config,
  tiny_model,
)

from maxbatch.config.load import load_config
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models import stacks
from maxbatch.models.layers import outputs_of
from maxbatch.models.registry import Model, Parameters, build_model, num_parameters
from maxbatch.precision.formats import FORMATS
from maxbatch.precision.policy import rounded
from maxbatch.training.loss import loss_sum
from maxbatch.training.model_parts import bind_layered

QWEN3_LIKE = ("use_qk_norm=true",)
FAMILIES = {"gpt2": GPT2_LIKE, "qwen3": QWEN3_LIKE, "gemma": GEMMA_LIKE, "olmo": OLMO_LIKE}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def hidden(model: Model, parameters: Parameters, rows: Rows) -> np.ndarray:
  """Hidden states (B, T, D) without dropout."""
  return np.asarray(hidden_of(model)(parameters, rows))


@functools.cache
def hidden_of(model: Model) -> jax.stages.Wrapped:
  """Compiled: parameters and rows to hidden states."""
  return jax.jit(lambda parameters, rows: model.bind(parameters)(rows, None))


@functools.cache
def loss_of(*overrides: str) -> jax.stages.Wrapped:
  """Compiled: parameters and rows to loss and gradients, without dropout."""
  model = tiny_model(*overrides)
  return jax.jit(
    jax.value_and_grad(lambda parameters, rows: loss_sum(model, parameters, rows, None))
  )


@functools.cache
def initial(seed: int) -> Parameters:
  """Initial parameters of DEEP."""
  return INIT(jax.random.key(seed))


DEEP = tiny_model("base_emb_dim=64", "base_num_decoder_layers=8", "base_mlp_dim=128")
INIT = jax.jit(DEEP.init)


def assert_trees_close(left, right, rtol: float) -> None:
  """Every leaf is close, measured against its largest value."""
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.abs(b).max()) + 1e-12)


# --- loops and recomputation ----------------------------------------------------------------------


@every_family
def test_unrolled_layers_have_the_parameters_of_scanned_ones(family):
  scanned, unrolled = tiny_model(*family), tiny_model(*family, "scan_layers=false")
  assert scanned.shapes() == unrolled.shapes()
  assert scanned.axes() == unrolled.axes()


@pytest.mark.parametrize("family", [QWEN3_LIKE, GEMMA_LIKE], ids=["qwen3", "gemma"])
def test_unrolled_layers_equal_scanned_ones(family):
  given = loud_parameters(tiny_model(*family)), random_rows(3)
  unrolled = loss_of(*family, "scan_layers=false")(*given)
  assert_trees_close(unrolled, loss_of(*family)(*given), 2e-6)


@pytest.mark.parametrize(
  ("platform", "keys", "loops"),
  [
    ("cpu", "scan_layers=true", 1),
    ("cpu", "scan_layers=false", 0),
    ("cpu", "scan_layers=auto", 1),
    ("tpu", "scan_layers=auto", 1),
    ("gpu", "scan_layers=auto", 0),
    ("gpu", "scan_layers=auto remat_policy=minimal", 0),
    ("gpu", "scan_layers=auto remat_policy=full", 1),
    ("gpu", "scan_layers=true", 1),
  ],
)
def test_layers_are_compiled_once_or_each(platform, keys, loops, monkeypatch):
  monkeypatch.setattr(stacks, "is_for_gpu", lambda: platform == "gpu")
  rows, model = random_rows(2), tiny_model(*keys.split())
  text = str(jax.make_jaxpr(model.bind(loud_parameters(model)))(rows, None))
  assert len(re.findall(r"= scan\[", text)) == loops


@pytest.mark.parametrize(
  ("policy", "scan"), [("minimal", "true"), ("full", "true"), ("full", "false")]
)
def test_recomputing_changes_no_gradient(policy, scan):
  given = loud_parameters(tiny_model(*QWEN3_LIKE)), random_rows(3)
  again = loss_of(*QWEN3_LIKE, f"scan_layers={scan}", f"remat_policy={policy}")(*given)
  assert_trees_close(again, loss_of(*QWEN3_LIKE)(*given), 2e-6)


def test_recomputing_more_keeps_less():
  rows = random_rows(3)

  def kept_numbers(policy: str) -> int:
    model = tiny_model(*QWEN3_LIKE, f"remat_policy={policy}")
    loss = functools.partial(loss_sum, model, rows=rows, dropout_key=None)
    backward = jax.eval_shape(lambda parameters: jax.vjp(loss, parameters)[1], model.shapes())
    return sum(leaf.size for leaf in jax.tree.leaves(backward))

  none, minimal, full = (kept_numbers(policy) for policy in ("none", "minimal", "full"))
  assert full < 0.8 * minimal < 0.8 * 0.8 * none


# --- what a token sees ----------------------------------------------------------------------------


def changed_at(model: Model, rows: Rows, token: int) -> np.ndarray:
  """bool[T]: which hidden states change, in any bit, when one input token does."""
  parameters = loud_parameters(model)
  other = np.array(rows.inputs)
  other[:, token] = (other[:, token] + 1) % VOCABULARY
  before = hidden(model, parameters, rows)
  after = hidden(model, parameters, rows._replace(inputs=other))
  return (before != after).any((0, 2))


@every_family
def test_tokens_see_only_what_is_before_them(family):
  changed = changed_at(tiny_model(*family), random_rows(2), token=5)
  assert changed.tolist() == [False] * 5 + [True] * 7


@pytest.mark.parametrize("window", [1, 4, 12, 100])
def test_tokens_see_no_farther_than_the_window(window):
  one_layer = tiny_model("base_num_decoder_layers=1", f"sliding_window_size={window}")
  changed = changed_at(one_layer, random_rows(2), token=3)
  assert changed.tolist() == [3 <= place < 3 + window for place in range(12)]


def test_only_layers_of_sliding_attention_have_a_window():
  kinds = "sliding_attention, full_attention"
  for pattern, reach in ((kinds, 9), ("sliding_attention", 7), ("full_attention", 9)):
    model = tiny_model("sliding_window_size=4", f"layer_types=[{pattern}]")
    changed = changed_at(model, random_rows(2), token=3)
    # Two layers of a window of 4 see 6 tokens back.
    assert changed.tolist() == [3 <= place < 3 + reach for place in range(12)]


def test_a_pipeline_knows_the_layers_by_their_number():
  model = tiny_model(*GEMMA_LIKE, "base_num_decoder_layers=4")
  parameters, rows = loud_parameters(model), random_rows(2)

  @jax.jit
  def in_two(first: jax.Array) -> jax.Array:
    x_BTD = bind_layered(model, parameters).embed(rows, None)
    for start, end in ((0, 1), (1, 4)):
      part = jax.tree.map(lambda leaf, start=start, end=end: leaf[start:end], parameters["layers"])
      bound = bind_layered(model, parameters | {"layers": part})
      x_BTD, _, _ = outputs_of(bound.apply_layers(x_BTD, rows, None, first + start))
    return bind_layered(model, parameters).normalize(x_BTD)

  np.testing.assert_allclose(
    in_two(jnp.asarray(0)), hidden(model, parameters, rows), rtol=0, atol=1e-5
  )


# --- documents that share a row -------------------------------------------------------------------


def packed(lengths: tuple[int, ...]) -> Rows:
  """One row of documents, positions starting again at each."""
  segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
  positions = np.concatenate([np.arange(length) for length in lengths])[None]
  rows = random_rows(1, sum(lengths))
  return rows._replace(
    segment_ids=jnp.asarray(segments, jnp.int32), positions=jnp.asarray(positions, jnp.int32)
  )


@pytest.mark.parametrize(
  "keys",
  [
    *FAMILIES.values(),
    *((*FAMILIES[name], "sliding_window_size=3") for name in ("qwen3", "gemma")),
  ],
)
def test_a_packed_row_equals_its_documents_run_alone(keys):
  model = tiny_model(*keys)
  parameters, rows = loud_parameters(model), packed((5, 5, 2))
  together = hidden(model, parameters, rows)
  documents = (0, 5), (5, 10), (10, 12)
  # A row for each, with tokens behind it that none of its own sees.
  shifted = [jax.tree.map(lambda x, at=at: np.roll(x, -at, 1), rows[:3]) for at, _ in documents]
  fields = (np.concatenate(field) for field in zip(*shifted, strict=True))
  rows = Rows(*map(jnp.asarray, fields), sample_ids=random_rows(3).sample_ids)
  alone = hidden(model, parameters, rows)
  for row, (start, end) in enumerate(documents):
    np.testing.assert_allclose(together[0, start:end], alone[row, : end - start], rtol=0, atol=1e-5)


@every_family
def test_documents_of_a_row_do_not_see_each_other(family):
  changed = changed_at(tiny_model(*family), packed((5, 5, 2)), token=2)
  assert changed.tolist() == [False] * 2 + [True] * 3 + [False] * 7


def test_positions_reach_learned_and_rotary_embeddings():
  backwards = jnp.arange(12)[None, ::-1]
  for family in ((), GPT2_LIKE):
    model = tiny_model(*family)
    parameters, rows = loud_parameters(model), random_rows(1)
    plain = hidden(model, parameters, rows)
    forwards = hidden(model, parameters, rows._replace(positions=jnp.arange(12)[None]))
    np.testing.assert_allclose(forwards, plain, rtol=0, atol=1e-5)
    turned = hidden(model, parameters, rows._replace(positions=backwards))
    assert np.abs(turned - plain).max() > 0.01


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_published_models_have_the_published_number_of_parameters(name):
  config = load_config(["config=base", f"model_name={name}"])
  model = build_model(config.model, config.batch.max_target_length)
  assert num_parameters(model) == PUBLISHED_PARAMETERS[name]


def test_a_tied_head_is_the_embedding():
  tying = (*QWEN3_LIKE, "logits_via_embedding=true")
  tied, free = tiny_model(*tying), tiny_model(*QWEN3_LIKE)
  parameters, rows = loud_parameters(tied), random_rows(3)
  assert set(free.shapes()) - set(tied.shapes()) == {"head"}
  untied = parameters | {"head": parameters["embedding"].T}
  loss, gradients = loss_of(*QWEN3_LIKE)(untied, rows)
  both = gradients["embedding"] + gradients.pop("head").T
  expected = loss, gradients | {"embedding": both}
  assert_trees_close(loss_of(*tying)(parameters, rows), expected, 2e-6)


@every_family
def test_every_dimension_of_a_parameter_has_a_logical_axis(family):
  model = tiny_model(*family)
  shapes = {
    tuple(entry.key for entry in path): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes())
  }
  axes = model.axes()
  assert {path: len(names) for path, names in axes.items()} == {
    path: len(shape) for path, shape in shapes.items()
  }
  stacked = {path for path, names in axes.items() if names[0] == "layers"}
  assert stacked == {path for path in shapes if path[0] == "layers"}


def test_layers_begin_different_and_additions_to_the_stream_small():
  layers = initial(0)["layers"]
  up, down = (np.asarray(layers["mlp"][name]["kernel"]) for name in ("up", "down"))
  assert not np.array_equal(up[0], up[1])
  # One over the root of the inputs; the second also of the 2 × 8 additions.
  np.testing.assert_allclose(up.std((1, 2)), 64**-0.5, rtol=0.05)
  np.testing.assert_allclose(down.std((1, 2)), (128 * 16) ** -0.5, rtol=0.05)


def test_parameters_follow_from_the_key():
  one, same, other = INIT(jax.random.key(0)), initial(0), initial(1)
  assert jax.tree.all(jax.tree.map(np.array_equal, one, same))
  assert not np.array_equal(one["embedding"], other["embedding"])


# --- precision ------------------------------------------------------------------------------------


@every_family
def test_computing_in_bfloat16_is_near_float32(family):
  exact, short = tiny_model(*family), tiny_model(*family, "dtype=bfloat16")
  parameters, rows = loud_parameters(exact), random_rows(3)
  expected, result = hidden(exact, parameters, rows), hidden(short, parameters, rows)
  assert result.dtype == jnp.bfloat16
  assert 1e-4 < distance(result, expected) < 0.03


@pytest.mark.parametrize("name", ["bfloat16", "float16", "cbfloat16"])
def test_gradients_in_a_short_format_are_as_near_float32_as_it_has_digits(name):
  given = loud_parameters(tiny_model(*QWEN3_LIKE)), random_rows(3)
  loss, gradients = loss_of(*QWEN3_LIKE)(*given)
  short_loss, short_gradients = loss_of(*QWEN3_LIKE, f"precision={name}")(*given)
  assert {leaf.dtype for leaf in jax.tree.leaves(short_gradients)} == {jnp.dtype(jnp.float32)}
  rounding = 2.0 ** -FORMATS[name].mantissa_bits
  np.testing.assert_allclose(short_loss, loss, rtol=rounding)
  assert 0.2 * rounding < distance(short_gradients, gradients) < 3 * rounding
  # What flows out of a weight's cast is of the format; norms, whose scales are added up, are float32.
  for path, leaf in jax.tree_util.tree_leaves_with_path(short_gradients):
    is_held = bool((emulated_by(name, leaf) == leaf).all())
    assert is_held == (path[-1].key != "scale"), path


def emulated_by(name, x):
  """Rounded to a format that float32 holds."""
  of = FORMATS[name]
  return rounded(x, of) if of.is_emulated else x.astype(of.carrier).astype(jnp.float32)


def distance(result, expected) -> float:
  """Norm of the difference over the norm, of all leaves together."""
  pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
  pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
  off, size = sum(((a - b) ** 2).sum() for a, b in pairs), sum((b**2).sum() for _, b in pairs)
  return float((off / size) ** 0.5)


def test_parameters_are_kept_in_weight_dtype():
  exact, short = tiny_model(), tiny_model("weight_dtype=bfloat16")
  assert {leaf.dtype for leaf in jax.tree.leaves(short.shapes())} == {jnp.dtype(jnp.bfloat16)}
  rows, kept = random_rows(3), loud_parameters(short)
  widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), kept)
  result = hidden(short, kept, rows)
  assert result.dtype == jnp.float32
  np.testing.assert_allclose(result, hidden(exact, widened, rows), rtol=0, atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------

MISTAKES = {
  "decoder_block=tranformer": (
    "decoder_block=tranformer: there is no such decoder_block. Did you mean transformer? "
    "Known: transformer."
  ),
  "base_num_kv_heads=3": (
    "base_num_query_heads=4 must be a multiple of base_num_kv_heads=3; "
    "for example base_num_kv_heads=2"
  ),
  "base_num_kv_heads=8": (
    "base_num_query_heads=4 must be a multiple of base_num_kv_heads=8; "
    "for example base_num_kv_heads=4"
  ),
  "head_dim=7": (
    "head_dim=7 must be even with position_embedding=rope, which rotates pairs; "
    "for example head_dim=8"
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_sizes_that_contradict_each_other_are_named(mistake):
  with pytest.raises(UserError) as caught:
    build_model(tiny_config(mistake), 12)
  assert str(caught.value) == MISTAKES[mistake]


def test_an_odd_head_is_fine_without_rotations():
  model = tiny_model(*GPT2_LIKE, "head_dim=7")
  assert np.isfinite(hidden(model, loud_parameters(model), random_rows(1))).all()
