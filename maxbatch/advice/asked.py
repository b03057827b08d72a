"""The question: a model, tokens, slices, and what matters to who asks; what the advice does not answer."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from maxbatch.advice.prices import Price
from maxbatch.batch.from_config import given_sizes, is_rl
from maxbatch.batch_rules.findings import Setting
from maxbatch.batch_rules.published import expected_loss
from maxbatch.batch_rules.rule import Training
from maxbatch.config.keys.model import idle_parameters
from maxbatch.config.schema import Config
from maxbatch.core.solve import divisors
from maxbatch.core.topology import AXES, Topology
from maxbatch.errors import UserError
from maxbatch.estimate.chips import ALL_CHIPS, Chip, on_network
from maxbatch.estimate.pipeline_roofline import Stages
from maxbatch.estimate.step_work import StepWork, step_work
from maxbatch.hardware.topologies import FAMILIES, slice_named
from maxbatch.pipeline_parallel.layout import (
  allowed_repeats,
  forwarding_delay,
  smallest_microbatch,
  with_least_bubble,
)
from maxbatch.pipeline_parallel.schedule import schedule_named

_ALIASES = {"v5litepod": "v5e"}
_CHOSEN = {
  "micro_batch_size": "micro_batch_size",
  "per_device_batch_size": "per_device_batch_size",
  "gradient_accumulation_steps": "gradient_accumulation_steps",
  "batch_schedule": "the ramp",
  "batch_schedule_type": "the ramp",
  "enable_rampup_batch_size": "the ramp",
}
"""Keys whose values are what is asked for."""
MESH_KEYS = tuple(f"{kind}_{axis.key}_parallelism" for kind in ("ici", "dcn") for axis in AXES)
"""Keys of the mesh."""


@dataclasses.dataclass(frozen=True)
class Place:
  """One or several equal slices."""

  generation: str
  chips_per_slice: int
  slices: int = 1
  network_gbps: float = 0
  """Of a device, between hosts or slices; 0: as published."""

  @property
  def name(self) -> str:
    """The name that compile_topology takes."""
    return f"{self.generation}-{self.chips_per_slice * self._family.named_units_per_chip}"

  def __str__(self) -> str:
    return self.name if self.slices == 1 else f"{self.slices} × {self.name}"

  @property
  def chip(self) -> Chip:
    """One device."""
    return on_network(ALL_CHIPS[self.generation], self.network_gbps)

  @property
  def unit(self) -> str:
    """What is counted and paid for: chip, or GPU."""
    return "GPU" if self.chip.is_gpu else "chip"

  @property
  def chips(self) -> int:
    """Chips of all slices: what is paid for."""
    return self.chips_per_slice * self.slices

  @property
  def devices_per_slice(self) -> int:
    """Devices of a slice, as jax counts them."""
    return self.chips_per_slice * self._family.devices_per_chip

  @property
  def _family(self):
    return FAMILIES[self.generation]

  @property
  def keys(self) -> dict[str, object]:
    """The configuration's keys that name it."""
    several = {"compile_topology_num_slices": self.slices} if self.slices > 1 else {}
    result = {"compile_topology": self.name, **several}
    is_on_network = self.slices > 1 or self.chips_per_slice > self.chip.domain > 0
    if self.network_gbps and is_on_network:
      result["compile_topology_network_gbps"] = self.network_gbps
    return result

  def half(self) -> "Place | None":
    """Returns a place with half the chips; None where there is no such slice."""
    if self.slices % 2 == 0:
      return dataclasses.replace(self, slices=self.slices // 2)
    half, odd = divmod(self.chips_per_slice, 2)
    is_slice = self.slices == 1 and not odd and half in self._family.chips
    return dataclasses.replace(self, chips_per_slice=half) if is_slice else None

  def double(self) -> "Place | None":
    """Returns a place with twice the chips: a slice of them, or twice as many slices; None where there are
    no such GPUs."""
    twice = 2 * self.chips_per_slice
    if self.slices == 1 and twice in self._family.chips:
      return dataclasses.replace(self, chips_per_slice=twice)
    if self.chip.is_gpu:
      return None
    return dataclasses.replace(self, slices=2 * self.slices)


def place_named(name: str, num_slices: int, network_gbps: float = 0) -> Place | None:
  """Returns the slices that the configuration names; None if it names none.

  Raises:
    UserError: there is no such slice.
  """
  if not name:
    return None
  slice_named(name, num_slices, network_gbps)  # Refuses what is no slice.
  generation, _, size = name.partition("-")
  generation = _ALIASES.get(generation, generation)
  chips = int(size) // FAMILIES[generation].named_units_per_chip
  return Place(generation, chips, num_slices, network_gbps)


@dataclasses.dataclass(frozen=True)
class Wishes:
  """What the keys of the command say beside the configuration; 0 and empty: not given."""

  data_overhead: float = 0.2
  """x: data may be (1 + x) times what a small batch would take to the same loss."""
  deadline_days: float = 0
  price_per_chip_hour: float = 0
  """On the place that is asked about, instead of the table's."""
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
  elsewhere: Sequence[Place]
  """Where else it could run."""
  mesh: Topology
  """The configuration's own, which divides the batch where no place is given."""
  given: frozenset[str]
  """Keys that were set by hand."""
  prices: Mapping[str, Price]
  """By generation."""
  stages: Stages | None
  """Of a pipeline on the place, and on the others; None: there is none, or no place."""

  def price(self, place: Place) -> Price:
    """Returns what a chip of the place costs for an hour, and where that is from; 0: not known."""
    own, known = self.wishes.price_per_chip_hour, self.prices.get(place.generation, Price(0.0))
    if own and self.place and place.generation == self.place.generation:
      return dataclasses.replace(known, price=own, date="", source="")
    return known

  @property
  def batch_unit(self) -> int:
    """Samples that divide the batch where no place is given."""
    pipeline = self.config.pipeline
    if pipeline.pipeline_schedule == "none":
      return self.mesh.num_batch_groups
    return smallest_microbatch(self.mesh, forwarding_delay(pipeline))

  @property
  def own_batch(self) -> Fraction | None:
    """Samples of a step that were asked for by hand; None: the rules say how many."""
    given = given_sizes(self.config.batch).batch
    return given.size if given else None

  @property
  def setting(self) -> Setting:
    """What decides which findings are about the run."""
    optimizer = self.config.optimizer
    experts = self.config.model.num_experts > 1
    return Setting(optimizer.opt_type, optimizer.lr_schedule_type, experts)

  @property
  def tokens(self) -> float:
    """Tokens that the run may train on."""
    return self.training.tokens

  @property
  def length(self) -> int:
    """Tokens of a sample."""
    return self.config.batch.max_target_length


def ask(
  config: Config,
  wishes: Wishes,
  places: Sequence[Place],
  mesh: Topology,
  given: frozenset[str],
  prices: Mapping[str, Price],
) -> Asked:
  """Makes the question of a configuration; see `Asked`.

  Args:
    places: the one that is asked about, then others.

  Raises:
    UserError: how much is trained on is not said.
  """
  work, run = step_work(config), config.run
  idle = work.model.base_num_decoder_layers * idle_parameters(work.model)
  tokens, parameters = float(run.total_tokens), float(work.parameters - idle)
  if tokens == -1:
    if run.total_samples == -1:
      raise UserError(
        "the amount of training data is not given; set total_tokens (or total_samples), for "
        "example total_tokens=140e9"
      )
    tokens = float(int(run.total_samples) * config.batch.max_target_length)
  training = Training(
    parameters=parameters,
    tokens=tokens,
    flops_per_token=work.model_flops_per_token - 6.0 * work.table_parameters,
    loss=wishes.final_loss or expected_loss(parameters, tokens),
  )
  place = places[0] if places else None
  stages = stages_of(config) if place else None
  return Asked(config, work, training, wishes, place, places[1:], mesh, given, prices, stages)


def stages_of(config: Config) -> Stages | None:
  """Returns the stages that are asked for; None: there is no pipeline.

  Raises:
    UserError: it is not said how many, or layers do not divide.
  """
  keys, mesh = config.pipeline, config.mesh
  in_slice, slices = mesh.ici_pipeline_parallelism, mesh.dcn_pipeline_parallelism
  if keys.pipeline_schedule == "none":
    return None
  if -1 in (in_slice, slices) or in_slice * slices == 1:
    raise UserError(
      f"pipeline_schedule={keys.pipeline_schedule} with ici_pipeline_parallelism={in_slice} and "
      f"dcn_pipeline_parallelism={slices}: on a slice the advice chooses the other axes of the mesh, and must know "
      "the stages; for example ici_pipeline_parallelism=4, or pipeline_schedule=none"
    )
  stages = Topology({"stage": in_slice}, {"stage": slices})
  schedule = with_least_bubble(config, stages).pipeline.pipeline_schedule
  allowed = allowed_repeats(config, stages)
  if not schedule_named(schedule).allows_repeats:
    allowed = tuple(repeats for repeats in allowed if repeats == 1)
  if not allowed:
    layers = config.model.base_num_decoder_layers - config.model.first_num_dense_layers
    near = min(divisors(layers)[1:], key=lambda n: abs(n - in_slice * slices), default=layers)
    raise UserError(
      f"pipeline_schedule={keys.pipeline_schedule} ici_pipeline_parallelism={in_slice} dcn_pipeline_parallelism="
      f"{slices} num_pipeline_repeats={keys.num_pipeline_repeats} num_layers_per_pipeline_stage="
      f"{keys.num_layers_per_pipeline_stage} do not divide {layers} layers; for example ici_pipeline_parallelism={near} "
      "dcn_pipeline_parallelism=1 num_pipeline_repeats=-1 num_layers_per_pipeline_stage=-1"
    )
  return Stages(
    schedule=schedule,
    in_slice=in_slice,
    slices=slices,
    repeats=allowed[0],
    forwarding_delay=forwarding_delay(keys),
    stash=keys.pipeline_saved_activations,
    num_first_layers=config.model.first_num_dense_layers,
    streamed=config.batch.accumulation == "streamed" or is_rl(config.rl),
  )


def check_scope(config: Config, named: Iterable[str]) -> None:
  """Refuses what the rules and the estimate know nothing of, and keys that are the answer.

  Args:
    named: keys on the command line.

  Raises:
    UserError: with what to leave out.
  """
  for key in named:
    if key in _CHOSEN:
      raise UserError(
        f"{key}: {_CHOSEN[key]} is what the advice chooses; leave it out, and set it after "
        "config=advice.yml"
      )
  run = config.run
  if -1 not in (run.total_tokens, run.total_samples):
    raise UserError(
      f"total_tokens={run.total_tokens} total_samples={run.total_samples}: only one can be set; for "
      "example total_samples=-1"
    )
  if "steps" in named and run.steps != -1 and (run.total_tokens, run.total_samples) != (-1, -1):
    raise UserError(
      f"steps={run.steps}: the steps follow from the batch that is advised; leave it out, or "
      "steps=-1"
    )
  if config.model.lora_rank or config.optimizer.trainable:
    raise UserError(
      "lora_rank and trainable: the rules were fitted to training all parameters from scratch, "
      "and do not cover adapters; for example lora_rank=0 trainable=[]"
    )
