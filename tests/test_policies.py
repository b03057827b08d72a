"""Copies of the parameters where they sample: which are kept, and that nobody waits for them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.core.topology import Topology
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models.registry import Parameters
from maxbatch.rl.policies import Mover, Policies

TRAIN = make_mesh(Topology.of(fsdp=2), jax.devices()[:2])
SAMPLE = make_mesh(Topology.of(data=3), jax.devices()[2:5])


@dataclasses.dataclass(frozen=True)
class Split:
  """All that is asked of a model here: what of its parameters is frozen."""

  def split(self, parameters: Parameters) -> tuple[Parameters, Parameters]:
    return {"w": parameters["w"]}, {"fixed": parameters["fixed"]}


MODEL: Any = Split()


def parameters(value: float) -> Parameters:
  place = NamedSharding(TRAIN, PartitionSpec("fsdp"))
  put = functools.partial(jax.device_put, device=place)
  return {"w": put(np.full((4, 2), value, np.float32)), "fixed": put(np.ones(2, np.float32))}


def placed(mesh: Mesh, like: Parameters, **specs: PartitionSpec) -> Parameters:
  """Their shapes and shardings on another mesh: whole, but for those of `specs`."""
  return {
    name: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, specs.get(name, PartitionSpec()))
    )
    for name, x in like.items()
  }


MOVE = Mover(TRAIN, placed(SAMPLE, parameters(0)))


@pytest.mark.parametrize(("keeps_first", "known"), [(False, [2, 3]), (True, [0, 2, 3])])
def test_the_newest_and_the_first_are_kept(keeps_first, known):
  policies = Policies(MODEL, 2, keeps_first=keeps_first, move=MOVE)
  for step in range(4):
    policies.publish(step, parameters(step))
  for step in known:
    assert np.array_equal(policies.of(step)["w"], np.full((4, 2), step))
  for step in {0, 1, 2, 3} - set(known):
    with pytest.raises(KeyError):
      policies.of(step)
  # Only those that sample lie where they sample: whole, on each device.
  with pytest.raises(KeyError):
    policies.to_sample(0)
  assert policies.to_sample(3)["fixed"] is policies.to_sample(2)["fixed"]
  moved = policies.to_sample(3)["w"]
  assert moved.devices() == set(SAMPLE.devices.flat)
  assert moved.is_fully_replicated
  assert np.array_equal(moved, np.full((4, 2), 3))


def test_a_divided_policy_comes_part_by_part():
  """Hazard: a device that trains, or one that samples, for which the whole is too large."""
  mesh = make_mesh(Topology.of(data=2, fsdp=2, tensor=2), jax.devices()[:8])
  w = np.arange(32, dtype=np.float32).reshape(8, 4)
  given = jax.device_put(
    {"w": w, "fixed": np.ones(3, np.float32)}, NamedSharding(TRAIN, PartitionSpec())
  )
  given["w"] = jax.device_put(w, NamedSharding(TRAIN, PartitionSpec(None, "fsdp")))
  move = Mover(TRAIN, placed(mesh, given, w=PartitionSpec("tensor", "fsdp")))
  moved = move(given)
  assert move.num_parts == 4
  for number in range(4):
    assert {x.nbytes for x in jax.tree.leaves(move.program(given, number))} == {w.nbytes // 4, 12}
  for x, expected in ((moved["w"], w), (moved["fixed"], np.ones(3))):
    assert x.sharding.mesh == mesh
    assert np.array_equal(x, expected)
  assert {shard.data.shape for shard in moved["w"].addressable_shards} == {(4, 2)}
  # Only some of the parameters, as those that train.
  assert np.array_equal(move({"w": given["w"]})["w"], w)


def test_what_was_put_back_stays_when_it_is_published_again():
  """As a run does that is resumed where a batch begins."""
  policies = Policies(MODEL, 2, move=MOVE)
  policies.put_back([1, 2], [{"w": parameters(step)["w"]} for step in (1, 2)])
  policies.publish(2, parameters(2))
  for step in (1, 2):
    assert np.array_equal(policies.of(step)["w"], np.full((4, 2), step))
    assert np.array_equal(policies.to_sample(step)["w"], np.full((4, 2), step))


def test_devices_that_train_keep_none_for_others():
  policies = Policies(MODEL, 1, move=MOVE, is_asked_for=False)
  policies.publish(0, parameters(1))
  assert np.array_equal(policies.to_sample(0)["w"], np.ones((4, 2)))
  with pytest.raises(KeyError):
    policies.of(0)


def test_a_copy_is_under_way_while_training_and_sampling_go_on():
  """One device each: XLA's simulated ones run one program over several of them at a time."""
  train, sample = (
    make_mesh(Topology.of(), jax.devices()[number : number + 1]) for number in (0, 1)
  )

  @jax.jit
  def training(x: jax.Array, times: int) -> jax.Array:
    # Products: what is quick runs while it is dispatched.
    return jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)

  given, other = (
    jax.device_put(np.eye(256, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    for mesh in (train, sample)
  )
  move, sampling = Mover(train, placed(sample, {"w": given})), jax.jit(lambda x: x.sum())
  for times in (1, 600):  # First all is compiled.
    trained = training(given, times)
    moved = move({"w": trained})["w"]
    assert float(sampling(other)) == 256
    were_ready = trained.is_ready(), moved.is_ready()
    assert np.array_equal(moved, trained)
  assert were_ready == (False, False)
