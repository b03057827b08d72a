"""One run of reinforcement learning: a warm start, then training on what the policy itself has sampled."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

import jax
import numpy as np

from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.batch.rl_plan import RLPlan, in_pairs, plan_rl
from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.checkpoints.newest import newest_record
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.config.rl_schema import RLConfig
from maxbatch.config.schema import Config
from maxbatch.data.dataset import Dataset
from maxbatch.hardware.devices import find_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.hardware.shared_files import write_shared_file
from maxbatch.models.registry import Parameters
from maxbatch.modes.resolve import ResolvedRun
from maxbatch.modes.rl_requirements import check_one_process, check_prompt_noise, check_rl
from maxbatch.modes.run import run
from maxbatch.modes.start import started
from maxbatch.plots.figure import render
from maxbatch.rl import demonstrations
from maxbatch.rl.earlier import EarlierPolicies, log_prob_program
from maxbatch.rl.evaluation import Evaluation, Example
from maxbatch.rl.grpo import objective
from maxbatch.rl.microbatches import MicrobatchMaker
from maxbatch.rl.pairs import Pairs
from maxbatch.rl.plot import PASS_AT, plot
from maxbatch.rl.policies import Policies
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.rl.prompt_noise import in_halves
from maxbatch.rl.prompt_set import PromptSet, prompt_set
from maxbatch.rl.prompts import PromptStream, epoch_size
from maxbatch.rl.rewards import RewardPool
from maxbatch.rl.rollout import RolloutLoader
from maxbatch.rl.sampled import pair_sampler, run_vocabulary
from maxbatch.rl.steps import StepRecords
from maxbatch.rl.training_clock import TrainingClock
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.metrics import Record, each_record
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.loop import Job
from maxbatch.training.state import TrainState
from maxbatch.training.step import POLICIES

_WARM_START_BATCH = 64
_WARM_START_RATE = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class ByReinforcement:
  """GRPO, as a `Method`: a pair is a sample, and a rollout a loader."""

  plan: RLPlan
  prompts: PromptSet

  def loss(self, config: Config) -> PolicyLoss:
    """See `Method.loss`."""
    allowed_V = np.asarray(run_vocabulary(config).allowed_V)
    return PolicyLoss(
      objective(config.rl, self.plan.max_completion_length),
      allowed_V.tobytes(),
      config.run.decode_sampling_temperature,
      has_proximal=_has_proximal(config.rl),
      halves=config.noise.gns_from_microbatches,
    )

  @property
  def num_saved_policies(self) -> int:
    """See `Method.num_saved_policies`."""
    return self.plan.num_saved_policies

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

  @contextlib.contextmanager
  def equipped(self, job: Job, resolved: ResolvedRun, restored: Restored | None) -> Iterator[Job]:
    """See `Method.equipped`."""
    config, plan, trainer = resolved.config, self.plan, job.trainer
    sampler = pair_sampler(config, trainer.model, trainer.mesh)
    stream = PromptStream(self.prompts.train, plan.epochs, config.data.data_shuffle_seed)
    loss, clock = self.loss(config), TrainingClock()
    records = StepRecords(plan, config, job.feed_watchdog, clock.seconds)
    policies = Policies(kept=plan.staleness + 1, keeps_first=plan.has_reference)
    if restored and plan.num_saved_policies:
      policies.put_back(plan.saved_policies(restored.position.step), restored.state[POLICIES])
    earlier = EarlierPolicies(plan, loss, policies, log_prob_program(trainer, loss))
    halved = in_halves(plan.num_generations, trainer.mesh)

    def complete(batch: int, pairs: Pairs) -> Pairs:
      found = earlier(batch, pairs)
      return halved(found) if loss.halves else found

    with RewardPool(config.rl) as rewards, clock:
      make = MicrobatchMaker(config.rl, plan, stream, sampler, rewards, clock.last_end)
      evaluation = Evaluation(
        self.prompts.validation, sampler, rewards, plan.prompts_per_microbatch, job.feed_watchdog
      )

      def opened(_: BatchPlan, position: Position) -> RolloutLoader:
        return RolloutLoader(plan, position, make, policies, trainer.mesh, records, complete)

      def published(position: Position, params: Parameters) -> None:
        if plan.begins_batch(position.step):
          policies.publish(position.step, params)

      def evaluated(params: Parameters) -> Record:
        found = evaluation(params)
        self._keep(found.examples, resolved.folder)
        return found.record

      yield dataclasses.replace(
        job,
        train_rows=opened,
        publish=published,
        policies=lambda position: [
          policies.of(step) for step in plan.saved_policies(position.step)
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


def _has_proximal(config: RLConfig) -> bool:
  """Whether the loss compares with the policy of before the first of several steps on a batch."""
  return config.num_iterations > 1 and config.importance_sampling_cap > 0


def run_rl(config: Config) -> tuple[TrainState, Position]:
  """A warm start, where one is asked for, then the run; its state and position at the end.

  Raises:
    UserError: something in the configuration or the input does not work.
    TrainingDivergedError: the loss or a gradient is not finite.
  """
  check_rl(config)
  with started(config), ending_together():
    target = find_devices(config)
    check_one_process(jax.process_count())
    found = prompt_set(config)
    size = epoch_size(config.rl.num_prompts, found.train)
    config = dataclasses.replace(config, rl=dataclasses.replace(config.rl, num_prompts=size))
    plan = plan_rl(config, target.layout)
    check_prompt_noise(config.noise, plan)
    print(f"{plan}\n", flush=True)
  begun = newest_record(RunFolder.of(config.run).checkpoints)
  if config.rl.warm_start_steps and not (begun and config.checkpoint.enable_checkpointing):
    config = _warmed_up(config)
  return run(in_pairs(config, plan), method=ByReinforcement(plan, found))


def _warmed_up(config: Config) -> Config:
  """The configuration of a run that begins with what was trained on demonstrations, which it is now."""
  warm = _warm_start(config)
  print(
    f"Warm start: {warm.run.steps} steps of {_WARM_START_BATCH} demonstrations of "
    f"rl_task={config.rl.rl_task}, in {RunFolder.of(warm.run).path}\n",
    flush=True,
  )
  run(warm, advise=False)
  print("\nReinforcement learning\n", flush=True)
  path = str(RunFolder.of(warm.run).path)
  return dataclasses.replace(
    config, checkpoint=dataclasses.replace(config.checkpoint, load_parameters_path=path)
  )


def _warm_start(config: Config) -> Config:
  """A supervised run on a task's demonstrations, in a folder of its own."""
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
      batch_size=_WARM_START_BATCH,
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
    noise=dataclasses.replace(config.noise, gns_from_microbatches=False),
    rl=dataclasses.replace(config.rl, num_generations=-1, rl_task="", num_prompts=-1),
  )


def sum_up_rl(run_name: str, folder: RunFolder) -> None:
  """What the policy wrote before and afterwards, how often it was right, and a picture of that."""
  for path, word in ((folder.examples_before, "before"), (folder.examples_after, "after")):
    if path.exists():
      print(f"\n--- {word} training\n{path.read_text().rstrip()}")
  records = list(each_record(folder.path))
  evaluated = [record for record in records if f"{PASS_AT}1" in record]
  if len(evaluated) < 2 or evaluated[0] is not records[0]:
    return
  first, last = evaluated[0], evaluated[-1]
  shown = ", ".join(
    f"pass@{name.removeprefix(PASS_AT)} {first[name]:.3f} → {last[name]:.3f}"
    for name in last
    if name.startswith(PASS_AT)
  )
  picture = folder.pass_at_k
  write_run_file(picture, render(plot(run_name, records), picture.suffix))
  print(f"\n{shown}, drawn in {picture}", flush=True)
