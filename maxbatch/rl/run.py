"""One run of reinforcement learning: a warm start, then training on what the policy itself has sampled."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import jax

from maxbatch.batch.rl_plan import RLPlan, in_samples
from maxbatch.batch.rl_sizes import warm_start_batch
from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.checkpoints.find import newest_record
from maxbatch.command_line.screen import for_screen
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.data.dataset import Dataset
from maxbatch.hardware.agreement import (
  broadcast_one_to_all,
  one_process_at_a_time,
  write_shared_file,
)
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.sharding import rollout_mesh
from maxbatch.models.registry import Model, Parameters
from maxbatch.modes.memory import bytes_per_device
from maxbatch.modes.resolve import ResolvedRun
from maxbatch.modes.run import run
from maxbatch.modes.start import started
from maxbatch.rl import demonstrations
from maxbatch.rl.completions import Completions
from maxbatch.rl.earlier import EarlierPolicies, log_prob_program
from maxbatch.rl.evaluation import Evaluation, Example
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.policies import Policies, mover
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.rl.prompt_noise import PromptNoiseMeter, in_halves
from maxbatch.rl.prompt_set import PromptSet
from maxbatch.rl.prompts import PromptStream
from maxbatch.rl.requirements import check_rl, check_rollout_devices
from maxbatch.rl.resolve import resolve_rl, with_prompts
from maxbatch.rl.rewards import RewardPool
from maxbatch.rl.rollout import RolloutLoader
from maxbatch.rl.rollout_program import PolicyBytes
from maxbatch.rl.sampled import completion_sampler
from maxbatch.rl.shared_rewards import SharedRewards
from maxbatch.rl.steps import StepRecords
from maxbatch.rl.trainer import policy_loss
from maxbatch.rl.training_clock import TrainingClock
from maxbatch.run_folder.metrics import Record, each_record
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.loop import Job
from maxbatch.training.state import TrainState
from maxbatch.training.step import POLICIES, Trainer

_WARM_START_RATE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class ByReinforcement:
  """GRPO, as a `Method`: a completion is a sample, and a rollout a loader."""

  plan: RLPlan
  prompts: PromptSet

  def loss(self, config: Config) -> PolicyLoss:
    """See `Method.loss`."""
    return policy_loss(config, self.plan)

  @property
  def num_saved_policies(self) -> int:
    """See `Method.num_saved_policies`."""
    return self.plan.num_saved_policies

  def held_beside(self, trainer: Trainer) -> Mapping[str, int]:
    """See `Method.held_beside`: policies."""
    state, count = trainer.abstract, self.plan.num_policies_in_training
    policy = PolicyBytes(bytes_per_device(state.params), bytes_per_device(state.frozen))
    return {"policies": policy.copies(count)} if count else {}

  def dataset(self, resolved: ResolvedRun) -> Dataset:
    """See `Method.dataset`: its rows are there for their shapes alone."""
    return Dataset(
      train=placeholder_rows(resolved.config),
      validation=None,
      fingerprint=self.prompts.fingerprint,
      description=self.prompts.description,
      validation_fingerprint=self.prompts.validation_fingerprint,
      num_skipped_records=self.prompts.num_skipped,
    )

  def meter(self, config: Config, model: Model) -> PromptNoiseMeter:
    """See `Method.meter`."""
    return PromptNoiseMeter(
      config.noise, model, config.rl.num_generations, config.rl.num_iterations
    )

  @contextlib.contextmanager
  def equipped(self, job: Job, resolved: ResolvedRun, restored: Restored | None) -> Iterator[Job]:
    """See `Method.equipped`."""
    config, plan, trainer = resolved.config, self.plan, job.trainer
    apart = resolved.target.rollout
    mesh = rollout_mesh(apart) if apart else trainer.mesh
    move = mover(trainer.mesh, mesh) if apart else None
    sampler = completion_sampler(config, trainer.model, mesh)
    stream = PromptStream(self.prompts.train, plan.epochs, config.data.data_shuffle_seed)
    loss, clock = self.loss(config), TrainingClock()
    records = StepRecords(plan, config, job.feed_watchdog, clock.seconds)
    policies = Policies(
      trainer.model,
      kept=plan.num_snapshots,
      keeps_first=plan.has_reference,
      move=move,
      is_asked_for=plan.num_saved_policies > 0,
    )
    if restored and plan.num_saved_policies:
      policies.put_back(plan.saved_policies(restored.position.step), restored.state[POLICIES])
    earlier = EarlierPolicies(plan, loss, policies, log_prob_program(trainer, loss))
    halved = in_halves(plan.num_generations, trainer.mesh)

    def complete(batch: int, completions: Completions) -> Completions:
      found = earlier(batch, completions)
      return halved(found) if loss.halves else found

    with RewardPool(config.rl) as pool, clock:
      evaluation = Evaluation(
        self.prompts.validation,
        sampler,
        SharedRewards(pool),
        plan.prompts_per_microbatch,
        job.feed_watchdog,
      )

      def opened(_: BatchPlan, position: Position) -> RolloutLoader:
        # Devices of their own sample from the dispatch on, whatever others still train on.
        until = [] if apart else [clock.last_end]
        make = MicrobatchMaker(config.rl, plan, stream, sampler, SharedRewards(pool), *until)
        return RolloutLoader(
          plan, position, make, policies, trainer.mesh, records, complete, apart=bool(apart)
        )

      def published(position: Position, params: Parameters) -> None:
        policies.keep_frozen(params)
        if plan.begins_batch(position.step):
          policies.publish(position.step, params)

      def evaluated(params: Parameters) -> Record:
        found = evaluation(move(params) if move else params)
        self._keep(found.examples, resolved.folder)
        return found.record

      yield dataclasses.replace(
        job,
        train_rows=opened,
        publish=published,
        policies=lambda position: [
          policies.trained(step) for step in plan.saved_policies(position.step)
        ],
        own_evaluation=evaluated,
        completed=records.completed,
        dispatched=clock.dispatched,
        loader_waits=True,
      )

  def _keep(self, examples: Sequence[Example], folder: RunFolder) -> None:
    """Keeps what a run first and last wrote, to be shown at its end."""
    if not examples:
      return
    lines = "".join(f"{example}\n" for example in examples)
    path = folder.examples_after if folder.examples_before.exists() else folder.examples_before
    write_shared_file(path, lines)


def run_rl(config: Config, *, forget: bool = False) -> tuple[TrainState, Position]:
  """A warm start, where one is asked for, then the run; its state and position at the end.

  Args:
    config: the run; its batch counts prompts.
    forget: choose anew what the keys leave open, whatever is remembered.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
  """
  check_rl(config)
  with started(config), ending_together():
    target = find_devices(config)
    check_rollout_devices(config.rl, jax.process_count())
    with one_process_at_a_time():
      config, found = with_prompts(config)
    resolved = resolve_rl(config, target, forget=forget)
    config, plan = resolved.config, resolved.plan
    print(f"{for_screen(str(plan))}\n", flush=True)
    warms = warms_up(config)
  if warms:
    config = _warmed_up(config, plan)
  return run(in_samples(config, plan), method=ByReinforcement(plan, found))


def warms_up(config: Config) -> bool:
  """Whether a run of its own on demonstrations comes before: one is asked for, and nothing is saved.

  All processes must call it.
  """
  begun = config.checkpoint.enable_checkpointing and bool(
    newest_record(RunFolder.of(config.run).checkpoints)
  )
  return bool(config.rl.warm_start_steps) and not broadcast_one_to_all(begun)


def _warmed_up(config: Config, plan: RLPlan) -> Config:
  """The configuration of a run that begins with what was trained on demonstrations, which it is now."""
  warm = warm_start(config, plan)
  _say(
    f"Warm start: {warm.run.steps} steps of {warm.batch.batch_size} demonstrations of "
    f"rl_task={config.rl.rl_task}, in {RunFolder.of(warm.run).path}\n"
  )
  run(warm, advise=False)
  _say("\nReinforcement learning\n")
  path = str(RunFolder.of(warm.run).path)
  return dataclasses.replace(
    config, checkpoint=dataclasses.replace(config.checkpoint, load_parameters_path=path)
  )


def _say(text: str) -> None:
  """Prints between two runs, where each process has its terminal: the first alone speaks."""
  if jax.process_index() == 0:
    print(text, flush=True)


def warm_start(config: Config, plan: RLPlan) -> Config:
  """A supervised run on a task's demonstrations, in a folder of its own, on the devices that train."""
  return dataclasses.replace(
    config,
    run=dataclasses.replace(
      config.run,
      run_name=f"{config.run.run_name}/warm_start",
      steps=config.rl.warm_start_steps,
      total_samples=-1,
      total_tokens=-1,
      eval_interval=-1,
      generate_length=0,
    ),
    batch=dataclasses.replace(
      config.batch,
      batch_size=warm_start_batch(plan.topology),
      global_batch_to_train=-1,
      tokens_per_step=-1,
      micro_batch_size=Fraction(-1),
      per_device_batch_size=Fraction(-1),
      gradient_accumulation_steps=-1,
      accumulation="fused",
    ),
    data=dataclasses.replace(
      config.data, dataset_type=demonstrations.NAME, dataset_path=config.rl.rl_task, packing=False
    ),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=_WARM_START_RATE),
    checkpoint=dataclasses.replace(
      config.checkpoint, enable_checkpointing=True, max_num_checkpoints_to_keep=1
    ),
    # What is compiled there is no step on completions.
    compile=dataclasses.replace(config.compile, compiled_step="", save_compiled_step=""),
    noise=dataclasses.replace(config.noise, gns_from_microbatches=False),
    rl=dataclasses.replace(config.rl, num_generations=-1, rl_task="", num_prompts=-1),
  )


_PASS_AT = "eval/pass_at_"


def sum_up_rl(folder: RunFolder) -> None:
  """What the policy wrote before and afterwards, and how often it was right."""
  if jax.process_index():
    return
  for path, word in ((folder.examples_before, "before"), (folder.examples_after, "after")):
    if path.exists():
      print(f"\n--- {word} training\n{path.read_text().rstrip()}")
  records = list(each_record(folder.path))
  evaluated = [record for record in records if f"{_PASS_AT}1" in record]
  if len(evaluated) < 2 or evaluated[0] is not records[0]:
    return
  first, last = evaluated[0], evaluated[-1]
  shown = ", ".join(
    f"pass@{name.removeprefix(_PASS_AT)} {first[name]:.3f} → {last[name]:.3f}"
    for name in last
    if name.startswith(_PASS_AT)
  )
  print(f"\n{shown}", flush=True)
