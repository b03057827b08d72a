"""The precision policy: in which format a run keeps and computes what.

Every cast of a model or a step goes through it. Norms, softmax, the loss and all sums compute in
float32 whatever the policy is. Formats that no device has are emulated by rounding to them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxbatch.config.schema import Config, ModelConfig, PrecisionConfig
from maxbatch.errors import UserError
from maxbatch.precision.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, Format, compute_format


def rounded(x: jax.Array, to: Format) -> jax.Array:
  """Returns float32 numbers as the nearest of a narrower format, of two equally near the even one.

  Numbers beyond its range become infinite, as in IEEE 754, so that a run sees it. Those below its
  normal numbers become its subnormal ones, which jax.lax.reduce_precision alone would set to zero.
  """
  normal = jax.lax.reduce_precision(x, to.exponent_bits, to.mantissa_bits)
  # Both products are exact: by powers of two, of numbers that float32 holds with bits to spare.
  subnormal = jnp.round(x * (1 / to.smallest)) * to.smallest
  return jnp.where(jnp.abs(x) < to.smallest_normal, subnormal, normal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def emulated(x: jax.Array, to: Format) -> jax.Array:
  """Rounds as `rounded`, and the gradient likewise, as if arrays had the format's dtype."""
  return rounded(x, to)


emulated.defvjp(
  lambda x, to: (rounded(x, to), None),
  lambda to, _, gradient: (rounded(gradient, to),),
)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
  """Returns float32 as one of the two bfloat16 numbers around it, the nearer one more often.

  The probabilities are such that the result is x on average (Gupta et al. 2015; Zamirai et al. 2020
  for weights): small updates are not lost, but made now and then. What bfloat16 holds is unchanged.
  """
  draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  # Of the magnitude's bits the lower half is what is rounded; a carry is the larger neighbour.
  carried = (jax.lax.bitcast_convert_type(x, jnp.uint32) + draws) >> 16
  result = jax.lax.bitcast_convert_type(carried.astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), result, x.astype(jnp.bfloat16))


def stochastically_updated(parameters: Any, updates: Any, key: jax.Array) -> Any:
  """Returns parameters plus their float32 updates, those kept in bfloat16 stochastically rounded.

  The same key rounds the same way, however devices divide the arrays.
  """
  leaves, structure = jax.tree.flatten(parameters)
  keys = (jax.random.fold_in(key, index) for index in range(len(leaves)))

  def updated(p: jax.Array, u: jax.Array, key: jax.Array) -> jax.Array:
    total = p.astype(jnp.float32) + u
    return stochastically_rounded(total, key) if p.dtype == jnp.bfloat16 else total

  return structure.unflatten(map(updated, leaves, jax.tree.leaves(updates), keys))


@dataclasses.dataclass(frozen=True)
class Policy:
  """The formats of a run; float32 throughout unless others are named."""

  parameters: Format = FLOAT32
  """In which weights are stored and updated."""
  compute: Format = FLOAT32
  """Format of weights in use, activations, and the gradients that flow back through them."""
  output: Format = FLOAT32
  """Format of logits."""
  gradients: Format = FLOAT32
  """To which a microbatch's gradients are rounded before they are summed."""
  reduction: Format = FLOAT32
  """In which gradients are summed over microbatches and devices."""
  float8: bool = False
  """Whether projections multiply in float8, see models/float8.py."""
  int8: bool = False
  """Whether projections multiply in int8, see models/int8.py."""
  int8_weights: bool = False
  """Whether projections, of a model that samples, have weights in int8 instead."""
  weight_rounding: Literal["none", "stochastic", "nearest"] = "none"
  """How updated weights are rounded where their format is narrower than the update."""

  def cast(self, x: jax.Array) -> jax.Array:
    """Casts a weight or activation to the computation's format, and its gradient likewise."""
    x = x.astype(self.compute.carrier)
    return emulated(x, self.compute) if self.compute.is_emulated else x

  def rounded(self, x: jax.Array) -> jax.Array:
    """Rounds as `cast` does, for code that forms its gradients itself."""
    x = x.astype(self.compute.carrier)
    return rounded(x, self.compute) if self.compute.is_emulated else x

  def summand(self, gradient: jax.Array) -> jax.Array:
    """Returns what a microbatch's gradient adds to the sum."""
    if self.gradients != FLOAT32:
      gradient = gradient.astype(self.gradients.carrier)
      if self.gradients.is_emulated:
        gradient = rounded(gradient, self.gradients)
    return gradient.astype(self.reduction.carrier)

  @property
  def dtype(self) -> DTypeLike:
    """The dtype of the arrays that hold activations."""
    return self.compute.carrier

  def __str__(self) -> str:
    if self == PLAIN:
      return "float32"
    emulated = " (emulated: to study convergence, not speed)" if self.compute.is_emulated else ""
    parts = [f"computes in {self.compute.name}{emulated}", f"weights in {self.parameters.name}"]
    if self.weight_rounding != "none":
      parts.append(f"rounded {_ROUNDED[self.weight_rounding]}")
    if self.float8 or self.int8:
      parts.append(f"projections in {'float8' if self.float8 else 'int8'}")
    if self.gradients != FLOAT32:
      parts.append(f"gradients in {self.gradients.name}")
    return ", ".join(parts)


PLAIN = Policy()
_ROUNDED = {"stochastic": "stochastically", "nearest": "to the nearest"}


Path = tuple[str, ...]


def cast_as_read(
  function: Callable[[Any], Any], like: Mapping[Path, Any], arrays: Mapping[Path, jax.Array]
) -> dict[Path, jax.Array]:
  """Returns arrays as a function computes with them: those that it only ever casts to one narrower format
  are cast here, once, to the same values.

  Args:
    function: of a dict of arrays or shapes as in `like`, with the keys of `arrays`.
  """
  traced = jax.make_jaxpr(function)(dict(like)).jaxpr
  each = zip(sorted(like), traced.invars, strict=True)
  read = {path: _formats_read(traced, variable) for path, variable in each}

  def cast(array: jax.Array, formats: set[np.dtype | None]) -> jax.Array:
    to = next(iter(formats)) if len(formats) == 1 else None
    return array.astype(to) if to and to.itemsize < array.dtype.itemsize else array

  return {path: cast(array, read[path]) for path, array in arrays.items()}


def _formats_read(jaxpr: Any, variable: Any) -> set[np.dtype | None]:
  """Returns the formats to which an array is cast where it is read; None: it is read as it is."""
  formats: set[np.dtype | None] = {None for output in jaxpr.outvars if output is variable}
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    for at in [at for at, read in enumerate(equation.invars) if read is variable]:
      if name == "convert_element_type":
        formats.add(np.dtype(equation.params["new_dtype"]))
      elif name in _PARTS:
        formats = formats.union(*(_formats_read(jaxpr, part) for part in equation.outvars))
      elif name in _CALLS:
        inner = equation.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        formats |= _formats_read(inner, inner.invars[at])
      else:
        formats.add(None)
  return formats


_PARTS = ("split", "squeeze")
_CALLS = ("jit", "checkpoint", "remat2")
"""Names, in versions of jax, of what calls a jaxpr with its own operands."""


def policy_of(config: PrecisionConfig) -> Policy:
  """Returns the policy that the keys describe."""
  return Policy(
    parameters=FORMATS[config.weight_dtype],
    compute=compute_format(config),
    gradients=FORMATS[config.grad_dtype],
    float8=config.quantization == "fp8",
    int8=config.quantization == "int8",
    weight_rounding=config.weight_rounding,
  )


def sampling_policy_of(config: PrecisionConfig) -> Policy:
  """Returns the policy of a model that only samples: with quantization=int8 its weights are in int8."""
  policy = policy_of(config)
  return dataclasses.replace(policy, int8=False, int8_weights=policy.int8)


def check_range(model: ModelConfig, policy: Policy) -> None:
  """Refuses a model whose activations exceed what the format of the computation can hold.

  Raises:
    UserError: with formats that can.
  """
  if policy.compute == FLOAT16 and model.scale_embedding:
    raise UserError(
      f"dtype=float16 scale_embedding=true: embeddings times the root of base_emb_dim, as Gemma has "
      f"them, make a residual stream beyond float16's {FLOAT16.largest:,.0f}, which no loss scale "
      "prevents; for example precision=bfloat16"
    )


def check_quantization(config: Config, policy: Policy) -> None:
  """Refuses products in float8 beside what they have not been built for.

  Raises:
    UserError: naming the key, and a value that works.
  """
  if not policy.float8:
    return
  lora, trainable = config.model.lora_rank, list(config.optimizer.trainable)
  schedule, over_data = (
    config.pipeline.pipeline_schedule,
    config.optimizer.shard_optimizer_over_data,
  )
  noise, every = config.noise, config.noise.gns_calibrate_every
  refused = (
    (policy.compute not in (FLOAT32, BFLOAT16), f"dtype={policy.compute.name}", "dtype=bfloat16"),
    (schedule != "none", f"pipeline_schedule={schedule}", "pipeline_schedule=none"),
    (lora > 0, f"lora_rank={lora}", "lora_rank=0"),
    (bool(trainable), f"trainable={trainable}", "trainable=[]"),
    (noise.gns == "all", "gns=all", "gns_from_microbatches=true gns=off"),
    (noise.gns == "norm" and every > 0, f"gns_calibrate_every={every}", "gns_calibrate_every=0"),
    (config.precision.precision_report, "precision_report=true", "precision_report=false"),
    (over_data, "shard_optimizer_over_data=true", "shard_optimizer_over_data=false"),
  )
  for is_given, given, instead in refused:
    if is_given:
      raise UserError(
        f"quantization=fp8 {given}: products in float8 do not go with it; for example {instead}, or "
        "quantization=none"
      )
