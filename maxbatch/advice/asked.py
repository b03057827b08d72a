"""The question: a model, tokens, a slice, and what matters to who asks."""

import dataclasses
from fractions import Fraction

from maxbatch.advice.place import Place
from maxbatch.batch.arithmetic import tokens_of
from maxbatch.batch.solve import given_sizes
from maxbatch.batch.topology import Topology
from maxbatch.batch_rules.chinchilla import expected_loss
from maxbatch.batch_rules.rule import Training
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.estimate.step_work import StepWork, step_work


@dataclasses.dataclass(frozen=True)
class Wishes:
  """What the keys of the command say beside the configuration; 0 and empty: not given."""

  data_overhead: float = 0.2
  """x: data may be (1 + x) times what a small batch would take to the same loss."""
  deadline_days: float = 0
  price_per_chip_hour: float = 0
  final_loss: float = 0
  """Nats per token at the end, where it is known from other runs."""
  rate_found_at: int = 0
  """Tokens of a step for which the learning rate was found."""
  ramp: bool = True


@dataclasses.dataclass(frozen=True)
class Asked:
  """A question about training."""

  config: Config
  work: StepWork
  training: Training
  wishes: Wishes
  place: Place | None
  """Where it is to run; None: not said."""
  mesh: Topology
  """The configuration's own, which divides the batch where no place is given."""
  given: frozenset[str]
  """Keys that were set by hand."""

  @property
  def own_batch(self) -> Fraction | None:
    """Samples of a step that were asked for by hand; None: the rules say how many."""
    given = given_sizes(self.config.batch).batch
    return given.size if given else None

  @property
  def tokens(self) -> float:
    """That the run may train on."""
    return self.training.tokens

  @property
  def length(self) -> int:
    """Tokens of a sample."""
    return self.config.batch.max_target_length


def training_of(config: Config, work: StepWork, final_loss: float) -> Training:
  """The model and its data, as the rules ask for them.

  Raises:
    UserError: how much is trained on is not said.
  """
  tokens = _tokens(config)
  parameters = float(work.parameters)
  head = 6.0 * work.table_parameters
  return Training(
    parameters=parameters,
    tokens=tokens,
    flops_per_token=work.model_flops_per_token - head,
    loss=final_loss or expected_loss(parameters, tokens),
  )


def _tokens(config: Config) -> float:
  run = config.run
  if run.total_tokens != -1:
    return float(run.total_tokens)
  if run.total_samples != -1:
    return float(tokens_of(int(run.total_samples), config.batch.max_target_length))
  raise UserError(
    "how much is trained on is not said; give total_tokens (or total_samples), for example "
    "total_tokens=140e9"
  )


def ask(
  config: Config, wishes: Wishes, place: Place | None, mesh: Topology, given: frozenset[str]
) -> Asked:
  """Makes the question of a configuration; see `Asked`.

  Raises:
    UserError: how much is trained on is not said.
  """
  work = step_work(config)
  training = training_of(config, work, wishes.final_loss)
  return Asked(config, work, training, wishes, place, mesh, given)
