"""GRPO as a method: a completion is a sample, and a rollout a loader."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.rl_plan import RLPlan, in_samples, plan_rl
from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.command_line.screen import for_screen
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import one_process_at_a_time, write_shared_file
from maxbatch.hardware.devices import Device, Target, describe_devices
from maxbatch.metrics_writers.registry import chosen_writers
from maxbatch.models.registry import Model, Parameters
from maxbatch.modes.initialization import Initialization
from maxbatch.modes.method import Passed, Purpose, ResolvedRun
from maxbatch.modes.prepare import bytes_per_device
from maxbatch.modes.pretraining import check_plan, saved_record
from maxbatch.rl.candidates import (
  RLCandidate,
  rl_sizes_of,
  with_settled_pipeline,
)
from maxbatch.rl.completions import Completions
from maxbatch.rl.demonstrations import warm_start, warms_up
from maxbatch.rl.evaluation import Evaluation, Example
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.policies import EarlierPolicies, Move, Mover, Policies, log_prob_program
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.rl.prompt_noise import PromptNoiseMeter, in_halves
from maxbatch.rl.prompt_set import PromptSet, prompt_set
from maxbatch.rl.prompts import Prompts, PromptStream, epoch_size
from maxbatch.rl.requirements import check_prompt_noise, check_rl
from maxbatch.rl.rewards import RewardPool, SharedRewards, check_rewards
from maxbatch.rl.rollout import RolloutLoader
from maxbatch.rl.rollout_program import RolloutCompiler, RolloutPlace, traced_rollout
from maxbatch.rl.rollout_report import PolicyBytes
from maxbatch.rl.sampled import completion_sampler
from maxbatch.rl.steps import StepRecords
from maxbatch.rl.trainer import policy_loss
from maxbatch.rl.tuning import RLProber, check_given_size, choose_rl
from maxbatch.run_folder.metrics import Record
from maxbatch.run_folder.paths import RunFolder, remembered_choices
from maxbatch.training.job import DeviceClock, Hooks, Job
from maxbatch.training.step import POLICIES, StepMetrics, Trainer
from maxbatch.tuning.candidates import is_open, offered
from maxbatch.tuning.coupling import resolve_accumulation
from maxbatch.tuning.exploration import without_variants
from maxbatch.tuning.microbatch_size import check_explored

_LOOKED_AT = 256
"""Prompts whose lengths are looked at."""
_NO_PROMPTS = PromptSet(Prompts([].__getitem__, 0), (), "", "", "")


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyTraining:
  """Training on what the policy itself has sampled (see `Training` in modes/method.py)."""

  config: Config
  """Its batch counts samples."""
  plan: RLPlan
  prompts: PromptSet
  rollout: Sequence[Device] = ()
  """The devices that only sample; none: those that train sample too."""
  unseen: str = ""
  """Why the prompts are not looked at, where they are not here."""

  @property
  def place(self) -> RolloutPlace:
    """The sampler's model and devices."""
    return RolloutPlace(self.plan, self.rollout)

  @property
  def loss(self) -> PolicyLoss:
    """GRPO's."""
    return policy_loss(self.config, self.plan)

  @property
  def num_saved_policies(self) -> int:
    """Number of policies that a later batch is compared with, or sampled by."""
    return self.plan.num_saved_policies

  @property
  def sampler(self) -> RolloutCompiler:
    """The rollouts."""
    return RolloutCompiler(self.place)

  def extra_bytes(self, trainer: Trainer) -> Mapping[str, int]:
    """Returns the bytes of the policies that are kept."""
    state, count = trainer.abstract, self.plan.num_policies_in_training
    policy = PolicyBytes(bytes_per_device(state.params), bytes_per_device(state.frozen))
    return {"policies": policy.copies(count)} if count else {}

  def dataset(self) -> Dataset:
    """Returns the prompts' account, with rows that are there for their shapes alone."""
    return Dataset(
      train=placeholder_rows(self.config),
      validation=None,
      fingerprint=self.prompts.fingerprint,
      description=self.prompts.description,
      validation_fingerprint=self.prompts.validation_fingerprint,
      num_skipped_records=self.prompts.num_skipped,
    )

  def examine(self, trainer: Trainer, passed: Passed) -> Dataset:
    """Checks prompts, rewards and sampler; compiles nothing."""
    passed(("prompts", self.unseen or self._lengths(trainer), ()))
    passed(("rewards", f"{', '.join(check_rewards(self.config.rl))} can be imported", ()))
    traced_rollout(self.config, trainer, self.place)
    where = describe_devices(self.rollout) if self.rollout else "the devices that train"
    at_once = counted(self.plan.micro_batch, "completion")
    passed(("sampler", f"can be traced, for {at_once} at once on {where}", ()))
    return self.dataset()

  def _lengths(self, trainer: Trainer) -> str:
    """Measures the first prompts; raises UserError if one is too long."""
    sampler = completion_sampler(self.config, trainer.model, self.place.mesh(trainer))
    train = self.prompts.train
    count = min(_LOOKED_AT, train.count) if train.count != -1 else _LOOKED_AT
    some = [*map(train.at, range(count)), *self.prompts.validation[:_LOOKED_AT]]
    longest = sampler.longest(some)
    most = (
      f"{len(some):,} looked at, of {longest} tokens at most (max_prefill_predict_length allows "
    )
    return f"{self.prompts.description}; {most}{sampler.max_prompt_length})"

  def meter(self, model: Model) -> PromptNoiseMeter:
    """Returns what measures the noise scale, per prompt."""
    rl = self.config.rl
    return PromptNoiseMeter(self.config.noise, model, rl.num_generations, rl.num_iterations)

  @contextlib.contextmanager
  def setup(self, job: Job, restored: Restored | None) -> Iterator[Job]:
    """Yields the job with rollouts as its loader and with the hooks that they need."""
    config, plan, trainer, place = self.config, self.plan, job.trainer, self.place
    mesh, feed_watchdog = place.mesh(trainer), job.outputs.feed_watchdog
    move = Mover(trainer.mesh, place.policy(trainer)) if self.rollout else None
    sampler = completion_sampler(config, trainer.model, mesh)
    stream = PromptStream(self.prompts.train, plan.epochs, config.data.data_shuffle_seed)
    loss = self.loss
    is_measured = trainer.pipeline is not None and trainer.measures.noise(trainer.model)
    skips = not (plan.has_reference or any(trainer.model.own_sums) or is_measured)
    records = StepRecords(plan, config, feed_watchdog, skips=skips)
    policies = Policies(
      trainer.model,
      kept=plan.num_snapshots,
      keeps_first=plan.has_reference,
      move=move,
      is_asked_for=plan.num_saved_policies > 0,
      in_order=trainer.by_layer,
    )
    if restored and plan.num_saved_policies:
      policies.put_back(plan.saved_policies(restored.position.step), restored.state[POLICIES])
    earlier = EarlierPolicies(plan, loss, policies, log_prob_program(trainer, loss))
    halved = in_halves(plan.num_generations, trainer.mesh)

    def complete(batch: int, completions: Completions) -> Completions:
      known = earlier(batch, completions)
      return halved(known) if loss.halves else known

    with RewardPool(config.rl) as pool, DeviceClock() as clock, DeviceClock() as of_rollout:
      rewards = SharedRewards(pool)
      greedy = completion_sampler(config, trainer.model, mesh, greedy=True)
      ways = {"standard": (sampler, "eval/"), "greedy": (greedy, "eval/greedy_")}
      evaluations = [
        Evaluation(self.prompts.validation, way, rewards, plan.micro_batch, feed_watchdog, prefix)
        for strategy, (way, prefix) in ways.items()
        if config.rl.eval_sampling_strategy in (strategy, "both")
      ]

      def open_rollouts(_: BatchPlan, position: Position) -> RolloutLoader:
        # Devices of their own sample from the dispatch on, whatever others still train on.
        timed = of_rollout.timed if self.rollout else clock.timed
        make = MicrobatchMaker(config.rl, plan, stream, sampler, SharedRewards(pool), timed)
        # Several processes dispatch alike: a thread of its own would come before others in one of them.
        apart = bool(self.rollout) and jax.process_count() == 1
        return RolloutLoader(
          plan, position, make, policies, trainer.mesh, records, complete, apart=apart
        )

      to_sample = (lambda x: move(trainer.by_layer(x))) if move else trainer.by_layer
      hooks = RolloutHooks(
        plan, policies, records, clock, evaluations, to_sample, RunFolder.of(config.run)
      )
      yield dataclasses.replace(job, train_rows=open_rollouts, hooks=hooks)


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutHooks(Hooks):
  """Hands the policy from the loop to the rollouts, and their counts to the records of steps."""

  plan: RLPlan
  kept: Policies
  records: StepRecords
  clock: DeviceClock
  evaluations: Sequence[Evaluation]
  to_sample: Move
  """From the parameters that train to those that sample."""
  folder: RunFolder
  waits = True

  def publish(self, position: Position, params: Parameters) -> None:
    """Keeps the policy of which a batch is sampled."""
    self.kept.keep_frozen(params)
    if self.plan.begins_batch(position.step):
      self.kept.publish(position.step, params)

  def dispatched(self, metrics: StepMetrics, since: float) -> None:
    """Times the training of a microbatch."""
    self.records.trained(self.clock.timed(metrics.loss, since))

  def completed(self, record: Record) -> Record:
    """Adds what the rollout of a step counts."""
    return self.records.completed(record)

  def evaluate(self, params: Parameters) -> Record:
    """Evaluates by sampling, and keeps what a run first and last wrote."""
    own = self.to_sample(params)
    results = [each(own) for each in self.evaluations]
    self._keep(results[0].examples)
    return {name: value for each in results for name, value in each.record.items()}

  def policies(self, position: Position) -> Sequence[Parameters]:
    """Returns the policies without which the run cannot go on."""
    return [self.kept.trained(step) for step in self.plan.saved_policies(position.step)]

  def _keep(self, examples: Sequence[Example]) -> None:
    if not examples:
      return
    first, last = self.folder.examples_before, self.folder.examples_after
    write_shared_file(last if first.exists() else first, "".join(f"{one}\n" for one in examples))


@dataclasses.dataclass(frozen=True)
class GRPOMethod:
  """Reinforcement learning, as a `Method` (modes/method.py)."""

  resolved: ResolvedRun | None = None
  """What its run has been resolved to, if it has."""

  def resolve(
    self, config: Config, target: Target, purpose: Purpose, *, retune: bool = False
  ) -> ResolvedRun:
    """Chooses the microbatch, if it was to be; the configuration counts prompts.

    Raises:
      UserError: keys that cannot be used there, sizes that contradict each other, or nothing fits.
    """
    if self.resolved:
      return self.resolved
    check_rl(config)
    chosen_writers(config.run.metrics_writers, config.run.plugins)
    with one_process_at_a_time():
      config, prompts, unseen = _with_prompts(config)
    validates, notes = purpose is Purpose.VALIDATE, ()
    if validates:
      check_explored(config)
      config, notes = _with_smallest_size(config, target.layout)
    else:
      if purpose is Purpose.RUN:
        check_given_size(config, target)
      prober = RLProber(config, target)
      config = choose_rl(config, target, prober, remembered_choices(), retune=retune)
    plan = plan_rl(config, target.layout)
    check_prompt_noise(config.noise, plan)
    samples = resolve_accumulation(in_samples(config, plan), target.layout, plan.batch_plan)
    check_plan(samples, plan.batch_plan)
    samples, chosen = with_settled_pipeline(samples, plan)
    notes = [*notes, *chosen]
    if not validates:
      learning_rate(samples.optimizer, plan.batch_plan, samples.run.schedule_unit)
      _print_unseen(unseen)
      print(for_screen("\n".join([str(plan), *chosen, ""])), flush=True)
    batches = counted(plan.num_batches, "batch", "batches")
    words = f"{batches} of {plan.completions_per_step:,} completions"
    return ResolvedRun(
      samples,
      samples,
      target,
      plan.batch_plan,
      PolicyTraining(samples, plan, prompts, target.rollout, unseen),
      saved_record(samples),
      initialization=_warm_initialization(samples, target.layout) if validates else None,
      checks=[("rollout plan", words, [*notes, *str(plan).splitlines()])],
    )

  def explored(
    self, config: Config, target: Target
  ) -> tuple[Config, RLProber, Callable[[Config, Topology], Sequence[RLCandidate]]]:
    """Returns the run, what tries a size of it with its rollout, and its sizes."""
    check_rl(config)
    config, _, unseen = _with_prompts(config)
    _print_unseen(unseen)
    print(f"{for_screen(str(plan_rl(config, target.layout)))}\n", flush=True)
    return config, RLProber(config, target), rl_sizes_of


GRPO = GRPOMethod()


def _with_prompts(config: Config) -> tuple[Config, PromptSet, str]:
  """Returns the configuration with the prompts of an epoch counted, and these; or why they are not
  here.

  Raises:
    UserError: they cannot be read, and the run is to take place here, or are fewer than num_prompts.
  """
  try:
    prompts = prompt_set(config)
    size = epoch_size(config.rl.num_prompts, prompts.train)
  except UserError as error:
    if not config.compile.compile_topology:
      raise
    return config, _NO_PROMPTS, f"are not looked at: {error}"
  rl = dataclasses.replace(config.rl, num_prompts=size)
  return dataclasses.replace(config, rl=rl), prompts, ""


def _print_unseen(unseen: str) -> None:
  if unseen:
    print(f"The run's prompts {unseen}\n", flush=True)


def _with_smallest_size(config: Config, layout: Topology) -> tuple[Config, Sequence[str]]:
  """Returns the configuration with a microbatch to check, and a line if that is still to be
  chosen."""
  config = without_variants(config)
  if not is_open(config.batch):
    return config, ()
  sizes = rl_sizes_of(config, layout)
  line = f"{offered(config.batch, sizes)}; checked with {sizes[0].words}"
  return sizes[0].applied_to(config), [line]


def _warm_initialization(config: Config, training: Topology) -> Initialization | None:
  """Returns what a warm start gives the run; None: there is none, or it has been."""
  if not warms_up(config):
    return None
  warm = warm_start(config, training)
  note = (
    f"a warm start: {counted(warm.run.steps, 'step')} of {warm.batch.batch_size} demonstrations, in "
    f"{RunFolder.of(warm.run).path}"
  )
  return Initialization(unseen=True, note=note)
