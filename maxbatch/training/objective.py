"""What a step minimizes: a loss as sums over a microbatch, whatever that consists of.

B rows of a microbatch, F devices along fsdp.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters
from maxbatch.training.loss import LossSums, loss_parts
from maxbatch.training.metrics import Metrics


class MicrobatchLoss(NamedTuple):
  """What a microbatch adds to the sums of its step."""

  sums: LossSums
  """Entries along the first dim are to be added up."""
  weight_B: jax.Array
  """float32: what the step's sum of losses is divided by, in as many parts as one likes."""
  largest: dict[str, jax.Array] | None = None
  """float32 scalars of which a step reports the largest, by the names of `Metrics.largest`."""


class Loss(Protocol):
  """The loss of a microbatch; hashable, since a step is compiled for it."""

  @property
  def halves(self) -> bool:
    """Whether a streamed microbatch is fed as two halves, for what the noise scale is estimated from."""
    ...

  def fed(self, rows: Rows) -> Any:
    """The shapes of what the step is fed, of those of its rows."""
    ...

  def rows(self, microbatch: Any) -> Rows:
    """The rows of what the step is fed."""
    ...

  def metrics(self, chosen: Metrics) -> Metrics:
    """What a step reports, of the metrics that the run lists."""
    ...

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Any,
    dropout_key: jax.Array,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> MicrobatchLoss:
    """The sums of a microbatch; `sums.loss` is differentiated by parameters and probes.

    With a `scale`, a float32 scalar, its gradients are so many times as large, and the sums as they
    are without (precision/loss_scale.py).
    """
    ...


@runtime_checkable
class SkippingLoss(Protocol):
  """A loss that knows of microbatches on which the model need not be run."""

  def has_gradient(self, fed: Any) -> jax.Array | None:
    """Of microbatches (k, …), whether each has any but 0: bool[k]; None: the model is run on all."""
    ...

  def without_gradient(self, microbatch: Any) -> MicrobatchLoss:
    """The sums of a microbatch that has none, on which the model is not run."""
    ...


@dataclasses.dataclass(frozen=True)
class TextLoss:
  """Cross entropy, weighted by token: what is fed are rows alone."""

  halves = False

  def fed(self, rows: Rows) -> Rows:
    """See `Loss.fed`."""
    return rows

  def rows(self, microbatch: Rows) -> Rows:
    """See `Loss.rows`."""
    return microbatch

  def metrics(self, chosen: Metrics) -> Metrics:
    """See `Loss.metrics`."""
    return chosen

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Rows,
    dropout_key: jax.Array,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> MicrobatchLoss:
    """See `Loss`."""
    sums = loss_parts(model, parameters, microbatch, dropout_key, probes, metrics, scale)
    return MicrobatchLoss(sums, microbatch.weights.sum(1))


TEXT = TextLoss()
