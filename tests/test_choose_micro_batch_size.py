"""The fastest microbatch that fits, of any jitted step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.core.microbatch_size import choose_micro_batch_size, program_bytes
from maxbatch.errors import UserError

W = np.eye(16, dtype=np.float32)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
  return w + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)


class Timed:
  """A compiled step whose runs take the seconds that the table has for their size."""

  def __init__(self, size: int, seconds: dict[int, float], clock: list[float]):
    function, arguments = make_step(size)
    self.compiled, self.size = function.lower(*arguments).compile(), size
    self.seconds, self.clock = seconds, clock
    self.memory_analysis = self.compiled.memory_analysis

  def __call__(self, *arguments: Any) -> Any:
    self.clock[0] += self.seconds[self.size]
    return self.compiled(*arguments)


def make_step(size: int) -> tuple[Any, Any]:
  return jax.jit(step), (jnp.asarray(W), jnp.ones((size, 16)))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, float]], Any]:
  """Steps whose sizes take so many seconds, by a clock of their own."""
  clock = [0.0]
  monkeypatch.setattr("maxbatch.core.microbatch_size.time.perf_counter", lambda: clock[0])
  return lambda seconds: lambda size: (Timed(size, seconds, clock), make_step(size)[1])


def test_the_fastest_is_chosen(timed):
  make_timed = timed({8: 1.0, 16: 1.5, 32: 4.0})
  result = choose_micro_batch_size(make_timed, [8, 16, 32])
  assert result.size == 16
  assert [one.samples_per_second for one in result.tried] == [8, 16 / 1.5, 8]
  assert str(result).splitlines()[2].endswith("1,500.00         10.7 <")
  whole = choose_micro_batch_size(make_timed, [8, 16, 32], samples=lambda size: 64)
  assert whole.size == 8


def test_what_does_not_fit_is_not_run(timed):
  make_timed = timed({8: 1.0})  # To run the other is a KeyError.
  function, arguments = make_step(4096)
  needed = program_bytes(function.lower(*arguments).compile())
  assert needed is not None
  assert needed > 4096 * 16 * 4
  result = choose_micro_batch_size(make_timed, [8, 4096], memory_bytes=needed - 1)
  assert (result.size, result.tried[1].seconds, result.tried[1].peak_bytes) == (8, None, needed)
  assert "does not fit" in str(result)
  with pytest.raises(UserError, match=r"none of sizes=\[4096\] fits into memory_bytes=1000: 0\.\d"):
    choose_micro_batch_size(make_timed, [4096], memory_bytes=1000)


@pytest.mark.parametrize("form", ["jitted", "lowered", "compiled"])
def test_donated_arguments_are_made_anew(form):
  made = []

  def donating(size: int) -> tuple[Any, Any]:
    made.append(size)
    arguments = make_step(size)[1]
    function = jax.jit(step, donate_argnums=0)
    lowered = function.lower(*arguments)
    return {"jitted": function, "lowered": lowered, "compiled": lowered.compile()}[form], arguments

  result = choose_micro_batch_size(donating, [4, 8], repeats=2)
  assert made == [4, 4, 4, 8, 8, 8]
  assert result.size in (4, 8)
  assert all(one.seconds for one in result.tried)


def test_another_error_is_not_taken_for_missing_memory():
  def broken(size: int) -> tuple[Any, Any]:
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")

  def full(size: int) -> tuple[Any, Any]:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
    choose_micro_batch_size(broken, [4])
  with pytest.raises(UserError, match=r"none of sizes=\[4\] fits into memory_bytes=None"):
    choose_micro_batch_size(full, [4])
