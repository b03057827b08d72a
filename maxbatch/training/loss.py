"""Cross entropy as a sum over tokens, holding the logits of one tile of tokens at a time.

B rows, T tokens, D width, V vocabulary, C tokens of a tile.

Value and gradient are formed in the same pass over the logits: they are neither kept for the
backward pass nor computed twice. Sums, not means, so that microbatches and devices add up to
exactly the loss of the whole batch; the one division by the step's weight comes later.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.core.terms import Stats, Terms, sample_keys
from maxbatch.data.rows import Rows
from maxbatch.hardware.shard_maps import over_rows, summed_over_tokens, summed_part
from maxbatch.hardware.sharding import constrain
from maxbatch.models.context_attention import token_order
from maxbatch.models.forms import barrier, barrier_gradients, chosen, largest_and_sum
from maxbatch.models.layers import outputs_of
from maxbatch.models.probes import TiedProbe, row_squares
from maxbatch.models.registry import (
  LanguageModel,
  MeasuredModel,
  Model,
  Parameters,
  takes_any_order,
)
from maxbatch.precision.policy import PLAIN, Policy
from maxbatch.training import partial_sums
from maxbatch.training.metrics import (
  NO_METRICS,
  Metrics,
  Tokens,
  TokenSums,
  token_sums,
  zero_token_sums,
)
from maxbatch.training.tiles import cut_tokens, keeps_gradients, num_tiles, scan_tiles, unwritten

_MATRIX_AXES = ("embed", "vocab")


class LossOptions(NamedTuple):
  """How the loss is formed from hidden states; known when the step is compiled."""

  tiles: int
  """Tiles of tokens, see `num_tiles`."""
  z_weight: float = 0.0
  soft_cap: float = 0.0
  """Logits become cap·tanh(logit/cap); 0: they stay as they are."""
  metrics: Metrics = NO_METRICS
  policy: Policy = PLAIN
  """In which format the gradient of the logits is multiplied by hidden states and matrix."""
  is_kept: bool = False
  """Whether the gradient of the logits is kept over all tiles, see `keeps_gradients`."""


class LossSums(NamedTuple):
  """Sums over tokens, as float32 scalars, or with an entry per device along fsdp, float32[F]."""

  loss: jax.Array
  metrics: TokenSums


def loss_sum(
  model: Model, parameters: Parameters, rows: Rows, dropout_key: jax.Array | None
) -> jax.Array:
  """Sums cross entropy (nats) and z-loss over tokens, weighted, float32.

  Args:
    dropout_key: the run's dropout key; None evaluates without dropout and without z-loss.
  """
  return loss_parts(model, parameters, rows, dropout_key).loss.sum()


def loss_parts(
  model: Model,
  parameters: Parameters,
  rows: Rows,
  dropout_key: jax.Array | None,
  probes: Parameters | None = None,
  metrics: Metrics = NO_METRICS,
) -> LossSums:
  """Computes `loss_sum` with metrics, not yet summed over the devices along fsdp: float32[F].

  `probes`, if the model has any, are zeros to differentiate the sum by (models/probes.py).
  """
  keys_B = row_keys(model, dropout_key, rows)
  is_training = dropout_key is not None
  return row_sums(model, parameters, rows, keys_B, probes, metrics, is_training=is_training).sums


def row_keys(model: Model, dropout_key: jax.Array | None, rows: Rows) -> jax.Array | None:
  """Returns a random key for each row, (B,) or (k, B); None where the model draws nothing."""
  if dropout_key is None or model.config.dropout_rate == 0:
    return None
  return sample_keys(dropout_key, rows.sample_ids)


class TokenShare(NamedTuple):
  """Tokens of a microbatch of which a loss is formed, all after the model's layers: those of whole rows, or
  of a pipeline's stage, which has C of the T tokens of every row."""

  model: Model
  hidden_BCD: jax.Array
  """What the output matrix is applied to."""
  matrix_DV: jax.Array
  probe: jax.Array | TiedProbe | None = None
  cut: Callable[[jax.Array], jax.Array] = lambda x_BT: x_BT
  """From an array of the rows' tokens (B, T, …) to that of these (B, C, …), filled up with zeros."""
  counts_rows: jax.Array | None = None
  """bool: whether what is counted by row is counted with these tokens, as with one share of all; None: with
  these, as there is no other."""
  form: partial_sums.Form = partial_sums.IN_PARTS
  is_training: bool = True
  """Whether z-loss is added."""


def token_share(
  model: Model, bound: LanguageModel, rows: Rows, keys_B: jax.Array | None, *, is_training: bool
) -> tuple[TokenShare, Terms, Stats]:
  """Returns all tokens of rows after the layers of a bound model, and the model's own terms and statistics."""
  hidden_BTD, terms, stats = outputs_of(bound(rows, keys_B))
  matrix_DV = bound.output_matrix()
  if not model.frozen:
    # So the matrix's gradient is divided over fsdp before the layers' backward pass, through which
    # the compiler would otherwise hold the whole of it in float32: 0.5 of 5 GB for Llama-2-7B.
    hidden_BTD, matrix_DV = barrier_gradients((hidden_BTD, matrix_DV), on_gpu=True)
  probe = bound.output_probe() if isinstance(bound, MeasuredModel) else None
  return TokenShare(model, hidden_BTD, matrix_DV, probe, is_training=is_training), terms, stats


def row_order(model: Model, rows: Rows) -> np.ndarray | None:
  """Returns the order in which the model is given the tokens of rows, `token_order`; None: as they are read."""
  order_T = token_order(model.config, rows.inputs.shape[-1])
  return None if order_T is None or not _takes_any_order(model) else order_T


@functools.lru_cache(8)
def _takes_any_order(model: Model) -> bool:
  return takes_any_order(model.bind(model.shapes()))


class RowSums(NamedTuple):
  """What some rows contribute to the loss, and what the model itself hands out."""

  sums: LossSums
  terms: Terms
  stats: Stats


def row_sums(
  model: Model,
  parameters: Parameters,
  rows: Rows,
  keys_B: jax.Array | None,
  probes: Parameters | None = None,
  metrics: Metrics = NO_METRICS,
  scale: jax.Array | None = None,
  *,
  is_training: bool,
) -> RowSums:
  """Returns the loss and the metrics of rows, float32[F], and the model's own terms and statistics.

  Args:
    keys_B: of `row_keys`; `probes`: zeros to differentiate by, if the model has any (models/probes.py).
    scale: float32 scalar by which the loss's gradients, not the sums, are multiplied.
    is_training: whether z-loss is added.
  """
  bound = model.bind(parameters, probes)
  order_T = row_order(model, rows)
  if order_T is not None:
    rows = rows.in_order(order_T)
  share, terms, stats = token_share(model, bound, rows, keys_B, is_training=is_training)
  sums = share_sums(share, share.cut(rows.targets), share.cut(rows.weights), metrics, scale)
  return RowSums(sums, terms, stats)


def share_sums(
  share: TokenShare,
  targets_BC: jax.Array,
  weights_BC: jax.Array,
  metrics: Metrics = NO_METRICS,
  scale: jax.Array | None = None,
) -> LossSums:
  """Returns the loss and the metrics of some tokens, float32[F], as `row_sums`."""
  shape = weights_BC.shape
  options = loss_options(share.model, *shape, is_training=share.is_training, metrics=metrics)
  arrays = share.hidden_BCD, share.matrix_DV, targets_BC, weights_BC
  return cross_entropy_parts(*arrays, options, share.probe, scale)


def loss_options(
  model: Model, rows: int, length: int, *, is_training: bool, metrics: Metrics
) -> LossOptions:
  """Returns how the loss of rows (rows, length) is formed; z-loss is training's alone."""
  config = model.config
  z_weight = config.z_loss_multiplier if is_training else 0.0
  is_kept = is_training and keeps_gradients(config, rows, length, model.policy.dtype)
  tiles = num_tiles(config, rows, length, is_kept=is_kept)
  cap = config.final_logits_soft_cap
  return LossOptions(tiles, z_weight, cap, metrics, model.policy, is_kept and tiles > 1)


def cross_entropy_parts(
  hidden_BTD: jax.Array,
  matrix_DV: jax.Array,
  targets_BT: jax.Array,
  weights_BT: jax.Array,
  options: LossOptions,
  probe: jax.Array | TiedProbe | None = None,
  scale: jax.Array | None = None,
) -> LossSums:
  """Sums weight · (log Z − logit[target] + z_weight · (log Z)²), log Z in float32, and metrics, for each
  device along fsdp: float32[F].

  Its gradients, not the sum, are multiplied by `scale`, while they are still in float32.
  """

  def of_rows(matrix_DV: jax.Array, *rows: jax.Array) -> LossSums:
    hidden_BTD, *others = rows
    scale_B = None if scale is None else others.pop()
    if probe is None:
      sums = _cross_entropy_sum(hidden_BTD, matrix_DV, *others, scale_B, options)
    else:
      targets_BT, weights_BT, *parts = others
      of_rows = jax.tree.unflatten(jax.tree.structure(probe), parts)
      sums = _measured_sum(hidden_BTD, matrix_DV, targets_BT, weights_BT, of_rows, scale_B, options)
    return jax.tree.map(lambda x: x[None], sums)

  rows = (hidden_BTD, targets_BT, weights_BT, *jax.tree.leaves(probe))
  if scale is not None:  # For each row, as `over_rows` takes it.
    rows += (jnp.broadcast_to(scale, weights_BT.shape[:1]),)
  with jax.named_scope("head"):
    return over_rows(of_rows, matrix_DV, _MATRIX_AXES, *rows, is_summed=True)


def _zero(metrics: Metrics) -> LossSums:
  return LossSums(jnp.zeros((), jnp.float32), zero_token_sums(metrics))


def _add(total: LossSums, new: LossSums) -> LossSums:
  return jax.tree.map(jnp.add, total, new)


def _sum_only(hidden_BTD, matrix_DV, targets_BT, weights_BT, scale_B, options):
  """Computes the sums, for evaluation."""
  del scale_B

  def add_tile(total, tile):
    return _add(total, _tile_sum(tile, matrix_DV, options)[0]), None

  cut = cut_tokens(options.tiles, hidden_BTD, targets_BT, weights_BT)
  return scan_tiles(add_tile, _zero(options.metrics), cut, options.tiles)[0]


def _forward(hidden_BTD, matrix_DV, targets_BT, weights_BT, scale_B, options):
  """Computes the sums, and the gradients by hidden states and matrix; None where all is frozen."""
  wanted = hidden_BTD.perturbed, matrix_DV.perturbed
  scale_B = None if scale_B is None else scale_B.value
  arrays = hidden_BTD.value, matrix_DV.value, targets_BT.value, weights_BT.value
  total, d_hidden_BTD, d_matrix_DV = _with_gradients(*arrays, scale_B, options, wanted)
  if d_matrix_DV is not None:
    d_matrix_DV = d_matrix_DV.astype(matrix_DV.value.dtype)
  return total, (d_hidden_BTD, d_matrix_DV)


def _with_gradients(
  hidden_BTD, matrix_DV, targets_BT, weights_BT, scale_B, options, wanted=(True, True)
):
  """Computes sums and the gradients wanted, that of the matrix in float32, a tile at a time."""
  of_hidden, of_matrix = wanted
  is_kept = options.is_kept and of_matrix

  def gradients(hidden, d_logits):
    d_logits_XV, hidden_XD = (x.reshape(-1, x.shape[-1]) for x in (d_logits, hidden))
    d_hidden = (d_logits_XV @ matrix_DV.T).reshape(hidden.shape) if of_hidden else None
    if not of_matrix:
      return d_hidden, None
    # The matrix, read no more, then needs no memory beside its gradient.
    d_hidden, hidden_XD = barrier((d_hidden, hidden_XD)) if is_kept else (d_hidden, hidden_XD)
    return d_hidden, jnp.matmul(hidden_XD.T, d_logits_XV, preferred_element_type=jnp.float32)

  def add_tile(carry, tile):
    (total, summed), (index, *tile) = carry, tile
    new, d_logits_BCV = _tile_sum(tile, matrix_DV, options)
    if scale_B is not None:
      d_logits_BCV = d_logits_BCV * scale_B[:, None, None]
    d_logits_BCV = options.policy.rounded(d_logits_BCV).astype(hidden_BTD.dtype)
    if is_kept:
      summed = jax.lax.dynamic_update_index_in_dim(summed, d_logits_BCV, index, 0)
      return (_add(total, new), summed), None
    d_hidden_BCD, d_tile_DV = gradients(tile[0], d_logits_BCV)
    return (_add(total, new), summed + d_tile_DV if of_matrix else None), d_hidden_BCD

  cut = cut_tokens(options.tiles, hidden_BTD, targets_BT, weights_BT)
  if is_kept:
    summed = unwritten(hidden_BTD, (*cut[1].shape, matrix_DV.shape[1]))
  else:
    summed = jnp.zeros(matrix_DV.shape, jnp.float32) if of_matrix else None
  carry, cut = (_zero(options.metrics), summed), (jnp.arange(options.tiles), *cut)
  (total, summed), d_hidden = scan_tiles(add_tile, carry, cut, options.tiles)
  d_hidden, d_matrix_DV = gradients(cut[1], summed) if is_kept else (d_hidden, summed)
  B, T, D = hidden_BTD.shape
  if d_hidden is not None:
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(B, -1, D)[:, :T]
  return total, d_hidden, d_matrix_DV


def _backward(options, gradients, d_sums):
  """Scales the kept gradients; metrics have none."""
  del options
  scaled = (None if d is None else d * d_sums.loss.astype(d.dtype) for d in gradients)
  return *scaled, None, None, None


_cross_entropy_sum = jax.custom_vjp(_sum_only, nondiff_argnums=(5,))
_cross_entropy_sum.defvjp(_forward, _backward, symbolic_zeros=True)


def _measured_sum_only(hidden_BTD, matrix_DV, targets_BT, weights_BT, probe, scale_B, options):
  """Computes the sums; the loss's gradient by the matrix is measured row by row."""
  del probe
  return _sum_only(hidden_BTD, matrix_DV, targets_BT, weights_BT, scale_B, options)


def _measured_forward(hidden_BTD, matrix_DV, targets_BT, weights_BT, probe, scale_B, options):
  """Computes `_forward` a row at a time, each in as few tiles as a batch of one row needs."""
  of_a_row = options._replace(tiles=-(-options.tiles // hidden_BTD.shape[0]))
  tied = probe if isinstance(probe, TiedProbe) else None
  shards = (probe.probe_BS if isinstance(probe, TiedProbe) else probe).shape[1]

  def add_row(carry, row):
    total, d_matrix_DV = carry
    *arrays, ids_T, scale = row
    hidden_1TD, targets_1T, weights_1T, scale_1 = jax.tree.map(lambda x: x[None], (*arrays, scale))
    row = hidden_1TD, matrix_DV, targets_1T, weights_1T, scale_1
    new, d_hidden_1TD, d_row_DV = _with_gradients(*row, of_a_row)
    assert d_hidden_1TD is not None
    assert d_row_DV is not None
    squares_S = row_squares(summed_part(d_row_DV, _MATRIX_AXES)[None], _MATRIX_AXES, shards)[0]
    at_ids_TD = None if ids_T is None else summed_over_tokens(d_row_DV)[:, ids_T].T
    return (_add(total, new), d_matrix_DV + d_row_DV), (d_hidden_1TD[0], squares_S, at_ids_TD)

  zeros = _zero(options.metrics), jnp.zeros(matrix_DV.shape, jnp.float32)
  rows = hidden_BTD, targets_BT, weights_BT, tied.ids_BT if tied else None, scale_B
  (total, d_matrix_DV), (d_hidden_BTD, *measured) = jax.lax.scan(add_row, zeros, rows)
  return total, (d_hidden_BTD, d_matrix_DV.astype(matrix_DV.dtype), *measured)


def _measured_backward(options, kept, d_sums):
  *gradients, squares_BS, at_ids_BTD = kept
  d_hidden_BTD, d_matrix_DV, *nothing, no_scale_B = _backward(options, gradients, d_sums)
  of_probe = squares_BS * d_sums.loss**2
  if at_ids_BTD is not None:
    of_probe = TiedProbe(of_probe, None, at_ids_BTD * d_sums.loss)
  return d_hidden_BTD, d_matrix_DV, *nothing, of_probe, no_scale_B


_measured_sum = jax.custom_vjp(_measured_sum_only, nondiff_argnums=(6,))
_measured_sum.defvjp(_measured_forward, _measured_backward)


def _tile_sum(
  tile: Sequence[jax.Array], matrix_DV: jax.Array, options: LossOptions
) -> tuple[LossSums, jax.Array]:
  """Computes the sums over a tile and the loss's gradient by the logits, all float32."""
  hidden_BCD, targets_BC, weights_BC = tile
  (B, C, D), z_weight, cap = hidden_BCD.shape, options.z_weight, options.soft_cap
  hidden_XD = hidden_BCD.reshape(-1, D)
  logits_XV = jnp.matmul(hidden_XD, matrix_DV, preferred_element_type=jnp.float32)
  logits_BCV = constrain(logits_XV.reshape(B, C, -1), ("batch", "length", "vocab"))
  if cap:
    logits_BCV = cap * jnp.tanh(logits_BCV / cap)
  max_BC1, sum_BC1 = largest_and_sum(logits_BCV)
  exp_BCV = jnp.exp(logits_BCV - max_BC1)
  log_z_BC = (jnp.log(sum_BC1) + max_BC1).squeeze(-1)
  hit_BCV = targets_BC[..., None] == jnp.arange(logits_BCV.shape[-1])[None, None]
  target_BC = chosen(logits_BCV, targets_BC, hit_BCV)
  loss = (weights_BC * (log_z_BC - target_BC + z_weight * log_z_BC**2)).sum()
  d_log_z_BC1 = (1.0 + 2.0 * z_weight * log_z_BC)[..., None]
  d_logits_BCV = weights_BC[..., None] * (exp_BCV / sum_BC1 * d_log_z_BC1 - hit_BCV)
  if cap:
    d_logits_BCV = d_logits_BCV * (1 - (logits_BCV / cap) ** 2)
  tokens = Tokens(
    loss_BC=log_z_BC - target_BC,
    log_z_BC=log_z_BC,
    target_logit_BC=target_BC,
    max_logit_BC=max_BC1.squeeze(-1),
    weights_BC=weights_BC,
    targets_BC=targets_BC,
  )
  return LossSums(loss, token_sums(options.metrics, tokens)), d_logits_BCV
