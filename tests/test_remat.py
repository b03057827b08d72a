"""remat_policy: what each keeps, that none changes a gradient, and what is refused."""

import collections
import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import print_saved_residuals
from support import config
from tiny_model import GPT2_LIKE, loud_parameters, random_rows, tiny_config, tiny_model

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.config.load import load_config, without_effect
from maxbatch.errors import UserError
from maxbatch.hardware.devices import topology_devices
from maxbatch.models.registry import Parameters
from maxbatch.models.remat import NAMED, POLICIES, kept, offload_obstacle, remat_policy
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.build import build_trainer, step_rows, traced_step
from maxbatch.training.loss import loss_sum
from maxbatch.training.model_parts import split_layers, to_stage_order
from maxbatch.training.state import is_on_host
from maxbatch.tuning.candidates import candidates
from maxbatch.tuning.exploration import with_variants

QKV = {"query_proj", "key_proj", "value_proj"}
GATED = {"mlpwi_0", "mlpwi_1"}
CUSTOM = ("remat_policy=custom", "context=device", "mlpwi_1=device")
# What the last product gives is only added to the stream: nothing of the backward pass needs it.
KEPT = {
  ("remat_policy=full",): set(),
  ("remat_policy=save_out_proj",): {"out_proj"},
  ("remat_policy=save_qkv_proj",): QKV,
  ("remat_policy=save_dot_except_mlp",): QKV | {"out_proj"},
  ("remat_policy=save_dot_except_mlpwi",): QKV | {"out_proj"},
  ("remat_policy=save_dot_with_context_except_mlp",): QKV | {"out_proj", "context"},
  ("remat_policy=minimal",): QKV | GATED | {"out_proj"},
  ("remat_policy=minimal_with_context",): QKV | GATED | {"out_proj", "context"},
  CUSTOM: {"context", "mlpwi_1"},
  (*CUSTOM[:1], "attention_out=device"): {"attention_out"},
}


@pytest.mark.parametrize(
  ("keys", "runs"), [(CUSTOM, 1), (("remat_policy=full",), 2), (("remat_policy=minimal",), 2)]
)
def test_cudnn_s_attention_is_kept_with_what_its_backward_kernel_reads(keys, runs, monkeypatch):
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
  policy = remat_policy(tiny_config(*keys))
  q_BTNH = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

  @functools.partial(jax.checkpoint, policy=policy)
  def attend(x_BTNH: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(
      x_BTNH, x_BTNH, x_BTNH, is_causal=True, implementation="cudnn"
    )

  traced = jax.make_jaxpr(jax.grad(lambda x_BTNH: attend(x_BTNH).sum(dtype=jnp.float32)))(q_BTNH)
  assert str(traced).count("dot_product_attention_fwd_wrapper[") == runs


def loss(keys: tuple[str, ...], parameters: Parameters) -> jax.Array:
  return loss_sum(tiny_model(*keys), parameters, random_rows(2), None)


@pytest.mark.parametrize("keys", KEPT, ids=lambda keys: keys[0].split("=")[1])
def test_what_is_kept(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
  shapes = tiny_model().shapes()
  print_saved_residuals(functools.partial(loss, (*keys, "scan_layers=false")), shapes)
  result = re.findall(r"^\S+ named '(\w+)'", capsys.readouterr().out, re.M)
  layers = tiny_config().base_num_decoder_layers
  # The first layer's input is the embedding's output, whatever its name.
  counts = {name: result.count(name) for name in set(result)}
  assert set(counts) == KEPT[keys]
  assert all(count == layers for name, count in counts.items() if name != "decoder_layer_input")


def test_no_policy_changes_a_gradient():
  """Some that together keep every tensor, in one program; test_model.py has minimal and full."""
  chosen = [CUSTOM, ("remat_policy=save_dot_except_mlpwi",), (*CUSTOM[:1], "attention_out=device")]
  parameters = loud_parameters(tiny_model())

  @jax.jit
  def gradients(parameters: Parameters) -> list[Parameters]:
    return [jax.grad(functools.partial(loss, keys))(parameters) for keys in [(), *chosen]]

  plain, *others = gradients(parameters)
  for keys, result in zip(chosen, others, strict=True):
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), result, plain)
    assert max(jax.tree.leaves(errors)) <= 1e-5, keys


@pytest.mark.parametrize(
  "keys", [("remat_policy=minimal_offloaded",), (*CUSTOM, "mlpwi_0=offload")]
)
def test_what_is_offloaded_goes_to_the_host_and_back(keys: tuple[str, ...]):
  policy = kept(tiny_config(*keys))
  assert policy is not None
  gradient = jax.grad(functools.partial(loss, keys))
  text = str(jax.make_jaxpr(gradient)(tiny_model().shapes()))
  moved = re.findall(r"devices=\(MemorySpace\.(\w+),\)", text)
  # Each once in the body of the forward's scan; what comes last is only added to the stream.
  needed = set(policy.on_host) & (QKV | GATED | {"out_proj"})
  assert moved.count("Host") >= len(needed)
  assert moved.count("Device") == len(needed)


def test_what_cannot_be_offloaded_is_refused():
  offloading = tiny_config("remat_policy=qkv_proj_offloaded")
  assert offload_obstacle(offloading, "tpu", is_pipeline=False) is None
  assert "pipeline_saved_activations" in str(offload_obstacle(offloading, "tpu", is_pipeline=True))
  for keys, words in (
    ({"remat_policy": "custom", "out_proj": "offload"}, "out_proj=offload: the devices are CPUs"),
    ({"optimizer_memory_host_offload": "true"}, "memory_host_offload=true: the devices are CPUs"),
  ):
    settings = config(**keys)
    plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 8))
    with pytest.raises(UserError, match=words):
      build_trainer(settings, plan, jax.devices())


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    (("out_proj=device",), "it has one with remat_policy=custom"),
    (("remat_policy=custom", "mlpwi=device"), "it has one with mlp_activation=gelu"),
    (
      ("remat_policy=custom", "mlpwi_0=device", *GPT2_LIKE),
      "it has one with mlp_activation=swiglu",
    ),
    (("remat_policy=custom", "decoder_layer_input=remat"), "use device or offload"),
  ],
)
def test_keys_without_effect_are_refused(keys: tuple[str, ...], words: str):
  with pytest.raises(UserError, match=words):
    _checked(*keys)


def _checked(*keys: str) -> None:
  without_effect(load_config(["config=base", *keys]))
  tiny_model(*keys)


def test_explore_tries_what_the_device_can_do():
  settings = config(remat_policy="explore", micro_batch_size="explore", batch_size=8)
  sizes = candidates(settings.batch, settings.run, topology(settings.mesh, 8))
  result = with_variants(sizes, settings, jax.devices()[0])
  tried = list(dict.fromkeys(one.remat_policy for one in result))
  assert tried == ["none", *(name for name in POLICIES if "offloaded" not in name)]
  assert set(NAMED) >= {name for each in POLICIES.values() for name in each.on_device}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler")
@pytest.mark.parametrize("stages", [1, 2])
def test_the_optimizers_state_is_kept_on_the_host(stages: int):
  """What mirrors a parameter; brought to the device for the update, and back. In a pipeline too."""
  keys = {"ici_data_parallelism": 4 // stages, "base_num_decoder_layers": 4}
  if stages > 1:
    keys |= {"pipeline_schedule": "interleaved_1f1b", "ici_pipeline_parallelism": stages}
    keys |= {"num_pipeline_microbatches": stages}
  settings = config(optimizer_memory_host_offload="true", batch_size=8, **keys)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 4))
  trainer = build_trainer(settings, plan, topology_devices("v5e-4"))
  state = trainer.abstract
  on_host = [leaf for leaf in jax.tree.leaves(state) if is_on_host(leaf)]
  assert len(on_host) == 2 * len(jax.tree.leaves(state.params))
  assert not any(map(is_on_host, jax.tree.leaves(state.params)))
  rows = step_rows(plan, trainer, placeholder_rows(settings), plan.micro_batch_to_train)
  text = traced_step(trainer, rows).lower().as_text()
  placed = collections.Counter(
    re.findall(r'annotate_device_placement.*?"(pinned_host|device)"', text)
  )
  assert min(placed["device"], placed["pinned_host"]) >= len(on_host)


def test_layers_on_the_host_change_places_and_stay_there():
  """With repeats a checkpoint has the layers in another order than the stages."""
  pipeline = Pipeline("interleaved_1f1b", 2, 2, 1, 2, 1, 1, 1, 1, (2,), 1)
  model = tiny_model("base_num_decoder_layers=4")
  (path, shape), *_ = split_layers(model, model.shapes())[0].items()
  values = np.arange(math.prod(shape.shape), dtype=np.float32).reshape(shape.shape)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  layers = unflatten_dict({path: jax.device_put(values, device)})
  (staged,) = jax.tree.leaves(to_stage_order(model, pipeline, layers))
  assert staged.sharding.memory_kind == "pinned_host"
  np.testing.assert_array_equal(staged, values[[0, 2, 1, 3]])
