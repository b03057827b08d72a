"""Devices over mesh axes: what is left over, what is refused, and that the offered way out works."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch.from_config import mesh_of as devices_of
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.limits import limits
from maxbatch.config.load import load_config
from maxbatch.config.schema import MeshConfig, context_strategy
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import AXES, AXIS_NAMES, Topology
from maxbatch.errors import UserError

_DEFAULT = load_config(["config=base"]).mesh
_KEYS = [f"{kind}_{axis.key}_parallelism" for kind, axis in itertools.product(("ici", "dcn"), AXES)]
_OPTIONAL = ("expert", "context")
_NOT_OPTIONAL = [key for key in _KEYS if key.split("_")[1] not in _OPTIONAL]
axis_sizes = st.sampled_from([-1, 1, 2, 3, 4, 6, 8])


def mesh_of(
  ici: tuple[int, ...] = (-1, 1, 1, 1), dcn: tuple[int, ...] = (1, 1, 1, 1)
) -> MeshConfig:
  return dataclasses.replace(_DEFAULT, **dict(zip(_NOT_OPTIONAL, ici + dcn, strict=True)))


def message(mesh: MeshConfig, num_devices: int, num_slices: int = 1) -> str:
  with pytest.raises(UserError) as caught:
    topology(mesh, num_devices, num_slices)
  return str(caught.value)


def test_minus_one_takes_whatever_is_left():
  assert topology(mesh_of(), 8) == Topology.of(data=8)
  assert topology(mesh_of((2, -1, 2, 1)), 16) == Topology.of(data=2, fsdp=4, tensor=2)
  assert topology(mesh_of((1, 2, 2, -1)), 4) == Topology.of(fsdp=2, tensor=2)


def test_products():
  layout = Topology({"data": 2, "fsdp": 3, "tensor": 4, "stage": 5}, {"data": 7, "stage": 2})
  assert layout.shape == {"data": 14, "fsdp": 3, "tensor": 4, "stage": 10}
  assert layout.num_devices == 14 * 3 * 4 * 10
  assert layout.num_slices == 14
  assert layout.num_batch_groups == 14 * 3
  assert str(layout) == "data 14 × fsdp 3 × tensor 4 × stage 10"


def test_topologies_are_equal_whatever_their_mappings_say_and_leave_out():
  written = {Topology({"fsdp": 4, "data": 2, "stage": 1}), Topology.of(data=2, fsdp=4)}
  assert written == {Topology({name: {"data": 2, "fsdp": 4}.get(name, 1) for name in AXIS_NAMES})}
  with pytest.raises(
    UserError, match="no mesh axis model; the axes are data, fsdp, expert, context, tensor, stage"
  ):
    Topology.of(model=2)


def test_slices_are_divided_by_the_dcn_axes():
  layout = topology(mesh_of((-1, 1, 2, 1), (-1, 1, 1, 2)), 32, num_slices=4)
  assert layout == Topology({"data": 4, "tensor": 2}, {"data": 2, "stage": 2})
  assert layout.shape == {"data": 8, "fsdp": 1, "tensor": 2, "stage": 2}


def test_a_product_that_is_not_the_number_of_devices():
  assert message(mesh_of((2, 1, 3, 1)), 8) == (
    "ici_data_parallelism=2, ici_fsdp_parallelism=1, ici_tensor_parallelism=3, "
    "ici_pipeline_parallelism=1: the product of the axes, 6, must equal the 8 devices of a slice; "
    "for example ici_data_parallelism=8 ici_fsdp_parallelism=1 ici_tensor_parallelism=1 "
    "ici_pipeline_parallelism=1"
  )


def test_what_is_left_must_be_whole():
  assert message(mesh_of((-1, 2, 3, 1)), 8) == (
    "ici_data_parallelism=-1, ici_fsdp_parallelism=2, ici_tensor_parallelism=3, "
    "ici_pipeline_parallelism=1: the product of the axes, 6, must divide the 8 devices of a slice; "
    "for example ici_data_parallelism=4 ici_fsdp_parallelism=2 ici_tensor_parallelism=1 "
    "ici_pipeline_parallelism=1"
  )


def test_only_one_axis_can_be_left_open():
  assert message(mesh_of((-1, -1, 4, 1)), 8) == (
    "ici_data_parallelism=-1, ici_fsdp_parallelism=-1, ici_tensor_parallelism=4, "
    "ici_pipeline_parallelism=1: only one axis can be -1 (the remaining devices), not 2; "
    "for example ici_data_parallelism=2 ici_fsdp_parallelism=1 ici_tensor_parallelism=4 "
    "ici_pipeline_parallelism=1"
  )


def test_slices_must_be_named_on_an_axis():
  text = message(mesh_of(), 8, num_slices=2)
  assert "dcn_data_parallelism=1" in text
  assert "the product of the axes, 1, must equal the 2 slices" in text
  assert "for example dcn_data_parallelism=2" in text


def test_slices_of_different_sizes_are_refused():
  assert message(mesh_of(), 7, num_slices=2) == (
    "7 devices in 2 slices: all slices must have the same number of devices; for example 6 devices"
  )


@given(
  st.tuples(*[axis_sizes] * 6), st.tuples(*[axis_sizes] * 6), st.integers(1, 24), st.integers(1, 6)
)
def test_a_layout_uses_every_device_or_the_offered_example_does(ici, dcn, per_slice, slices):
  sizes = dict(zip(_KEYS, ici + dcn, strict=True))
  for _ in range(3):  # Both ici and dcn may be wrong: one message each.
    mesh = dataclasses.replace(_DEFAULT, **sizes)
    try:
      layout = topology(mesh, per_slice * slices, slices)
    except UserError as error:
      example = re.findall(r"(\w+)=(\d+)", str(error).partition("for example ")[2])
      kind = example[0][0][:3]
      left_out = [axis for axis in _OPTIONAL if sizes[f"{kind}_{axis}_parallelism"] == 1]
      assert len(example) == len(AXES) - len(left_out)
      sizes |= {key: int(value) for key, value in example}
      continue
    assert layout.devices_per_slice == per_slice
    assert layout.num_slices == slices
    assert layout.num_devices == per_slice * slices
    result = (each.get(axis.name, 1) for each in (layout.ici, layout.dcn) for axis in AXES)
    assert all(sizes[key] in (-1, size) for key, size in zip(_KEYS, result, strict=True))
    return
  pytest.fail("the offered examples did not work")


def test_experts_are_divided_over_an_axis_that_is_there_only_with_devices():
  layout = topology(dataclasses.replace(_DEFAULT, ici_expert_parallelism=4), 8)
  assert layout.shape == {"data": 2, "fsdp": 1, "expert": 4, "tensor": 1, "stage": 1}
  assert str(layout) == "data 2 × fsdp 1 × expert 4 × tensor 1 × stage 1"
  assert (layout.num_batch_groups, layout.weight_groups) == (8, 4)
  between = Topology.of(fsdp=2, expert=2).weight_groups, Topology({}, {"expert": 2}).weight_groups
  assert between == (4, 2)
  assert "expert" not in topology(_DEFAULT, 8).shape


def test_experts_that_the_devices_do_not_divide_are_refused_with_keys_that_work():
  keys = ["config=base", "num_experts=6", "ici_expert_parallelism=4", "ici_data_parallelism=2"]
  config = load_config(keys)
  with pytest.raises(UserError) as caught:
    devices_of(config, 8)
  assert str(caught.value) == (
    "num_experts=6 must be a multiple of the devices over which whole experts are divided, "
    "ici_expert_parallelism=4 × dcn_expert_parallelism=1 = 4; for example ici_expert_parallelism=2 "
    "ici_data_parallelism=4"
  )
  offered = str(caught.value).partition("for example ")[2].split()
  assert devices_of(load_config([*keys, *offered]), 8).shape["expert"] == 2


# --- the tokens of a row --------------------------------------------------------------------------


def context_plan(*keys: str) -> BatchPlan:
  config = load_config(["config=base", "ici_context_parallelism=4", *keys])
  return plan_batches(config.batch, config.run, devices_of(config, 8))


def test_a_plan_says_who_shares_a_row_and_in_which_sizes():
  plan = context_plan("per_device_batch_size=1/2", "ici_tensor_parallelism=2")
  assert limits(plan)[1] == (
    "4 devices share each row along context, 32 of its 128 tokens each; per_device_batch_size is a multiple "
    "of 0.125"
  )


def test_devices_that_share_the_tokens_of_a_row_have_a_fraction_of_it():
  layout = context_plan("per_device_batch_size=1/4").topology
  assert str(layout) == "data 2 × fsdp 1 × context 4 × tensor 1 × stage 1"
  assert (layout.num_batch_groups, layout.weight_groups) == (2, 4)
  assert context_plan("per_device_batch_size=1/4").micro_batch_to_train == 2
  with pytest.raises(UserError) as caught:
    context_plan("per_device_batch_size=1/8")
  assert str(caught.value) == (
    "per_device_batch_size=0.125 on 8 devices is 1 samples, which must be a positive multiple of the 2 "
    "data-parallel groups (data 2 × fsdp 1; ici_context_parallelism=8, whose devices share rows, leaves 1); "
    "nearest: per_device_batch_size=0.25"
  )
  assert context_plan("per_device_batch_size=1/8", "ici_context_parallelism=8").num_microbatches


def test_the_devices_that_share_a_row_divide_its_tokens_evenly():
  keys = ["config=base", "ici_context_parallelism=4"]
  with pytest.raises(UserError) as caught:
    devices_of(load_config([*keys, "max_target_length=101"]), 8)
  assert str(caught.value) == (
    "max_target_length=101 must be a multiple of the 4 devices that share the tokens of a row "
    "(ici_context_parallelism=4 × dcn_context_parallelism=1); nearest: max_target_length=100 or 104"
  )
  devices_of(load_config([*keys, "max_target_length=100"]), 8)


def test_a_row_in_zigzag_order_is_divided_into_two_parts_for_each_device():
  keys = ["config=base", "ici_context_parallelism=4", "context_parallel_strategy=ring"]
  keys += ["max_target_length=100"]
  with pytest.raises(UserError) as caught:
    devices_of(load_config(keys), 8)
  assert str(caught.value) == (
    "max_target_length=100 must be a multiple of 2 (context_parallel_load_balance=true) × the 4 devices that "
    "share the tokens of a row (ici_context_parallelism=4 × dcn_context_parallelism=1); nearest: "
    "max_target_length=96 or 104, or context_parallel_load_balance=false"
  )
  devices_of(load_config([*keys, "context_parallel_load_balance=false"]), 8)
  devices_of(load_config([*keys, "context_parallel_strategy=ulysses"]), 8)


def test_heads_that_devices_cannot_divide_refuse_ulysses():
  keys = ["config=base", "ici_context_parallelism=8", "context_parallel_strategy=ulysses"]
  with pytest.raises(UserError) as caught:
    devices_of(load_config(keys), 8)
  assert str(caught.value) == (
    "context_parallel_strategy=ulysses: base_num_query_heads=4 must be a multiple of tensor 1 × the 8 "
    "devices that share the tokens of a row (ici_context_parallelism=8 × dcn_context_parallelism=1); use "
    "context_parallel_strategy=ring, all_gather or auto"
  )


@pytest.mark.parametrize(
  ("keys", "context", "expected"),
  [
    # Of 32 heads 8 have keys: (32 + 8) / 2 is more than these 8, (32 + 8) / 8 less.
    ({}, 2, "ring"),
    ({}, 8, "ulysses"),
    ({}, 64, "ring"),
    ({"attention": "flash"}, 2, "ulysses"),
    ({"attention": "flash"}, 64, "all_gather"),
    ({"context_parallel_strategy": "all_gather"}, 8, "all_gather"),
  ],
)
def test_auto_takes_the_strategy_that_sends_least(keys, context, expected):
  config = load_config(["config=base", "model_name=llama3.1-8b", "ici_context_parallelism=2"])
  assert context_strategy(dataclasses.replace(config.model, **keys), 1, context) == expected
