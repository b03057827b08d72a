"""What a rollout needs of a device's memory and time, beside training."""

import dataclasses
from typing import Any, NamedTuple

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.batch.rl_sizes import axes_words
from maxbatch.command_line.screen import figure, section
from maxbatch.compile.program import ProgramMemory, gib
from maxbatch.compile.report import memory_figures


@dataclasses.dataclass(frozen=True)
class RolloutTime:
  """Seconds in which a microbatch is sampled where no completion ends early."""

  seconds: float
  how: str
  """estimate or measured."""
  prefill: float | None = None
  """Seconds of these for the prompts; None: not measured separately."""


class PolicyBytes(NamedTuple):
  """Bytes of a policy's parameters on one device."""

  trained: int
  frozen: int = 0

  @property
  def total(self) -> int:
    """Bytes of all policies."""
    return self.trained + self.frozen

  def copies(self, count: int) -> int:
    """Returns the bytes of so many policies, which share what is frozen."""
    return count * self.trained + (self.frozen if count else 0)


@dataclasses.dataclass(frozen=True)
class RolloutReport:
  """Of one device, in bytes."""

  plan: RLPlan
  sampling: ProgramMemory
  """Memory of the sampler's program that needs more."""
  policy: int
  """The parameters where they sample."""
  snapshots: int
  """Snapshots of the parameters on a device that samples."""
  snapshots_in_training: int
  """The same on a device that trains."""
  kept: int
  """Keys, values and texts of a microbatch."""
  in_flight: int
  """The parameters on a device that trains, on their way to devices that only sample: of a policy that
  these divide a part at a time."""
  compile_seconds: float
  time: RolloutTime | None
  """None: nothing is published about the devices, which are not here."""

  @property
  def is_apart(self) -> bool:
    """Whether other devices sample than train."""
    return self.plan.topology.rollout_devices > 0

  @property
  def temporaries(self) -> int:
    """Bytes that the sampler needs beside the policy."""
    return self.sampling.peak - self.policy

  @property
  def beside_training(self) -> int:
    """Bytes that a device holds while it trains, beside what the step counts itself."""
    # What is sampled next is dispatched while a step is under way: what it returns lies there already.
    return self.snapshots_in_training + (self.in_flight if self.is_apart else self.kept)

  def peak(self, state: int, rows: int) -> int:
    """Returns what a device that samples needs.

    Args:
      state: what a device that trains holds between steps.
      rows: what its step is fed.
    """
    return self.snapshots + self.temporaries + (0 if self.is_apart else state + rows)

  def largest(self, step: ProgramMemory, state: int) -> int:
    """Returns what a device needs, be it of training or of the rollout.

    Args:
      step: of training.
      state: as for `peak`.
    """
    of_rollout = self.peak(state, max(0, step.arguments - state))
    return max(step.peak + self.beside_training, of_rollout)

  def step_seconds(self, training: float) -> float | None:
    """Returns a step's seconds, given its training's: a rollout on devices of its own overlaps."""
    if self.time is None:
      return None
    rollout, count = self.time.seconds * self.plan.num_microbatches, self.plan.num_microbatches
    if not self.is_apart:
      return rollout + training
    return max(rollout, training) + min(rollout, training) / count

  def as_dict(self, state: int, rows: int) -> dict[str, Any]:
    """Returns plain values; what is not known is left out."""
    results: dict[str, Any] = {
      "completions": self.plan.micro_batch,
      "rollout_devices": self.plan.topology.rollout_devices,
      "memory_bytes_per_device": {
        "snapshots": self.snapshots,
        "keys_values_and_texts": self.kept,
        "temporaries": max(0, self.temporaries - self.kept),
        "peak": self.peak(state, rows),
      },
      "compile_seconds": self.compile_seconds,
    }
    if rollout := self.plan.topology.rollout:
      results["transfer"] = {
        "from": self.plan.topology.training.shape,
        "to": rollout.shape,
        "parts": self._num_parts,
        "bytes_per_rollout_device": self.policy,
        "bytes_in_flight_per_training_device": self.in_flight,
      }
    if self.time is not None:
      results["time"] = {"how": self.time.how, "seconds_per_microbatch": self.time.seconds}
      results["time"] |= {} if self.time.prefill is None else {"prefill_seconds": self.time.prefill}
    return results

  def memory_lines(self, state: int, rows: int, training: int, capacity: int) -> str:
    """Returns the table of a device's memory in rollout.

    Args:
      state: as for `peak`.
      rows: as for `peak`.
      training: the peak of training, to compare with.
      capacity: of the device.
    """
    beside = [] if self.is_apart else [("state and rows of training", state + rows)]
    peak = self.peak(state, rows)
    table = [
      *beside,
      ("snapshots of the policy", self.snapshots),
      ("keys, values, texts", self.kept),
      ("activations, temporaries", max(0, self.temporaries - self.kept)),
      ("peak of the rollout", peak),
    ]
    lines = memory_figures(table, capacity)
    more = "the rollout" if peak > training else "training"
    devices = "a device that only samples" if self.is_apart else "a device, which trains too"
    head = (
      f"Rollout of {self.plan.micro_batch:,} completions: memory of {devices} (compiler); compiled in "
      f"{self.compile_seconds:.1f} s"
    )
    return section(head, [*lines, *self._transfer(), f"more is needed by {more}"])

  @property
  def _num_parts(self) -> int:
    """Rollout devices that share a copy of the policy, each with a part."""
    rollout = self.plan.topology.rollout
    return rollout.num_devices // rollout.shape["data"] if rollout else 1

  def _transfer(self) -> list[str]:
    """Says how the policy comes to the devices that sample."""
    topology = self.plan.topology
    if not topology.rollout:
      return []
    how = f"in {self._num_parts} parts, one at a time" if self._num_parts > 1 else "whole"
    return [
      f"the policy goes from training's {axes_words(topology.training)} to rollout's "
      f"{axes_words(topology.rollout)} {how}: {gib(self.policy)} to each rollout device,",
      f"{gib(self.in_flight)} on each device that trains meanwhile",
    ]

  def time_lines(self, training: float | None) -> str:
    """Returns seconds of a microbatch and of a step, by those that training of a step takes."""
    if self.time is None or training is None:
      return ""
    plan, count = self.plan, self.plan.num_microbatches
    seconds, tokens = self.time.seconds, plan.rollout_tokens
    prompts = (
      "" if self.time.prefill is None else f", including the prompts: {self.time.prefill:.4g} s"
    )
    how = "max(R, T) + min(R, T) / microbatches" if self.is_apart else "one after the other"
    step = self.step_seconds(training)
    speed = f"{tokens / seconds:,.0f} tokens per second"
    return section(
      f"Time of rollout and training ({self.time.how}), where no completion ends early; without rewards",
      [
        figure("rollout of a microbatch", f"{seconds:.4g}", f"s{prompts}: {speed}"),
        figure("rollout of a step, R", f"{count * seconds:.4g}", f"s: {count:,} × {seconds:.4g} s"),
        figure("training of a step, T", f"{training:.4g}", "s"),
        figure("both", f"{step:.4g}", f"s: {how}"),
      ],
    )
