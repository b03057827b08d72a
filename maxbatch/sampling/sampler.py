"""Texts from prompts: one pass over the prompts, then one token of each row at a time.

B rows, P places of the prompts, N new tokens, S = P + N, W tokens in view, V vocabulary, D width.

Prompts are padded on the left, so that the next token has the same place in all rows. Keys and
values are kept (models/cache.py) while no row is longer than those of training; from then on, and
for models that offer no cache, each token costs a pass over the last tokens before it. A token's
random key derives from its row's key and its number: a text depends neither on its neighbours nor
on padding, devices, or how many tokens are asked for at once, but by the rounding of the logits.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import LOGICAL_AXIS_RULES, constrain, put, replicated
from maxbatch.models.cache import Cache, experts_of
from maxbatch.models.context_attention import token_order
from maxbatch.models.dot_product import capped
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import LanguageModel, Model, Parameters, offers_cache, takes_any_order
from maxbatch.sampling.choice import Choice, Vocabulary, choose, num_words, packed

Arrays = TypeVar("Arrays")


class Prompts(NamedTuple):
  """What texts begin with."""

  tokens_BP: np.ndarray | jax.Array
  """int32: ids, each row's at its end."""
  lengths_B: np.ndarray | jax.Array
  """int32: how many of them, at least one."""
  keys_B: jax.Array
  """A random key for each text, of those that jax.random.key makes."""


class Samples(NamedTuple):
  """What was written, on the devices."""

  tokens_BN: jax.Array
  """int32: ids; 0 after the end."""
  lengths_B: jax.Array
  """int32: how many of them, with the one that ended the text."""
  log_probs_BN: jax.Array
  """float32: of each token, see `choose`; 0 after the end."""
  ended_B: jax.Array
  """bool: whether a token ended the text."""
  kept_BNW: jax.Array | None = None
  """uint32: bits of the tokens from which each was chosen; None: not asked for."""
  experts_BSLK: jax.Array | None = None
  """int16: the experts that each token, of the prompt too, was sent to, −1 for the last token and
  those after it; None: not asked for."""


@dataclasses.dataclass(frozen=True)
class Sampler:
  """What is compiled: the same for all prompts of one shape, and for all parameters."""

  model: Model
  choice: Choice
  max_new_tokens: int
  max_target_length: int
  """Tokens of a row in training: a token follows from at most as many before it."""
  mesh: Mesh | None = None
  """Over which the parameters are divided; None: they are on one device."""
  keeps_choices: bool = False
  """Whether Samples say from which tokens each was chosen, and log-probabilities are by those alone."""
  keeps_experts: bool = False
  """Whether Samples of a mixture that offers a cache say where its tokens were sent."""


class _Texts(NamedTuple):
  """What stays while texts are written."""

  begins_B: jax.Array
  """Where each row's own tokens begin."""
  key_data_B: jax.Array
  """uint32[B, 2]: of the random keys; typed ones cannot be handed to devices of other processes."""
  vocabulary: Vocabulary


class _State(NamedTuple):
  """How far they are: all rows have as many new tokens, zeros where a text has ended."""

  tokens_BS: jax.Array
  log_probs_BN: jax.Array
  lengths_B: jax.Array
  ended_B: jax.Array
  number: jax.Array
  """int32: new tokens."""
  kept_BNW: jax.Array | None

  def samples(self, num_texts: int, experts_BSLK: jax.Array | None) -> Samples:
    """Returns the samples of the rows that do not only fill up the batch."""
    new_BN = self.tokens_BS[:, -self.log_probs_BN.shape[1] :]
    own = self.lengths_B, self.log_probs_BN, self.ended_B, self.kept_BNW
    samples = Samples(new_BN, *own, experts_BSLK)
    return jax.tree.map(lambda x: x[:num_texts], samples)


def sample(
  sampler: Sampler, params: Parameters, prompts: Prompts, vocabulary: Vocabulary
) -> Samples:
  """Writes the texts that follow the prompts, until all have ended or have max_new_tokens.

  Args:
    sampler: how; over a mesh the rows are filled up to a number that it divides.
    params: the model's parameters, where training has them.
    vocabulary: which tokens may be written, and which end a text.
  """
  *_, last = stream(sampler, params, prompts, vocabulary, sampler.max_new_tokens)
  return last


def stream(
  sampler: Sampler, params: Parameters, prompts: Prompts, vocabulary: Vocabulary, chunk: int
) -> Iterator[Samples]:
  """Yields, as `sample` does at the end, what there is after every `chunk` tokens, or fewer."""
  B, longest = len(prompts.lengths_B), int(np.max(prompts.lengths_B))
  texts, state = _begun(sampler, _filled_up(sampler, prompts), vocabulary, B)
  cache = None
  # The first token that has more than max_target_length before it: until then the cache serves.
  end_of_cache = max(sampler.max_target_length - longest + 1, 0)
  if not _offers_cache(sampler.model):
    end_of_cache = 0
  if end_of_cache:
    state, cache = _prefill(sampler, params, texts, state)
  number, ended = 0, False
  while number < sampler.max_new_tokens and not ended:
    is_cached = number < end_of_cache
    if not is_cached:
      cache = None
    last = end_of_cache if is_cached else sampler.max_new_tokens
    number = min(number + chunk, last, sampler.max_new_tokens)
    state, cache, experts = _write(sampler, params, texts, state, cache, np.int32(number))
    # Nobody waits for the last tokens: who samples dispatches what comes after them.
    ended = number < sampler.max_new_tokens and bool(state.ended_B.all())
    yield state.samples(B, experts)


def traced_prefill(
  sampler: Sampler, params: Parameters, num_texts: int, places: int
) -> jax.stages.Traced:
  """Traces the program that reads the prompts and begins the texts, of abstract arrays.

  Args:
    params: shapes, dtypes and shardings.
    num_texts: B.
    places: P.
  """
  return _prefill.trace(sampler, params, *abstract_texts(sampler, num_texts, places))


def traced_write(
  sampler: Sampler, params: Parameters, num_texts: int, places: int, cache: Cache
) -> jax.stages.Traced:
  """Traces the program that writes token after token into `traced_prefill`'s cache."""
  until = jax.ShapeDtypeStruct((), np.int32)
  texts, state = abstract_texts(sampler, num_texts, places)
  return _write.trace(sampler, params, texts, state, cache, until)


def abstract_texts(sampler: Sampler, num_texts: int, places: int) -> tuple[Any, Any]:
  """Returns shapes, dtypes and shardings of what both programs take beside parameters and cache."""
  assert sampler.mesh is not None
  B, N, V = num_texts, sampler.max_new_tokens, sampler.model.config.vocab_size
  key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
  whole = replicated(sampler.mesh)

  def array(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

  kept_BNW = array(np.uint32, B, N, num_words(V)) if sampler.keeps_choices else None
  vocabulary = Vocabulary(array(np.bool_, V), array(np.bool_, V))
  return (
    _Texts(array(np.int32, B), array(key.dtype, B, *key.shape), vocabulary),
    _State(
      tokens_BS=array(np.int32, B, places + N),
      log_probs_BN=array(np.float32, B, N),
      lengths_B=array(np.int32, B),
      ended_B=array(np.bool_, B),
      number=array(np.int32),
      kept_BNW=kept_BNW,
    ),
  )


def on_fewest_devices(
  params: Parameters, mesh: Mesh, num_texts: int
) -> tuple[Parameters, Mesh | None]:
  """Returns the parameters with which so many texts are written, and their mesh, if any.

  Where every device has all of them, and the texts do not divide, one device does as much alone.
  """
  whole = all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
  if not whole or num_texts % _ways(mesh) == 0:
    return params, mesh
  return jax.tree.map(lambda leaf: leaf.addressable_data(0), params), None


def _ways(mesh: Mesh | None) -> int:
  """Returns the number of parts that a batch is divided into."""
  return math.prod(mesh.shape.get(axis, 1) for axis in LOGICAL_AXIS_RULES["batch"]) if mesh else 1


def _filled_up(sampler: Sampler, prompts: Prompts) -> Prompts:
  """Adds rows of one token until the mesh divides them."""
  more = -len(prompts.lengths_B) % _ways(sampler.mesh)
  if not more:
    return prompts
  return Prompts(
    np.pad(prompts.tokens_BP, ((0, more), (0, 0))),
    np.pad(prompts.lengths_B, (0, more), constant_values=1),
    jnp.concatenate([prompts.keys_B, jnp.broadcast_to(prompts.keys_B[:1], (more,))]),
  )


def _begun(
  sampler: Sampler, prompts: Prompts, vocabulary: Vocabulary, num_texts: int
) -> tuple[_Texts, _State]:
  (B, P), N = prompts.tokens_BP.shape, sampler.max_new_tokens
  begins_B = P - np.asarray(prompts.lengths_B, np.int32)
  tokens_BS = np.pad(np.asarray(prompts.tokens_BP, np.int32), ((0, 0), (0, N)))
  ended_B = np.arange(B) >= num_texts
  words = num_words(len(vocabulary.allowed_V))
  kept_BNW = np.zeros((B, N, words), np.uint32) if sampler.keeps_choices else None
  zeros = np.zeros((B, N), np.float32), np.zeros(B, np.int32)
  arrays: Any = (
    _Texts(begins_B, np.asarray(jax.random.key_data(prompts.keys_B)), vocabulary),  # pyright: ignore
    _State(tokens_BS, *zeros, ended_B, np.int32(0), kept_BNW),  # pyright: ignore
  )
  if sampler.mesh is None:
    return jax.device_put(arrays)
  whole = replicated(sampler.mesh)
  return put(arrays, jax.tree.map(lambda _: whole, arrays))


@functools.lru_cache(8)
def _offers_cache(model: Model) -> bool:
  return offers_cache(model.bind(model.shapes()))


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
  sampler: Sampler, params: Parameters, texts: _Texts, state: _State
) -> tuple[_State, Cache]:
  """Puts the prompts in a cache, and chooses the first token of each text."""
  with _mesh_of(sampler):
    bound, S = sampler.model.bind(params), state.tokens_BS.shape[1]
    assert offers_cache(bound)
    P = S - sampler.max_new_tokens
    places_1P, begins_B1 = jnp.arange(P)[None], texts.begins_B[:, None]
    rows = _rows(state.tokens_BS[:, :P])._replace(
      # What is before a text is another segment, which it does not see.
      segment_ids=(places_1P >= begins_B1).astype(jnp.int32),
      positions=jnp.maximum(places_1P - begins_B1, 0),
    )
    order_P = token_order(sampler.model.config, P) if takes_any_order(bound) else None
    last = P - 1
    if order_P is not None:
      rows, last = rows.in_order(order_P), int(np.argmax(order_P))
    hidden_BPD, cache = bound.prefill(rows, S)
    state = _with_next(sampler, bound, texts, state, hidden_BPD[:, last])
    return _everywhere(state), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _write(
  sampler: Sampler,
  params: Parameters,
  texts: _Texts,
  state: _State,
  cache: Cache | None,
  until: jax.Array,
) -> tuple[_State, Cache | None, jax.Array | None]:
  """Writes the tokens up to number `until`, unless all texts end before; returns with the cache the
  experts in it, if they are asked for."""
  with _mesh_of(sampler):
    bound = sampler.model.bind(params)
    decode = bound.decoder() if cache is not None and offers_cache(bound) else None

    def add(carried: tuple[_State, Cache | None]) -> tuple[_State, Cache | None]:
      state, cache = carried
      place = state.tokens_BS.shape[1] - sampler.max_new_tokens + state.number - 1
      if decode is None or cache is None:
        hidden_BD = _hidden_of_whole(bound, sampler, texts, state, place)
      else:
        token_B = jax.lax.dynamic_index_in_dim(state.tokens_BS, place, 1, keepdims=False)
        hidden_BD, cache = decode(token_B, cache, place, texts.begins_B)
      return _with_next(sampler, bound, texts, state, hidden_BD), cache

    def goes_on(carried: tuple[_State, Cache | None]) -> jax.Array:
      state, _ = carried
      return (state.number < until) & ~state.ended_B.all()

    state, cache = jax.lax.while_loop(goes_on, add, (state, cache))
    experts = experts_of(cache) if cache is not None and sampler.keeps_experts else None
    return _everywhere(state), cache, _everywhere(experts)


def _hidden_of_whole(
  bound: LanguageModel, sampler: Sampler, texts: _Texts, state: _State, place: jax.Array
) -> jax.Array:
  """Returns hidden states (B, D) of the tokens at `place`, by a pass over the last W of each row.

  They begin their rows, as in training: what comes after them there is seen by none.
  """
  S = state.tokens_BS.shape[1]
  W = min(sampler.max_target_length, S)
  first_B1 = jnp.maximum(texts.begins_B, place + 1 - W)[:, None]
  places_BW = jnp.minimum(first_B1 + jnp.arange(W)[None], S - 1)
  rows = _rows(jnp.take_along_axis(state.tokens_BS, places_BW, 1))
  hidden_BWD = hidden_of(bound(rows, None))
  return jnp.take_along_axis(hidden_BWD, (place - first_B1)[..., None], 1)[:, 0]


def _with_next(
  sampler: Sampler, bound: LanguageModel, texts: _Texts, state: _State, hidden_BD: jax.Array
) -> _State:
  """Adds the token that is chosen by the hidden states of the last one, in rows that go on."""
  logits_BV = jnp.matmul(hidden_BD, bound.output_matrix(), preferred_element_type=jnp.float32)
  logits_BV = capped(logits_BV, sampler.model.config.final_logits_soft_cap)
  logits_BV = constrain(logits_BV, ("batch", None))
  logits_BV = jnp.where(texts.vocabulary.allowed_V[None], logits_BV, -jnp.inf)
  keys_B = jax.random.wrap_key_data(texts.key_data_B)
  keeps = sampler.keeps_choices
  ids_B, log_probs_B, kept_BV = choose(
    logits_BV, keys_B, state.number, sampler.choice, of_kept=keeps
  )
  ids_B = jnp.where(state.ended_B, 0, ids_B)
  log_probs_B = jnp.where(state.ended_B, 0.0, log_probs_B)
  place = state.tokens_BS.shape[1] - sampler.max_new_tokens + state.number
  if keeps:
    kept_BNW = jax.lax.dynamic_update_index_in_dim(state.kept_BNW, packed(kept_BV), state.number, 1)
    state = state._replace(kept_BNW=kept_BNW)
  return state._replace(
    tokens_BS=jax.lax.dynamic_update_index_in_dim(state.tokens_BS, ids_B, place, 1),
    log_probs_BN=jax.lax.dynamic_update_index_in_dim(
      state.log_probs_BN, log_probs_B, state.number, 1
    ),
    lengths_B=state.lengths_B + ~state.ended_B,
    ended_B=state.ended_B | texts.vocabulary.ends_V[ids_B],
    number=state.number + 1,
  )


def _rows(tokens_BT: jax.Array) -> Rows:
  """Returns rows of which only the tokens matter."""
  return Rows(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape), jnp.zeros(len(tokens_BT), jnp.int32))


def _mesh_of(sampler: Sampler) -> contextlib.AbstractContextManager[Any]:
  if sampler.mesh is None:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(sampler.mesh.abstract_mesh)


def _everywhere(arrays: Arrays) -> Arrays:
  """Replicates arrays on every device, for the host to read."""
  return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim), arrays)
