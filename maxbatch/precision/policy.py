"""The precision policy: in which format a run keeps and computes what.

Every cast of a model or a step goes through it. Norms, softmax, the loss and all sums compute in
float32 whatever the policy is.
"""

import dataclasses
from typing import Literal

import jax
from jax.typing import DTypeLike

from maxbatch.config.schema import ModelConfig, PrecisionConfig
from maxbatch.errors import UserError
from maxbatch.precision.formats import FLOAT16, FLOAT32, FORMATS, Format, compute_format
from maxbatch.precision.rounding import emulated, rounded


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
  weight_rounding: Literal["none", "stochastic", "nearest"] = "none"
  """How updated weights are rounded where their format is narrower than the update."""

  def cast(self, x: jax.Array) -> jax.Array:
    """Casts a weight or an activation to the format of the computation, and its gradient
    likewise."""
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
    if self.gradients != FLOAT32:
      parts.append(f"gradients in {self.gradients.name}")
    return ", ".join(parts)


PLAIN = Policy()
_ROUNDED = {"stochastic": "stochastically", "nearest": "to the nearest"}


def policy_of(config: PrecisionConfig) -> Policy:
  """Returns the policy that the keys describe.

  Raises:
    UserError: keys that contradict each other.
  """
  parameters = FORMATS[config.weight_dtype]
  if parameters == FLOAT32 and config.weight_rounding != "none":
    raise UserError(
      f"weight_rounding={config.weight_rounding} has no effect with weight_dtype=float32, which keeps "
      "updates as they are; for example weight_rounding=none"
    )
  return Policy(
    parameters=parameters,
    compute=compute_format(config),
    gradients=FORMATS[config.grad_dtype],
    weight_rounding=config.weight_rounding,
  )


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
