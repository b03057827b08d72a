"""Number formats: rounding bit by bit against integers, and rounding that loses no small update."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxbatch.precision.formats import CBFLOAT16, FLOAT16, FORMATS, Format
from maxbatch.precision.policy import (
  PLAIN,
  Policy,
  cast_as_read,
  emulated,
  rounded,
  stochastically_updated,
)


def values(of: Format) -> np.ndarray:
  """What all 2^16 codes mean, float32, by the definition of the format."""
  codes = np.arange(2**16)
  exponents = (codes >> of.mantissa_bits) & (2**of.exponent_bits - 1)
  mantissas = codes & (2**of.mantissa_bits - 1)
  bias = 2 ** (of.exponent_bits - 1) - 1
  normal = np.ldexp(1 + mantissas / 2**of.mantissa_bits, exponents - bias)
  result = np.where(exponents, normal, np.ldexp(mantissas / 2**of.mantissa_bits, 1 - bias))
  last = exponents == 2**of.exponent_bits - 1
  result = np.where(last, np.where(mantissas, np.nan, np.inf), result)
  return np.where(codes >> 15, -result, result).astype(np.float32)


def by_integers(x: np.ndarray, to: Format) -> np.ndarray:
  """The codes of float32 numbers, none of them NaN, to the nearest and of two the even one."""
  bits = x.view(np.uint32).astype(np.int64)
  exponents, sign = (bits >> 23) & 255, bits >> 31
  significands = (bits & 0x7FFFFF) | np.where(exponents, 1 << 23, 0)
  exponents = np.maximum(exponents, 1) - 127
  smallest = 2 - 2 ** (to.exponent_bits - 1)
  # Below the smallest exponent as many bits more are lost.
  lost = np.minimum(23 - to.mantissa_bits + np.maximum(smallest - exponents, 0), 25)
  kept, rest, half = significands >> lost, significands & ((1 << lost) - 1), 1 << (lost - 1)
  kept += (rest > half) | ((rest == half) & (kept & 1 == 1))
  # The implied bit is counted by the exponent; a carry goes into it by itself.
  codes = kept + (np.maximum(exponents - smallest, 0) << to.mantissa_bits)
  infinite = (2**to.exponent_bits - 1) << to.mantissa_bits
  return np.minimum(codes, infinite) | (sign << 15)


def hard_numbers(to: Format) -> np.ndarray:
  """A million float32 numbers: any bits, and ties, limits and their neighbours, of both signs."""
  finite = np.sort(values(to)[: 2**15][np.isfinite(values(to)[: 2**15])]).astype(np.float64)
  beyond = finite[-1] + (finite[-1] - finite[-2])
  ties = ((finite + np.append(finite[1:], beyond)) / 2).astype(np.float32)
  near = np.concatenate([finite.astype(np.float32), ties])
  near = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -near)])
  random = np.random.default_rng(0)
  anything = random.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
  usual = np.ldexp(random.normal(size=200_000), random.integers(-45, 40, 200_000))
  limits = np.array([np.inf, -np.inf], np.float32)
  result = np.concatenate([near, -near, anything, usual.astype(np.float32), limits])
  result = result[~np.isnan(result)]
  # A float32 that is subnormal itself counts as zero on many devices.
  return result[np.abs(result) >= np.finfo(np.float32).tiny]


@pytest.mark.parametrize("to", [CBFLOAT16, FLOAT16], ids=["cbfloat16", "float16"])
def test_rounding_is_that_of_integers(to):
  x = hard_numbers(to)
  assert x.size > 1_000_000
  expected = values(to)[by_integers(x, to)]
  result = np.asarray(jax.jit(functools.partial(rounded, to=to))(x))
  np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_the_integers_round_as_numpy_does():
  x = hard_numbers(FLOAT16)
  with np.errstate(over="ignore"):
    np.testing.assert_array_equal(values(FLOAT16)[by_integers(x, FLOAT16)], x.astype(np.float16))


def test_what_the_format_holds_stays_as_it_is():
  held = values(CBFLOAT16)
  result = np.asarray(rounded(jnp.asarray(held), CBFLOAT16))
  same = result.view(np.uint32) == held.view(np.uint32)
  assert np.all(same | (np.isnan(result) & np.isnan(held)))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_formats_have_the_limits_of_their_dtypes(name):
  of, dtype = FORMATS[name], ml_dtypes.finfo(name)
  assert (of.largest, of.smallest_normal) == (float(dtype.max), float(dtype.smallest_normal))
  assert of.smallest == float(dtype.smallest_subnormal)
  assert of.bytes == np.dtype(name).itemsize == of.bits // 8


def test_cbfloat16_has_a_larger_range_than_float16_and_fewer_subnormal_numbers():
  assert CBFLOAT16.bits == 16
  assert CBFLOAT16.largest / FLOAT16.largest > 2**15
  assert FLOAT16.smallest_normal / CBFLOAT16.smallest_normal == 2**16
  subnormal = [np.sum(np.abs(values(to)) < to.smallest_normal) for to in (CBFLOAT16, FLOAT16)]
  assert subnormal == [2**10, 2**11]


def test_gradients_are_rounded_as_values_are():
  x, gradient = jnp.float32(1 + 2**-12), jnp.float32(3e-13)
  y, vjp_fn = jax.vjp(lambda x: emulated(x, CBFLOAT16), x)
  assert (y, vjp_fn(gradient)[0]) == (1.0, 0.0)
  assert Policy(compute=CBFLOAT16).cast(x) == Policy(compute=CBFLOAT16).rounded(x) == 1.0


def test_float32_casts_nothing():
  x = jnp.ones(3)
  for cast in (PLAIN.cast, PLAIN.rounded, PLAIN.summand):
    assert jax.make_jaxpr(cast)(x).eqns == []


@pytest.mark.parametrize(("rounding", "ends"), [("nearest", 1.0), ("stochastic", 2.0)])
def test_late_small_updates_vanish_in_bfloat16_unless_rounding_is_stochastic(rounding, ends):
  """1000 updates of a thousandth, to a weight of 1 that has steps of 1/128."""
  weights = {"w": jnp.ones(256, jnp.bfloat16)}

  def update(index, weights):
    if rounding == "nearest":
      return jax.tree.map(lambda w: (w + jnp.float32(1e-3)).astype(w.dtype), weights)
    updates = {"w": jnp.full(256, 1e-3)}
    return stochastically_updated(weights, updates, jax.random.fold_in(jax.random.key(0), index))

  result = np.asarray(jax.lax.fori_loop(0, 1000, update, weights)["w"], np.float64)
  assert result.mean() == pytest.approx(ends, rel=0.01)


def test_stochastic_rounding_takes_a_neighbour_and_keeps_what_needs_no_rounding():
  x = jnp.asarray(np.ldexp(np.random.default_rng(0).normal(size=20_000), 3), jnp.float32)
  held = x.astype(jnp.bfloat16)
  key, nothing = jax.random.key(1), jnp.zeros_like(x)
  same = stochastically_updated(held, nothing, key)
  np.testing.assert_array_equal(same, held)
  special = jnp.asarray([jnp.inf, -jnp.inf, 0.0, -0.0, 3.0], jnp.bfloat16)
  np.testing.assert_array_equal(stochastically_updated(special, jnp.zeros(5), key), special)
  wide = {"float32": x}
  np.testing.assert_array_equal(stochastically_updated(wide, wide, key)["float32"], 2 * x)
  moved = np.asarray(stochastically_updated(jnp.zeros_like(held), x, key), np.float32)
  error = moved - np.asarray(x)
  steps = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
  assert np.abs(error / steps).max() < 1
  assert abs((error / steps).mean()) < 0.02


def test_what_is_only_cast_is_cast_once():
  def narrow(x):
    return x.astype(jnp.bfloat16)

  def function(x):
    within = jax.checkpoint(jax.jit(lambda a, b: narrow(a[0]) * narrow(b)))
    once = within(x[("twice",)], x[("inside",)][0]) + narrow(x[("twice",)][0])
    twice = narrow(x[("read too",)]).sum() + x[("read too",)].sum()
    wider = x[("in bfloat16",)].astype(jnp.float32).sum() + x[("in two",)].astype(jnp.float16).sum()
    return once, twice, wider, narrow(x[("in two",)]), x[("handed on",)]

  shapes = {"twice": (1, 2), "inside": (1, 2)}
  names = ["twice", "inside", "read too", "in bfloat16", "in two", "handed on", "unused"]
  arrays = {(name,): jnp.ones(shapes.get(name, 2)) for name in names}
  arrays[("in bfloat16",)] = narrow(arrays[("in bfloat16",)])
  read = cast_as_read(function, arrays, arrays)
  changed = {name for (name,), x in read.items() if x.dtype != arrays[(name,)].dtype}
  assert changed == {"twice", "inside"}
  assert all(read[(name,)].dtype == jnp.bfloat16 for name in changed)
