"""check_split names what depends on the split, and is silent about what does not.

B rows, T tokens, D width, H hidden units, E experts, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from maxbatch.core.check_split import SplitReport, check_split
from maxbatch.core.split_causes import CAUSES, Cause
from maxbatch.core.terms import Max, Ratio, Sum

T, V, E = 6, 11, 4


def parameters(seed: int = 0, width: int = 8) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  shapes = {
    "embedding": (V, width),
    "router": (width, E),
    "up": (E, width, width),
    "out": (width, V),
  }
  return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def batch(seed: int = 0, size: int = 8) -> dict[str, np.ndarray]:
  """Rows of very different lengths, one of them without a token."""
  random = np.random.default_rng(seed + 100)
  tokens = random.integers(0, V, (size, T + 1)).astype(np.int32)
  lengths = random.integers(1, T + 1, size)
  lengths[1] = 0
  return {
    "inputs": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "weights": (np.arange(T) < lengths[:, None]).astype(np.float32),
    "advantages": random.normal(size=size).astype(np.float32),
    "before": random.normal(-2.4, 0.2, (size, T)).astype(np.float32),
  }


def hidden(params: Any, rows: Any) -> jax.Array:
  return jnp.tanh(params["embedding"][rows["inputs"]])


def log_likelihood(params: Any, x_BTD: jax.Array, rows: Any) -> jax.Array:
  log_p_BTV = jax.nn.log_softmax(x_BTD @ params["out"])
  return jnp.take_along_axis(log_p_BTV, rows["targets"][..., None], -1)[..., 0]


def cross_entropy(params: Any, x_BTD: jax.Array, rows: Any) -> Ratio:
  loss_BT = -log_likelihood(params, x_BTD, rows)
  return Ratio((rows["weights"] * loss_BT).sum(), rows["weights"].sum())


def one_hot_routes(params: Any, x_BTD: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
  """Probabilities and the one expert of each token, (B, T, E), 0 where there is no token."""
  p_BTE = jax.nn.softmax(x_BTD @ params["router"]) * rows["weights"][..., None]
  chosen_BTE = jax.nn.one_hot(p_BTE.argmax(-1), E) * rows["weights"][..., None]
  return p_BTE, chosen_BTE


def experts(params: Any, x_BTD: jax.Array, gates_BTE: jax.Array) -> jax.Array:
  return x_BTD + jnp.einsum("bte,btd,edh->bth", gates_BTE, x_BTD, params["up"])


# Six that are wrong.


def batch_norm(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  x_BTD = (x_BTD - x_BTD.mean((0, 1), keepdims=True)) / (x_BTD.std((0, 1), keepdims=True) + 0.1)
  return {"loss": cross_entropy(params, x_BTD, rows)}, {}


def mean_of_means(params: Any, rows: Any, keys_B: Any) -> Any:
  term = cross_entropy(params, hidden(params, rows), rows)
  mean = term.numerator / jnp.maximum(term.denominator, 1.0)
  return {"loss": Ratio(mean, jnp.ones(()))}, {"perplexity": Ratio(mean, jnp.ones(()))}


def dropout_from_one_key(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  keep_BTD = jax.random.bernoulli(keys_B[0], 0.8, x_BTD.shape)
  return {"loss": cross_entropy(params, jnp.where(keep_BTD, x_BTD / 0.8, 0.0), rows)}, {}


def balance_of_microbatch(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  p_BTE, chosen_BTE = one_hot_routes(params, x_BTD, rows)
  tokens = jnp.maximum(rows["weights"].sum(), 1.0)
  balance = E * (chosen_BTE.sum((0, 1)) / tokens * (p_BTE.sum((0, 1)) / tokens)).sum()
  output_BTD = experts(params, x_BTD, chosen_BTE * p_BTE)
  return {
    "loss": cross_entropy(params, output_BTD, rows),
    "balance": Ratio(balance * tokens, tokens, coefficient=0.01),
  }, {}


def contrastive(params: Any, rows: Any, keys_B: Any) -> Any:
  is_row_B = (rows["weights"].sum(-1) > 0).astype(jnp.float32)
  x_BD = hidden(params, rows)[:, 0] * 3
  y_BD = jnp.tanh(params["embedding"][rows["targets"]])[:, 1] @ params["up"][0]
  similarity_BB = x_BD @ y_BD.T
  others_B = jax.nn.logsumexp(similarity_BB, axis=1, b=is_row_B[None].repeat(len(x_BD), 0))
  loss_B = others_B - jnp.diag(similarity_BB)
  return {"contrast": Ratio((is_row_B * loss_B).sum(), is_row_B.sum())}, {}


def capacity_of_batch(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  p_BTE, chosen_BTE = one_hot_routes(params, x_BTD, rows)
  place_BTE = jnp.cumsum(chosen_BTE.reshape(-1, E), 0).reshape(chosen_BTE.shape)
  chosen_BTE = jnp.where(place_BTE <= x_BTD.shape[0] * T // (2 * E), chosen_BTE, 0.0)
  output_BTD = experts(params, x_BTD, chosen_BTE * p_BTE)
  return {"loss": cross_entropy(params, output_BTD, rows)}, {}


BROKEN: dict[Callable[..., Any], Cause] = {
  batch_norm: "statistics",
  mean_of_means: "mean",
  dropout_from_one_key: "keys",
  balance_of_microbatch: "product",
  contrastive: "comparison",
  capacity_of_batch: "order",
}


# Six that are right.


def token_weighted(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  term = cross_entropy(params, x_BTD, rows)
  return {"loss": term}, {
    "perplexity": term,
    "tokens": Sum(rows["weights"].sum().astype(jnp.int32)),
    "largest": Max(jnp.where(rows["weights"] > 0, x_BTD.max(-1), -jnp.inf).max()),
    "activations": Sum((rows["weights"][..., None] * x_BTD).sum((0, 1))),
  }


def dropout_by_sample(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  draw = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x_BTD.shape[1:]))
  return {"loss": cross_entropy(params, jnp.where(draw(keys_B), x_BTD / 0.8, 0.0), rows)}, {}


def layer_norm(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  x_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / (x_BTD.std(-1, keepdims=True) + 1e-3)
  squares_BT = jnp.square(x_BTD @ params["out"]).sum(-1)
  return {
    "loss": cross_entropy(params, x_BTD, rows),
    "size": Ratio(
      (rows["weights"] * squares_BT).sum(), (rows["weights"].sum(-1) > 0).sum() * 1.0, 1e-3
    ),
  }, {}


def balance_of_last_step(params: Any, rows: Any, keys_B: Any) -> Any:
  """The exact form: shares of the step before; this step's are counted for the next."""
  x_BTD = hidden(params, rows)
  p_BTE, chosen_BTE = one_hot_routes(params, x_BTD, rows)
  shares_E = jnp.array([0.4, 0.3, 0.2, 0.1])
  tokens = rows["weights"].sum()
  return {
    "loss": cross_entropy(params, experts(params, x_BTD, chosen_BTE * p_BTE), rows),
    "balance": Ratio(E * (p_BTE * shares_E[None, None]).sum(), tokens, coefficient=0.01),
  }, {"shares": Ratio(chosen_BTE.sum((0, 1)), jnp.full(E, tokens))}


def clipped_policy(params: Any, rows: Any, keys_B: Any) -> Any:
  """As GRPO: advantages of both signs, ratios clipped, a penalty of the distance."""
  log_ratio_BT = log_likelihood(params, hidden(params, rows), rows) - rows["before"]
  ratio_BT, advantages_B1 = jnp.exp(log_ratio_BT), rows["advantages"][:, None]
  kept_BT = jnp.clip(ratio_BT, 0.8, 1.2)
  gain_BT = jnp.minimum(ratio_BT * advantages_B1, kept_BT * advantages_B1)
  weights, tokens = rows["weights"], rows["weights"].sum()
  distance_BT = jnp.exp(-log_ratio_BT) + log_ratio_BT - 1
  return {
    "policy": Ratio(-(weights * gain_BT).sum(), tokens),
    "kl": Ratio((weights * distance_BT).sum(), tokens, coefficient=0.05),
  }, {
    "clipped": Ratio((weights * (ratio_BT != kept_BT)).sum(), tokens),
    # Nearly 0: advantages of both signs.
    "advantage": Ratio((weights.sum(-1) * rows["advantages"]).sum(), tokens),
  }


def dropless_experts(params: Any, rows: Any, keys_B: Any) -> Any:
  x_BTD = hidden(params, rows)
  p_BTE, chosen_BTE = one_hot_routes(params, x_BTD, rows)
  counts_E = chosen_BTE.sum((0, 1)).astype(jnp.int32)
  output_BTD = experts(params, x_BTD, chosen_BTE * p_BTE)
  return {"loss": cross_entropy(params, output_BTD, rows)}, {"counts": Sum(counts_E)}


CORRECT = [
  token_weighted,
  dropout_by_sample,
  layer_norm,
  balance_of_last_step,
  clipped_policy,
  dropless_experts,
]


def checked(loss: Callable[..., Any], seed: int = 0, size: int = 8, width: int = 8) -> SplitReport:
  return check_split(loss, parameters(seed, width), batch(seed, size))


@pytest.mark.parametrize("loss", BROKEN, ids=lambda loss: loss.__name__)
def test_what_is_wrong_is_named_with_its_cause(loss):
  result = checked(loss)
  assert not result.ok
  assert {one.cause for one in result.findings} == {BROKEN[loss]}, str(result)
  [term] = [one for one in result.findings if one.what.startswith("term")]
  assert term.gradient_errors["single rows"] > 1e-3
  assert str(CAUSES[BROKEN[loss]]) in str(result)
  with pytest.raises(ValueError, match=f"^{term.what} depends on the split"):
    result.raise_if_any()


@pytest.mark.parametrize(("seed", "size", "width"), [(0, 8, 8), (2, 20, 32)])
@pytest.mark.parametrize("loss", CORRECT, ids=lambda loss: loss.__name__)
def test_what_is_right_is_not_named(loss, seed, size, width):
  result = checked(loss, seed, size, width)
  assert result.ok, str(result)
  assert result.tolerance < 1e-5
  assert "2 replicas" in result.tried


# Smaller mistakes, of a linear model: N numbers.


def numbers(size: int = 8) -> dict[str, np.ndarray]:
  random = np.random.default_rng(5)
  return {
    "x": random.normal(size=(size, 3)).astype(np.float32),
    "weight": random.integers(1, 5, size).astype(np.float32),
  }


def linear(rows: Any, params: Any) -> Ratio:
  value_B = jnp.square(rows["x"] @ params)
  return Ratio((rows["weight"] * value_B).sum(), rows["weight"].sum())


WEIGHTS = np.array([0.3, -0.7, 0.2], np.float32)


def counted() -> Callable[..., Any]:
  calls = []

  def loss(params: Any, rows: Any, keys_B: Any) -> Any:
    calls.append(None)
    return {"loss": linear(rows, params * (1 + 0.1 * len(calls)))}, {}

  return loss


def with_penalty(params: Any, rows: Any, keys_B: Any) -> Any:
  term = linear(rows, params)
  return {"loss": Ratio(term.numerator + 0.1 * jnp.square(params).sum(), term.denominator)}, {}


def counting_padding(params: Any, rows: Any, keys_B: Any) -> Any:
  value_B = jnp.square(rows["x"] @ params - 1)
  return {"loss": Ratio(value_B.sum(), jnp.float32(len(value_B)))}, {}


def constant_denominator(params: Any, rows: Any, keys_B: Any) -> Any:
  return {"loss": Ratio(linear(rows, params).numerator, jnp.float32(24))}, {}


def normalized(params: Any, rows: Any, keys_B: Any) -> Any:
  value_B = jnp.square(rows["x"] @ params)
  return {"loss": Ratio((rows["weight"] * value_B).sum(), (rows["weight"] * value_B**2).sum())}, {}


def maximum_in_a_sum(params: Any, rows: Any, keys_B: Any) -> Any:
  return {"loss": linear(rows, params)}, {"largest": Sum(rows["weight"].max())}


def sum_in_a_max(params: Any, rows: Any, keys_B: Any) -> Any:
  return {"loss": linear(rows, params)}, {"weight": Max(rows["weight"].sum())}


def mean_in_a_sum(params: Any, rows: Any, keys_B: Any) -> Any:
  return {"loss": linear(rows, params)}, {"x": Sum(rows["x"][:, 0].mean())}


def by_device(params: Any, rows: Any, keys_B: Any) -> Any:
  term = linear(rows, params)
  is_second = (jax.lax.axis_index("data") if "data" in axes() else 0) == 1
  return {"loss": Ratio(jnp.where(is_second, 2.0, 1.0) * term.numerator, term.denominator)}, {}


def by_own_tokens(params: Any, rows: Any, keys_B: Any) -> Any:
  """Multiplies each number by the mean of the device's own numbers of the row."""

  def weighed(x_BT: jax.Array) -> jax.Array:
    return x_BT * x_BT.mean(1, keepdims=True)

  mesh = jax.sharding.get_abstract_mesh()
  if "context" in mesh.axis_names:
    place = PartitionSpec(None, "context")
    weighed = jax.shard_map(weighed, in_specs=place, out_specs=place, axis_names={"context"})
  return {"loss": linear(rows | {"x": weighed(rows["x"])}, params)}, {}


def axes() -> tuple[str, ...]:
  return jax.sharding.get_abstract_mesh().manual_axes


@pytest.mark.parametrize(
  ("loss", "cause", "what"),
  [
    (counted(), "state", 'term "loss"'),
    (with_penalty, "constant", 'term "loss"'),
    (counting_padding, "padding", 'term "loss"'),
    (constant_denominator, "denominator", 'term "loss"'),
    (normalized, "parameters", 'denominator of term "loss"'),
    (maximum_in_a_sum, "maximum as sum", 'statistic "largest"'),
    (sum_in_a_max, "sum as maximum", 'statistic "weight"'),
    (mean_in_a_sum, "mean", 'statistic "x"'),
    (by_device, "replicas", 'term "loss"'),
  ],
  ids=lambda value: getattr(value, "__name__", ""),
)
def test_smaller_mistakes(loss, cause, what):
  result = check_split(loss, WEIGHTS, numbers())
  assert [(one.what, one.cause) for one in result.findings] == [(what, cause)], str(result)


def test_a_device_that_shares_rows_needs_more_than_its_tokens():
  rows = numbers() | {"x": np.random.default_rng(6).normal(size=(8, 4)).astype(np.float32)}
  result = check_split(by_own_tokens, np.arange(1, 5, dtype=np.float32), rows)
  (found,) = result.findings
  assert found.cause == "tokens"
  assert found.splits == ("tokens over 2 devices",)
  assert "tokens over 2 devices" in checked(next(iter(CORRECT))).tried


def test_a_finding_reads_well():
  def loss(params: Any, rows: Any, keys_B: Any) -> Any:
    return with_penalty(params["w"]["x"], rows, keys_B)

  text = str(check_split(loss, {"w": {"x": WEIGHTS}}, numbers(), devices=jax.devices()[:1]))
  assert text.startswith('term "loss" depends on the split\n  value differs by: ')
  assert "single rows " in text
  assert "\n  gradient of: ['w']['x']\n  likely cause: a part that is the same" in text
  assert text.endswith("not tried: 2 replicas, as there is one device")


def test_a_shorter_format_and_a_gradient_of_nothing_but_rounding_are_no_mistake():
  def loss(params: Any, rows: Any, keys_B: Any) -> Any:
    x_BD = rows["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
    # A constant that a softmax does not see: the gradient of "b" is 0 but for rounding.
    p_BD = jax.nn.log_softmax(x_BD.astype(jnp.float32) + params["b"])
    return {"loss": Ratio(-(rows["weight"] * p_BD[:, 0]).sum(), rows["weight"].sum())}, {}

  w = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
  for rows in (numbers(8), numbers(32)):
    result = check_split(loss, {"w": w, "b": np.ones((), np.float32)}, rows)
    assert result.ok, str(result)
  assert result.tolerance > 0.01


def test_too_few_rows_and_a_gradient_that_is_not_finite_are_refused():
  with pytest.raises(ValueError, match="3 rows cannot be split; give it at least 4"):
    check_split(with_penalty, WEIGHTS, numbers(3))
  with pytest.raises(ValueError, match="is not finite"):
    check_split(with_penalty, WEIGHTS * np.nan, numbers())
