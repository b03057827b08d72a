"""RLPlan: every size of a run of reinforcement learning, derived exactly and printed line by line.

rl_sizes.py gives the sizes of one step, prompt_epochs.py which prompts it takes. A completion is a
sample: what trains on the completions reads its sizes from the BatchPlan in here, as any training does.
"""

import dataclasses
import math
from fractions import Fraction

from maxbatch.batch.from_config import plan_batches, rollout_topology
from maxbatch.batch.prompt_epochs import PromptEpochs, prompt_epochs
from maxbatch.batch.rl_sizes import RLTopology, given_completions, micro_batch_sizes, solve_rl
from maxbatch.batch.rollout_order import saved_policies
from maxbatch.config.schema import BatchConfig, Config, RunConfig
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import nearest_multiples
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class RLPlan:
  """The sizes of a run. A completion, with its prompt, is a sample."""

  batch_plan: BatchPlan
  """The plan of the completions, on the devices that train; its steps are those of the
  optimizer."""
  topology: RLTopology
  num_iterations: int
  """Steps of the optimizer on each batch of completions."""
  staleness: int
  """Batches by which the policy that samples lags behind the one that trains."""
  max_prompt_length: int
  epochs: PromptEpochs
  has_reference: bool = False
  """Whether the policy of before step 0 is needed in all steps."""

  @property
  def batch_size(self) -> int:
    """Prompts per step."""
    return self.epochs.batch_size

  @property
  def num_generations(self) -> int:
    """Completions of a prompt."""
    return self.topology.num_generations

  @property
  def completions_per_step(self) -> int:
    """Completions that are sampled for a batch, and trained on in each of its steps."""
    return self.batch_plan.global_batch_to_train

  @property
  def micro_batch(self) -> int:
    """Completions that are sampled at once, and trained on at once."""
    return self.batch_plan.micro_batch_to_train

  @property
  def num_microbatches(self) -> int:
    """Microbatches of a step."""
    return self.batch_plan.num_microbatches

  @property
  def prompts_per_microbatch(self) -> int:
    """Whole groups of a microbatch."""
    return self.micro_batch // self.num_generations

  @property
  def num_batches(self) -> int:
    """Batches of completions that are sampled in the run."""
    return self.batch_plan.steps // self.num_iterations

  @property
  def total_prompts(self) -> int:
    """Prompts of the stream that the run takes."""
    return self.num_batches * self.batch_size

  @property
  def total_completions(self) -> int:
    """Completions that the run samples."""
    return self.num_batches * self.completions_per_step

  @property
  def max_completion_length(self) -> int:
    """Tokens of the longest completion."""
    return self.batch_plan.max_target_length - self.max_prompt_length

  @property
  def rollout_tokens(self) -> int:
    """Tokens that are sampled at once at most: of the completions of a microbatch."""
    return self.micro_batch * self.max_completion_length

  @property
  def num_snapshots(self) -> int:
    """Policies that may sample, as far as the lag goes back."""
    return self.staleness + 1

  @property
  def num_policies_in_training(self) -> int:
    """Copies of the parameters on the devices that train: to sample, to compare with or to be saved."""
    has_snapshots = not self.topology.rollout_devices or self.num_saved_policies > 0
    return has_snapshots * self.num_snapshots + self.has_reference

  @property
  def waiting_microbatches(self) -> int:
    """Microbatches that may be sampled and wait to be trained on."""
    return self.num_snapshots * self.num_microbatches

  def batch_of_step(self, step: int) -> int:
    """Returns the batch of completions that `step` (0-based) of the optimizer trains on."""
    return step // self.num_iterations

  def first_prompt(self, batch: int) -> int:
    """Returns the place in the stream of the first prompt of a batch."""
    return batch * self.batch_size

  def begins_batch(self, step: int) -> bool:
    """Returns whether `step` is the first on its batch."""
    return step % self.num_iterations == 0

  @property
  def num_saved_policies(self) -> int:
    """Policies that a checkpoint has beside the parameters."""
    return len(self.saved_policies(0))

  def saved_policies(self, step: int) -> list[int]:
    """Returns the steps before which those policies stood that a checkpoint before `step` has, see
    rollout_order.py."""
    batch, again = self.batch_of_step(step), self.num_iterations > 1
    batches = saved_policies(batch, self.staleness, and_own=again)
    return [0] * self.has_reference + [self.first_step(each) for each in batches]

  def first_step(self, batch: int) -> int:
    """Returns the first step on a batch, from 0."""
    return batch * self.num_iterations

  def first_microbatch(self, batch: int) -> int:
    """Returns the number of a batch's first microbatch, counted through all batches."""
    return batch * self.num_microbatches

  def place_of_microbatch(self, number: int) -> tuple[int, int]:
    """Returns the batch of a microbatch numbered through all of them, and its number in it."""
    return divmod(number, self.num_microbatches)

  def first_completion(self, batch: int, microbatch: int) -> int:
    """Returns the place in the stream of the first completion of a batch's microbatch."""
    return batch * self.completions_per_step + microbatch * self.micro_batch

  def policy_of_batch(self, batch: int) -> int:
    """Returns the step before which the policy stood that samples a batch: by its lag, never before
    0."""
    return max(0, batch - self.staleness) * self.num_iterations

  def lag(self, batch: int) -> int:
    """Returns by how many batches the policy that samples a batch is behind the one that trains on
    it."""
    return min(batch, self.staleness)

  def dropped_prompts(self, batches: int) -> int:
    """Returns how many prompts are dropped at the ends of epochs in the first so many batches."""
    return self.epochs.dropped(self.first_prompt(batches))

  def as_dict(self) -> dict[str, object]:
    """Returns the derived sizes, for config.yml, checkpoints and --json."""
    return {
      "batch_size": self.batch_size,
      "num_generations": self.num_generations,
      "completions_per_step": self.completions_per_step,
      "micro_batch_size": self.micro_batch,
      "num_microbatches": self.num_microbatches,
      "prompts_per_microbatch": self.prompts_per_microbatch,
      "num_iterations": self.num_iterations,
      "num_batches": self.num_batches,
      "total_prompts": self.total_prompts,
      "total_completions": self.total_completions,
      "dropped_prompts": self.dropped_prompts(self.num_batches),
      "training_devices": self.topology.training.num_devices,
      "rollout_devices": self.topology.rollout_devices,
      "rollout_mesh": self.topology.rollout.shape if self.topology.rollout else None,
      "rollout_staleness": self.staleness,
      "waiting_microbatches": self.waiting_microbatches,
      "max_prompt_length": self.max_prompt_length,
      "max_completion_length": self.max_completion_length,
    }

  def __str__(self) -> str:
    rows = self._rows()
    width = max(len(f"{size:,}") for _, size, _, _ in rows)
    lines = [f"  {name:<17} {size:>{width},} {unit:<11} = {how}" for name, size, unit, how in rows]
    return "\n".join(["Reinforcement learning", *lines, *(f"  {line}" for line in self._notes())])

  def _rows(self) -> list[tuple[str, int, str, str]]:
    """Returns (name, size, unit, formula) of every size; a formula uses only sizes above it."""
    step, micro, count = self.completions_per_step, self.micro_batch, self.num_batches
    unit, iterations = "completions", self.num_iterations
    training, rollout = self.topology.training.num_devices, self.topology.rollout_devices
    groups, generations = self.topology.rollout_groups, f"num_generations {self.num_generations:,}"
    of = self.topology.rollout_words if rollout else f"{groups:,} data-parallel groups"
    more = f" + rollout {rollout:,}" if rollout else ", which sample too"
    lengths = (
      f"max_target_length {self.batch_plan.max_target_length:,} − prompt {self.max_prompt_length:,}"
    )
    batches = f"steps {self.batch_plan.steps:,} / num_iterations {iterations:,}"
    return [
      ("num_devices", training + rollout, "devices", f"training {training:,}{more}"),
      ("batch_size", self.batch_size, "prompts", "unique prompts of a step"),
      ("completions", step, unit, f"{self.batch_size:,} × {generations}, of a step"),
      ("micro_batch_size", micro, unit, f"{step:,} / {self.num_microbatches:,} microbatches"),
      ("groups", self.prompts_per_microbatch, "prompts", f"{micro:,} / {generations}"),
      ("sampled at once", micro // groups, unit, f"{micro:,} / {of}"),
      ("completion", self.max_completion_length, "tokens", f"{lengths}, at most"),
      ("batches", self.num_batches, "batches", batches),
      ("total prompts", self.total_prompts, "prompts", f"{count:,} × {self.batch_size:,}"),
      ("total completions", self.total_completions, unit, f"{count:,} × {step:,}"),
    ]

  def _notes(self) -> list[str]:
    """Says what becomes of the ends of epochs, and what may wait."""
    return [
      self._epochs(),
      f"rollout_staleness={self.staleness}: at most "
      f"{counted(self.waiting_microbatches, 'microbatch', 'microbatches')} sampled ahead, "
      f"{counted(self.num_snapshots, 'snapshot')} of the parameters",
      f"micro_batch_size can be {_listed(micro_batch_sizes(self.completions_per_step, self.topology))}",
    ]

  def _epochs(self) -> str:
    epochs, total = self.epochs, self.total_prompts
    if epochs.num_prompts == -1:
      return (
        "num_prompts=-1: an epoch has all prompts of the data; those of a built-in task do not end"
      )
    rest = epochs.num_prompts % epochs.batch_size
    many = epochs.epochs(total)
    number = f"{float(many):.4g}" if many.denominator > 1 else f"{int(many):,}"
    said = f"epochs of {epochs.num_prompts:,} prompts: {number}"
    if not rest:
      return f"{said}, each of whole batches"
    if epochs.leftovers == "drop":
      return (
        f"{said}; {rest:,} prompts dropped at the end of each, {epochs.dropped(total):,} in all"
      )
    carried = counted(epochs.batches_of_two_epochs(total), "batch", "batches")
    return f"{said}; none dropped, {carried} with prompts of two epochs"


_SHOWN = 6


def _listed(sizes: list[int]) -> str:
  """Lists sizes as `8, 16 or 32`; of many the first and the last."""
  words = [f"{size:,}" for size in sizes]
  if len(words) > _SHOWN:
    words = [*words[: _SHOWN - 2], "…", words[-1]]
  return " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def in_samples(config: Config, plan: RLPlan) -> Config:
  """Returns the configuration whose batch counts samples, as training reads it: a sample is a
  completion."""
  batch = _sized(config.batch, plan.completions_per_step, plan.num_microbatches)
  return dataclasses.replace(config, batch=batch)


def _sized(batch: BatchConfig, completions: int, num_microbatches: int) -> BatchConfig:
  return dataclasses.replace(
    batch,
    batch_size=-1,
    tokens_per_step=-1,
    global_batch_to_train=completions,
    micro_batch_size=Fraction(-1),
    per_device_batch_size=Fraction(-1),
    gradient_accumulation_steps=num_microbatches,
  )


def plan_rl(config: Config, training: Topology) -> RLPlan:
  """Derives every size from the configuration and the devices that train.

  Raises:
    UserError: sizes contradict each other or do not divide; the message suggests sizes that work.
  """
  batch, rl = config.batch, config.rl
  topology = RLTopology(training, rl.num_generations, rollout_topology(rl))
  _check_experts(config.model.num_experts, topology.rollout)
  _check_constant(batch)
  given = given_completions(batch, topology)
  sizes = solve_rl(given, topology)
  _check_lengths(batch.max_target_length, rl.max_prefill_predict_length)
  _check_end(config.run, rl.num_iterations, sizes.batch, batch.max_target_length)
  prompts = sizes.batch // rl.num_generations
  epochs = prompt_epochs(
    rl.num_prompts,
    prompts,
    rl.leftover_prompts,
    unit=given.batch_unit(topology) // rl.num_generations,
    assigned=lambda count: given.batch.assigned(count * rl.num_generations),
  )
  samples = _sized(batch, sizes.batch, sizes.num_microbatches)
  return RLPlan(
    batch_plan=plan_batches(samples, config.run, training),
    topology=topology,
    num_iterations=rl.num_iterations,
    staleness=rl.rollout_staleness,
    max_prompt_length=rl.max_prefill_predict_length,
    epochs=epochs,
    has_reference=rl.grpo_beta > 0,
  )


def _check_constant(batch: BatchConfig) -> None:
  """Refuses a batch that changes: the schedules count samples, and here a step has its prompts."""
  given = [
    *(["enable_rampup_batch_size=true"] if batch.enable_rampup_batch_size else []),
    *(["batch_schedule"] if batch.batch_schedule else []),
    *(
      [f"batch_schedule_type={batch.batch_schedule_type}"]
      if batch.batch_schedule_type != "constant"
      else []
    ),
  ]
  if given:
    off = "enable_rampup_batch_size=false batch_schedule=[] batch_schedule_type=constant"
    raise UserError(
      f"{' and '.join(given)}: the batch of reinforcement learning is the same in every step; for "
      f"example {off}"
    )


def _check_experts(experts: int, rollout: Topology | None) -> None:
  if rollout and experts % (ways := rollout.shape.get("expert", 1)):
    raise UserError(
      f"num_experts={experts} must be a multiple of rollout_expert_parallelism={ways}; for example "
      f"rollout_expert_parallelism={math.gcd(experts, ways)} rollout_data_parallelism=-1"
    )


def _check_lengths(max_target_length: int, max_prompt_length: int) -> None:
  if max_prompt_length >= max_target_length:
    raise UserError(
      f"max_prefill_predict_length={max_prompt_length} leaves no token of max_target_length="
      f"{max_target_length} to a completion; for example "
      f"max_target_length={max(max_target_length, 2 * max_prompt_length)}"
    )


def _check_end(run: RunConfig, num_iterations: int, completions: int, length: int) -> None:
  """Checks that the run ends with the last of the steps on a batch of completions.

  Args:
    run: its budget; which of the keys is given plan_batches checks.
    num_iterations: steps on each batch of completions.
    completions: of a step.
    length: tokens of a completion.
  """
  units = {
    "steps": (run.steps, num_iterations),
    "total_samples": (run.total_samples, num_iterations * completions),
    "total_tokens": (run.total_tokens, num_iterations * completions * length),
  }
  for key, (amount, unit) in units.items():
    if amount == -1 or amount % unit == 0:
      continue
    offers = " or ".join(f"{key}={near}" for near in nearest_multiples(unit, Fraction(amount)))
    raise UserError(
      f"{key}={amount} ends inside a batch of {completions:,} completions, each of which is trained on in "
      f"num_iterations={num_iterations} steps; nearest: {offers}"
    )
