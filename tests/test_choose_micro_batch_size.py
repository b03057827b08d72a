"""The fastest microbatch that fits, of any jitted step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.core import microbatch_size
from maxbatch.core.microbatch_size import choose_micro_batch_size, program_bytes
from maxbatch.errors import UserError

W = np.eye(16, dtype=np.float32)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
  return w + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)


def make_step(size: int) -> tuple[Any, Any]:
  return jax.jit(step), (jnp.asarray(W), jnp.ones((size, 16)))


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
  """A clock that knows how long a size takes."""
  table: dict[int, float] = {}

  def look_up(compiled: Any, arguments: Any, fresh: Any, repeats: int) -> float:
    return table[len(arguments[1])]

  monkeypatch.setattr(microbatch_size, "_seconds", look_up)
  return table


def test_the_fastest_is_chosen(seconds):
  seconds |= {8: 1.0, 16: 1.5, 32: 4.0}
  result = choose_micro_batch_size(make_step, [8, 16, 32])
  assert result.size == 16
  assert [one.samples_per_second for one in result.tried] == [8, 16 / 1.5, 8]
  assert str(result).splitlines()[2].endswith("1,500.00         10.7 <")
  whole = choose_micro_batch_size(make_step, [8, 16, 32], samples=lambda size: 64)
  assert whole.size == 8


def test_what_does_not_fit_is_not_run(seconds):
  seconds |= {8: 1.0, 4096: 1.0}
  function, arguments = make_step(4096)
  needed = program_bytes(function.lower(*arguments).compile())
  assert needed is not None
  assert needed > 4096 * 16 * 4
  del seconds[4096]
  result = choose_micro_batch_size(make_step, [8, 4096], memory_bytes=needed - 1)
  assert (result.size, result.tried[1].seconds, result.tried[1].peak_bytes) == (8, None, needed)
  assert "does not fit" in str(result)
  with pytest.raises(UserError, match=r"none of sizes=\[4096\] fits into memory_bytes=1000: 0\.\d"):
    choose_micro_batch_size(make_step, [4096], memory_bytes=1000)


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
