"""What the forward pass of a layer keeps for the backward pass, on the device or on its host.

remat_policy has MaxText's names, and so have the tensors that a layer names for it; what is not kept is
computed again. Every named product is kept as what follows needs it: queries and keys rotated.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax._src.ad_checkpoint import name_p
from jax.ad_checkpoint import checkpoint_name

from maxbatch.config.schema import ModelConfig
from maxbatch.core.topology import WEIGHT_AXES
from maxbatch.errors import UserError

_QKV = ("query_proj", "key_proj", "value_proj")
_ATTENTION = (*_QKV, "out_proj")
_GATED, _PLAIN = ("mlpwi_0", "mlpwi_1"), ("mlpwi",)
_PRODUCTS = (*_ATTENTION, *_GATED, *_PLAIN, "mlpwo")

NAMED = (
  "decoder_layer_input",
  *_QKV,
  "context",
  "attention_out",
  "out_proj",
  *_PLAIN,
  *_GATED,
  "mlpwo",
)
"""The tensors of a layer, each a configuration key too, for remat_policy=custom."""

_CUDNN_FORWARD = "dot_product_attention_fwd"
_JOINED = "+"
_MOVES = ("sharding_constraint", "convert_element_type", "reshape", "name")


@dataclasses.dataclass(frozen=True)
class Kept:
  """Names of what is kept besides a layer's input, and where."""

  on_device: tuple[str, ...] = ()
  on_host: tuple[str, ...] = ()


POLICIES: Mapping[str, Kept] = {
  "minimal_with_context": Kept((*_PRODUCTS, "context")),
  "minimal": Kept(_PRODUCTS),
  "save_dot_with_context_except_mlp": Kept((*_ATTENTION, "context")),
  "save_dot_except_mlpwi": Kept((*_ATTENTION, "mlpwo")),
  "save_dot_except_mlp": Kept(_ATTENTION),
  "save_qkv_proj": Kept(_QKV),
  "save_out_proj": Kept(("out_proj",)),
  "minimal_offloaded": Kept(on_host=_PRODUCTS),
  "qkv_proj_offloaded": Kept(on_host=_QKV),
  "full": Kept(),
}
"""Those of which a name says all: neither none, which keeps everything, nor custom."""


Policy = Callable[..., Any]


def named(x: jax.Array, name: str) -> jax.Array:
  """Returns the same, as a tensor that a policy can keep."""
  return checkpoint_name(x, name)


def with_kept(config: ModelConfig, names: Sequence[str]) -> ModelConfig:
  """Returns the model keeping these of the NAMED tensors on the device, and each layer's input."""
  places = {name: "device" if name in names else "remat" for name in NAMED}
  places["decoder_layer_input"] = "device"
  return dataclasses.replace(config, remat_policy="custom", **places)  # pyright: ignore[reportArgumentType]


def with_step(config: ModelConfig, step: str) -> ModelConfig:
  """Returns the model with a step of the ladder, by keys that can be given by hand."""
  if step not in ("full", "none"):
    return with_kept(config, step.split(_JOINED))
  return dataclasses.replace(config, remat_policy=step)  # pyright: ignore[reportArgumentType]


def step_names(step: str) -> frozenset[str]:
  """Returns the tensors that a step of the ladder keeps by name: none of the two ends."""
  return frozenset(() if step in ("full", "none") else step.split(_JOINED))


def joined_step(names: Collection[str]) -> str:
  """Returns the step of the ladder that keeps these tensors, in the order of NAMED."""
  return _JOINED.join(name for name in NAMED if name in names)


def ladder(names: Sequence[str]) -> tuple[str, ...]:
  """Returns what may be kept, from least to most memory: full, the first tensor, two joined by +, …, none."""
  return ("full", *(joined_step(names[:count]) for count in range(1, len(names) + 1)), "none")


def all_steps() -> tuple[str, ...]:
  """Returns every step that a ladder of any order can have."""
  some = (itertools.combinations(NAMED[1:], count) for count in range(1, len(NAMED)))
  return ("full", "none", *(_JOINED.join(names) for names in itertools.chain(*some)))


def kept(config: ModelConfig) -> Kept | None:
  """Returns what a configuration keeps; None: everything. Until it is chosen, auto is full."""
  if config.remat_policy == "none":
    return None
  if config.remat_policy == "auto":
    return POLICIES["full"]
  if config.remat_policy != "custom":
    return POLICIES[config.remat_policy]
  asked = _asked(config)
  return Kept(
    # A layer's input is kept as what it is.
    tuple(name for name in NAMED[1:] if asked[name] == "device"),
    tuple(name for name, place in asked.items() if place == "offload"),
  )


def remat_policy(config: ModelConfig) -> Policy | None:
  """Returns what jax.checkpoint may keep; None: everything.

  Where devices divide the parameters even `none` keeps no gathered copies: those of all layers
  together would be the whole model on every device. In a pipeline, which may keep all this for many
  microbatches, it keeps no casts either.
  """
  result = kept(config)
  if result is None:
    sizes = jax.sharding.get_abstract_mesh().shape
    divided = any(sizes.get(axis, 1) > 1 for axis in (*WEIGHT_AXES, "stage"))
    return _all_but_moved if divided else None
  if not result.on_host:
    return _naming_kernels(jax.checkpoint_policies.save_only_these_names(*result.on_device))
  return _naming_kernels(
    jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=result.on_device,
      names_which_can_be_offloaded=result.on_host,
      offload_src="device",
      offload_dst="pinned_host",
    )
  )


def _naming_kernels(policy: Policy) -> Policy:
  """Returns a policy for which cuDNN's attention is named context, as splash attention names itself: its
  output with the sums that its backward kernel reads, without which it would run again."""

  def named_policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    if primitive.name.startswith(_CUDNN_FORWARD):
      return policy(name_p, *inputs, name="context")
    return policy(primitive, *inputs, **parameters)

  return named_policy


def _all_but_moved(primitive: Any, *_: Any, **parameters: Any) -> bool:
  """Keeps what was computed; what was only gathered, cast or reshaped is so again."""
  inside = parameters.get("call_jaxpr")  # of a function with a gradient of its own, as `gathered`
  names = [primitive.name] if inside is None else [each.primitive.name for each in inside.eqns]
  return any(name not in _MOVES for name in names)


def _asked(config: ModelConfig) -> dict[str, str]:
  """Returns the keys of the tensors, in the order of NAMED."""
  return {
    "decoder_layer_input": config.decoder_layer_input,
    "query_proj": config.query_proj,
    "key_proj": config.key_proj,
    "value_proj": config.value_proj,
    "context": config.context,
    "attention_out": config.attention_out,
    "out_proj": config.out_proj,
    "mlpwi": config.mlpwi,
    "mlpwi_0": config.mlpwi_0,
    "mlpwi_1": config.mlpwi_1,
    "mlpwo": config.mlpwo,
  }


def validate_remat(config: ModelConfig) -> None:
  """Checks what is kept.

  Raises:
    UserError: a layer's input is not, with remat_policy=custom.
  """
  if config.decoder_layer_input == "remat" and config.remat_policy == "custom":
    raise UserError(
      "decoder_layer_input=remat: a layer cannot recompute its own input; use device or offload"
    )


def offload_obstacle(config: ModelConfig, platform: str, *, is_pipeline: bool) -> str | None:
  """Returns why activations cannot be kept on the host, and what would work; None if they can or need not.

  A pipeline keeps a stage's activations itself.
  """
  result = kept(config) if config.remat_policy != "explore" else None
  if result is None or not result.on_host:
    return None
  which = f"remat_policy={config.remat_policy}"
  if config.remat_policy == "custom":
    which = f"{result.on_host[0]}=offload"
  if platform == "cpu":
    return (
      f"{which}: the devices are CPUs, whose memory is the host's already; there is nothing to move "
      "activations to, and remat_policy=full needs the least memory"
    )
  if is_pipeline:
    return (
      f"{which}: a pipeline keeps the activations of its stages itself, as pipeline_saved_activations says, and "
      "not on the host; use remat_policy=full, or pipeline_schedule=none"
    )
  return None
