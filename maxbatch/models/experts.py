"""A mixture of experts: a router sends each token to K of E feed-forward layers, and drops none.

What it adds to a step are sums over rows and tokens with the step's own denominators, and integers, so
no split of the batch changes them; tokens that do not count in the loss, as padding, count nowhere here
either. (A balance loss of products of a batch's means would depend on the split: core/terms.py.)

B rows, T tokens, D width of the residual stream, E experts, K of them for a token, G groups of them, F
width of an expert, S slots of models/grouped.py, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.keys.model import expert_width
from maxbatch.config.schema import ModelConfig
from maxbatch.core.terms import Ratio, Stat, Sum, Terms, safe_ratio
from maxbatch.data.rows import Routes
from maxbatch.hardware.shard_maps import by_device, ring_gathered, ring_summed
from maxbatch.hardware.sharding import LogicalAxes
from maxbatch.models.attention import AttentionContext
from maxbatch.models.forms import as_multiplied, barrier_gradients, gelu, is_for_tpu
from maxbatch.models.grouped import (
  Slots,
  beyond,
  combined,
  dispatched,
  grouped_bias,
  grouped_product,
  slots_of,
  weights_in_slots,
)
from maxbatch.models.layers import (
  FeedForward,
  Matrix,
  Outputs,
  Parameter,
  buffer,
  constant,
  gated_product,
)
from maxbatch.models.remat import named
from maxbatch.precision.policy import PLAIN, Policy

TOKENS = "moe/expert_tokens"
"""The statistic int32[L, E]: a step's tokens of each expert of each layer that has experts."""
LOAD = ("layers", "mlp", "router", "load")
"""The path of the routers' loads; the other buffers, float32[L, E] too, are their biases."""
BALANCE, Z_LOSS, ENTROPY, NEAR_TIES, FLIPS = (
  *("moe/balance_loss", "moe/router_z_loss", "moe/router_entropy", "moe/near_ties"),
  "moe/routing_flips",
)
_FEEDS = "gate", "up", "down"
_NEAR = 16
"""Scores that differ by so many times the computation's rounding may change places when it is done in
another order."""


class Routed(NamedTuple):
  """Where tokens go."""

  chosen: jax.Array
  """int32[…, K]"""
  weight: jax.Array
  """float32[…, K]"""
  share: jax.Array
  """float32[…, E]: scores that add up to 1."""
  log_z: jax.Array
  """float32[…]: logarithm of the sum of the logits' exponentials."""
  margin: jax.Array
  """float32[…]: by how much the last one chosen, or the last group, is ahead of the next."""
  is_flipped: jax.Array | None = None
  """bool[…]: whether the router chooses other experts than the routes that are known; None: none are."""


class Router(Matrix):
  """Scores of the experts for each token, in float32 whatever the computation's format is."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
    D, E = config.base_emb_dim, config.num_experts
    super().__init__(rngs, 1 / math.sqrt(D), (D, E), ("embed", "expert"))
    self.bias = buffer(0.0, (E,), ("expert",)) if config.routed_bias else None
    self.logit_bias = constant(0.0, (E,), ("expert",)) if config.router_logit_bias else None
    even = config.num_experts_per_tok / E
    self.load = buffer(even, (E,), ("expert",)) if has_load(config) else None
    """The part of a step's tokens that each expert is sent, by which the balance loss weights shares."""


class Feeds(nnx.Module):
  """The matrices of all experts."""

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    D, F, E, bias = config.base_emb_dim, expert_width(config), config.num_experts, config.mlp_bias
    up = 1 / math.sqrt(D), (E, D, F), ("expert", "embed", "mlp")
    self.gate = Matrix(rngs, *up, bias=bias) if config.mlp_activation != "gelu" else None
    self.up = Matrix(rngs, *up, bias=bias)
    down = (E, F, D), ("expert", "mlp", "embed")
    self.down = Matrix(rngs, residual_scale / math.sqrt(F), *down, bias=bias)


class Experts(nnx.Module):
  """What stands in a block instead of the feed-forward layer."""

  policy: Policy = PLAIN

  def __init__(self, rngs: nnx.Rngs, config: ModelConfig, residual_scale: float):
    self.config = config
    self.router = Router(rngs, config)
    self.experts = Feeds(rngs, config, residual_scale)
    shared = dataclasses.replace(config, base_mlp_dim=config.shared_experts * expert_width(config))
    self.shared = FeedForward(rngs, shared, residual_scale) if config.shared_experts else None

  @jax.named_scope("experts")
  def __call__(self, x_BTD: jax.Array, at: AttentionContext) -> Outputs:
    """Applies the layer: (B, T, D) → (B, T, D), with its terms and statistics."""
    counts_BT = at.counts_BT
    if counts_BT is None:
      counts_BT = jnp.ones(x_BTD.shape[:2], bool)
    rows, routes = (x_BTD, counts_BT), at.routes
    if routes is not None:
      rows = (*rows, routes.experts)
    of_rows = functools.partial(self._of_rows, replays=routes is not None and routes.is_replayed)
    parameters = self._parameters()
    y_BTD, of_rows, chosen_BTK = by_device(of_rows, parameters, *rows, is_kernel=is_for_tpu())
    if at.cache is not None:
      at.cache.put_experts(chosen_BTK)
    if self.shared is not None:
      y_BTD = y_BTD + self.shared(x_BTD)
    return Outputs(y_BTD, *self._sums(of_rows, counts_BT, at.layer))

  def _parameters(self) -> dict[str, tuple[jax.Array, LogicalAxes]]:
    """Returns what a device needs of the layer's parameters, with their axes."""
    matrices = {name: getattr(self.experts, name) for name in _FEEDS}
    # Which experts a device has is an input, as the number of a stage in training/pipelined_step.py.
    numbers_E1 = jnp.arange(self.config.num_experts)[:, None]
    given: dict[str, tuple[jax.Array, LogicalAxes]] = {"number": (numbers_E1, ("expert", None))}
    for matrix_name, matrix in {"router": self.router, **matrices}.items():
      if matrix is None:
        continue
      cast = jnp.float32 if matrix_name == "router" else self.policy.cast
      for name, each in vars(matrix).items():
        if isinstance(each, Parameter) and name != "load":
          value = each[...] * matrix.lora_scale if name == "lora_a" else each[...]
          key = matrix_name if name == "kernel" else f"{matrix_name}_{name}"
          given[key] = (cast(value), each.axes)
    return as_multiplied(given)

  def _of_rows(
    self,
    parameters: Mapping[str, jax.Array],
    x_BTD: jax.Array,
    counts_BT: jax.Array,
    known_BTK: jax.Array | None = None,
    *,
    replays: bool,
  ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Returns what experts make of some rows, by the part of their width that is given, sums over the
    tokens of each row, and the experts."""
    B, T, D = x_BTD.shape
    routes = None if known_BTK is None else Routes(known_BTK, replays)
    routed = route(self.config, x_BTD, parameters["router"], parameters, routes)
    tokens = x_BTD.reshape(B * T, D), *(x.reshape(B * T, -1) for x in routed[:2])
    if len(parameters["number"]) == self.config.num_experts:
      y_TD = self.of_tokens(parameters, *tokens)
    else:
      # Each device has some experts, for the tokens of all that share them.
      y_TD = ring_summed(self.of_tokens(parameters, *map(ring_gathered, tokens)), self.policy.dtype)
    y_BTD = self.policy.cast(y_TD.reshape(B, T, D))
    return y_BTD, self._row_sums(routed, counts_BT), routed.chosen.astype(jnp.int16)

  def of_tokens(
    self,
    parameters: Mapping[str, jax.Array],
    x_TD: jax.Array,
    chosen_TK: jax.Array,
    weight_TK: jax.Array,
  ) -> jax.Array:
    """Returns what the experts that are given make of tokens: float32 (T, D)."""
    slots = slots_of(chosen_TK, self.config.num_experts, parameters["number"][:, 0])
    matrices = {name: x for name, x in parameters.items() if name.split("_")[0] in _FEEDS}
    if slots.order_N is None:
      rest_TD: jax.Array | float = 0.0
    else:
      matrices, rest_TD = beyond(self._fed, matrices, x_TD, weight_TK, slots)
    weight_S = weights_in_slots(weight_TK, slots)
    return combined(self._fed(matrices, dispatched(x_TD, slots), weight_S, slots), slots) + rest_TD

  def _fed(
    self, parameters: Mapping[str, jax.Array], x_SD: jax.Array, weight_S: jax.Array, slots: Slots
  ) -> jax.Array:
    """Returns what experts make of slots, weighted before the last product: no gradient needs its result."""
    both_SF = _first_products(x_SD, parameters, slots)
    up_SF = named(self._added("up", both_SF["up"], parameters, x_SD, slots), "mlpwi_1")
    if "gate" in both_SF:
      gate_SF = named(self._added("gate", both_SF["gate"], parameters, x_SD, slots), "mlpwi_0")
      up_SF, gate_SF = barrier_gradients((up_SF, gate_SF))
      h_SF = gated_product(self.config, gate_SF, up_SF)
    else:
      h_SF = gelu(up_SF)
    h_SF = self.policy.cast(h_SF * weight_S[:, None])
    y_SD = grouped_product(h_SF, parameters["down"], slots, is_last=True)
    return named(self._added("down", y_SD, parameters, h_SF, slots, weight_S), "mlpwo")

  def _added(
    self,
    name: str,
    y_SF: jax.Array,
    parameters: Mapping[str, jax.Array],
    x_SD: jax.Array,
    slots: Slots,
    weight_S: jax.Array | None = None,
  ) -> jax.Array:
    """Adds what adapters and biases give to a product with the matrices of that name; weights are in the
    slots already."""
    if f"{name}_lora_a" in parameters:
      low_SR = grouped_product(x_SD, parameters[f"{name}_lora_a"], slots)
      y_SF = y_SF + grouped_product(low_SR, parameters[f"{name}_lora_b"], slots)
    if f"{name}_bias" in parameters:
      bias_EF = parameters[f"{name}_bias"]
      if name == "down":
        # Devices that share the width each add a share of it, as of the product.
        bias_EF = bias_EF * (x_SD.shape[1] / expert_width(self.config))
      bias_SF = grouped_bias(bias_EF, slots)
      y_SF = y_SF + (bias_SF if weight_S is None else self.policy.cast(bias_SF * weight_S[:, None]))
    return y_SF

  def _row_sums(self, routed: Routed, counts_BT: jax.Array) -> dict[str, jax.Array]:
    E = self.config.num_experts
    sent_BTKE = jax.nn.one_hot(routed.chosen, E, dtype=jnp.int32) * counts_BT[..., None, None]
    weight_BT, share_BTE = counts_BT.astype(jnp.float32), routed.share
    log_BTE = jnp.log(jnp.where(share_BTE > 0, share_BTE, 1))
    near = _NEAR * 2.0**-self.policy.compute.mantissa_bits
    flips = routed.is_flipped
    flipped = {} if flips is None else {"flips": (flips & counts_BT).sum(1, dtype=jnp.int32)}
    return flipped | {
      "tokens": sent_BTKE.sum((1, 2), dtype=jnp.int32),
      "share": (weight_BT[..., None] * share_BTE).sum(1),
      "entropy": -(weight_BT[..., None] * share_BTE * log_BTE).sum((1, 2)),
      "z": (weight_BT * routed.log_z**2).sum(1),
      "near": ((routed.margin < near) & counts_BT).sum(1, dtype=jnp.int32),
    }

  def _sums(
    self, of_rows: Mapping[str, jax.Array], counts_BT: jax.Array, layer: jax.Array | int
  ) -> tuple[Terms, dict[str, Stat]]:
    """Returns the layer's terms and statistics."""
    c = self.config
    tokens_B = counts_BT.sum(1).astype(jnp.float32)
    tokens, rows = tokens_B.sum(), (tokens_B > 0).sum().astype(jnp.float32)
    tokens_E = of_rows["tokens"].sum(0)
    dense = c.first_num_dense_layers
    by_layer_LE = jnp.zeros((c.base_num_decoder_layers - dense, c.num_experts), jnp.int32)
    stats: dict[str, Stat] = {
      TOKENS: Sum(by_layer_LE.at[layer - dense].set(tokens_E)),
      ENTROPY: Ratio(of_rows["entropy"].sum(), tokens),
      NEAR_TIES: Sum(of_rows["near"].sum()),
    }
    if "flips" in of_rows:
      stats[FLIPS] = Ratio(of_rows["flips"].sum().astype(jnp.float32), tokens)
    if self.router.load is None:
      summed, over = self._row_balance(of_rows, tokens_B), rows
    else:
      summed, over = self._even * (self.router.load[...] * of_rows["share"].sum(0)).sum(), tokens
    balance = Ratio(summed, over, c.load_balance_loss_weight)
    both = {BALANCE: balance, Z_LOSS: Ratio(of_rows["z"].sum(), tokens, c.router_z_loss_weight)}
    terms = {name: each for name, each in both.items() if each.coefficient}
    return terms, stats | {name: each for name, each in both.items() if name not in terms}

  @property
  def _even(self) -> float:
    return self.config.num_experts / self.config.num_experts_per_tok

  def _row_balance(self, of_rows: Mapping[str, jax.Array], tokens_B: jax.Array) -> jax.Array:
    """Returns Σ over rows of E/K · Σ_e (its tokens at e / its tokens) · (mean share of e): 1 for a row
    that is spread evenly (Fedus et al. 2021, by row as in DeepSeek-V3)."""
    sent_BE = of_rows["tokens"].astype(jnp.float32)
    return self._even * safe_ratio((sent_BE * of_rows["share"]).sum(1), tokens_B**2).sum()


def _first_products(
  x_SD: jax.Array, parameters: Mapping[str, jax.Array], slots: Slots
) -> dict[str, jax.Array]:
  """Returns slots multiplied by the matrices up, and gate where experts have it: (S, F) each."""
  if "gate_up" in parameters:
    both_SG = grouped_product(x_SD, parameters["gate_up"], slots)
    return dict(zip(("gate", "up"), jnp.split(both_SG, 2, -1), strict=True))
  names = [name for name in ("gate", "up") if name in parameters]
  return {name: grouped_product(x_SD, parameters[name], slots) for name in names}


def _logits(x: jax.Array, kernel_DE: jax.Array, others: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the router's (…, E), with what its adapter and its bias give."""

  def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel, precision="highest")

  x = x.astype(jnp.float32)
  logits = product(x, kernel_DE)
  if "router_lora_a" in others:
    low = product(product(x, others["router_lora_a"]), others["router_lora_b"])
    logits = logits + low
  if "router_logit_bias" in others:
    bias_E = others["router_logit_bias"]
    logits = logits + bias_E.reshape((1,) * (x.ndim - 1) + bias_E.shape)
  return logits


def route(
  config: ModelConfig,
  x: jax.Array,
  kernel_DE: jax.Array,
  others: Mapping[str, jax.Array],
  routes: Routes | None = None,
) -> Routed:
  """Chooses experts for tokens (…, D) and weights them; all in float32.

  Args:
    config: how many, and by which scores.
    x: the tokens.
    kernel_DE: the router's matrix.
    others: by name what the router may have beside it: `router_bias`, for the choice alone,
      `router_logit_bias`, and an adapter.
    routes: the experts that tokens were sent to before. If these are replayed only the choice is:
      weights, and all that has a gradient, are by the scores of now (Ma et al. 2025).
  """
  K = config.num_experts_per_tok
  logits, bias_E = _logits(x, kernel_DE, others), others.get("router_bias")
  log_z = jax.nn.logsumexp(logits, -1)
  if config.routed_score_func == "softmax":
    scores = share = jnp.exp(logits - log_z[..., None])
  else:
    scores = jax.nn.sigmoid(logits)
    share = scores / scores.sum(-1, keepdims=True)
  ranked = scores if bias_E is None else scores + bias_E.reshape((1,) * (x.ndim - 1) + bias_E.shape)
  ranked = jax.lax.stop_gradient(ranked)
  groups, kept, of_groups = config.n_routing_groups, config.topk_routing_group, jnp.inf
  if groups > 0:
    ranked, of_groups = _in_best_groups(ranked, groups, kept)
  margin, chosen = _best(ranked, K)
  is_flipped = None
  if routes is not None:
    own, known = chosen, routes.experts.astype(chosen.dtype)
    is_own = (known[..., None] == own[..., None, :]).any(-1)
    is_flipped = ((known >= 0) & ~is_own).any(-1)
    chosen = jnp.where(known >= 0, known, own) if routes.is_replayed else own
  weight = jnp.take_along_axis(scores, chosen, -1)
  if config.norm_topk_prob:
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
  weight = weight * config.routed_scaling_factor
  return Routed(chosen, weight, share, log_z, jnp.minimum(margin, of_groups), is_flipped)


def _best(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns by how much the last of the best is ahead of the next, ∞ without one, and their places."""
  best, places = jax.lax.top_k(scores, min(count + 1, scores.shape[-1]))
  if best.shape[-1] == count:
    return jnp.full(scores.shape[:-1], jnp.inf), places
  return best[..., -2] - best[..., -1], places[..., :-1]


def _in_best_groups(ranked: jax.Array, groups: int, kept: int) -> tuple[jax.Array, jax.Array]:
  """Returns −∞ outside of the groups whose two highest scores sum highest, and their margin."""
  ranked_G = ranked.reshape(*ranked.shape[:-1], groups, -1)
  sums_G = jax.lax.top_k(ranked_G, 2)[0].sum(-1)
  margin, best = _best(sums_G, kept)
  is_kept_G = jax.nn.one_hot(best, groups, dtype=bool).any(-2)
  return jnp.where(is_kept_G[..., None], ranked_G, -jnp.inf).reshape(ranked.shape), margin


def has_load(config: ModelConfig) -> bool:
  """Returns whether a balance loss needs the load of a whole step."""
  return config.load_balance_loss_weight > 0 and config.load_balance_loss_type != "sequence"
