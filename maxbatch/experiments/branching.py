"""The batch sizes and lengths of the branches of a critical-batch measurement.

All branches train on the same samples with different batches. They can be compared where all of
them end a step: after every block of samples, the least common multiple of their batches. A branch
lasts a whole number of blocks, so it has no partial last step.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.core.keys import text
from maxbatch.core.phases import Phase
from maxbatch.core.solve import (
  MOST_SAMPLES,
  describe_groups,
  fitting_micro_batch,
  nearest_multiples,
)
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError

FEWEST_BLOCKS = 4
"""Minimum number of blocks in the smoothing window; fewer do not show their own noise."""
_DEFAULT_BLOCKS = 40
_MOST_TOKENS = 2**53
"""Most tokens of a branch; floats and JSON count exactly up to there."""


@dataclasses.dataclass(frozen=True)
class BranchBase:
  """What the factors multiply: the batch schedule's phase at the checkpoint, on these devices."""

  phase: Phase
  topology: Topology
  max_target_length: int


@dataclasses.dataclass(frozen=True)
class BranchRequest:
  """The request: factors of the batch, tokens per branch (-1: derived), fraction of the window."""

  factors: tuple[Fraction, ...]
  branch_tokens: int
  smoothing: Fraction


@dataclasses.dataclass(frozen=True)
class Branch:
  """One branch: `steps` steps of `batch` samples."""

  factor: Fraction
  batch: int
  tokens_per_step: int
  steps: int
  steps_per_block: int

  @property
  def name(self) -> str:
    """The name of the branch's folder: `x2`, `x0.5`, `x1_3`."""
    return f"x{text(self.factor)}".replace("/", "_")


@dataclasses.dataclass(frozen=True)
class Branching:
  """The branches, smallest batch first, all with the same samples and the same microbatch."""

  branches: tuple[Branch, ...]
  micro_batch: int
  per_device_batch_size: Fraction
  tokens: int
  block_tokens: int
  num_blocks: int
  window_blocks: int
  """Blocks in the smoothing window at the end of a branch."""

  @property
  def window_tokens(self) -> int:
    """Tokens in the smoothing window at the end of a branch."""
    return self.window_blocks * self.block_tokens


def plan_branches(base: BranchBase, request: BranchRequest) -> Branching:
  """Plans the requested branches.

  Raises:
    UserError: a batch does not divide over the devices, or the tokens are no or too few blocks.
  """
  factors = sorted(request.factors)
  batches = [_batch(base, factor) for factor in factors]
  block = math.lcm(*batches)
  block_tokens = block * base.max_target_length
  blocks = _blocks(request, batches, block, block_tokens)
  if blocks * block_tokens > _MOST_TOKENS:
    raise UserError(
      f"factors: the {len(factors)} batches end a step together only after every {block_tokens:,} "
      "tokens; take factors whose batches divide each other, for example factors=1,2,4,8"
    )
  # The checkpoint's microbatch if it divides every batch, else the largest smaller one that does: all
  # branches share it, so one compiled program runs all of them.
  micro_batch = fitting_micro_batch(base.phase.micro_batch, math.gcd(*batches), base.topology)
  return Branching(
    branches=tuple(
      Branch(
        factor=factor,
        batch=batch,
        tokens_per_step=batch * base.max_target_length,
        steps=blocks * block // batch,
        steps_per_block=block // batch,
      )
      for factor, batch in zip(factors, batches, strict=True)
    ),
    micro_batch=micro_batch,
    per_device_batch_size=Fraction(micro_batch, base.topology.num_devices),
    tokens=blocks * block_tokens,
    block_tokens=block_tokens,
    num_blocks=blocks,
    window_blocks=math.floor(blocks * request.smoothing),
  )


def _batch(base: BranchBase, factor: Fraction) -> int:
  """Returns factor × the checkpoint's batch, which must divide over the data-parallel groups."""
  groups = base.topology.num_batch_groups
  batch = factor * base.phase.batch
  if batch > MOST_SAMPLES:
    raise UserError(
      f"factors: {text(factor)} × batch {base.phase.batch} is {text(batch)} samples, and a step has "
      f"at most {MOST_SAMPLES:,}; for example factors=1,2,4,8"
    )
  if batch % base.topology.num_batch_groups == 0:
    return int(batch)
  near = [size / base.phase.batch for size in nearest_multiples(groups, batch)]
  raise UserError(
    f"factors: {text(factor)} × batch {base.phase.batch} is {text(batch)} samples, which must be a "
    f"positive multiple of {describe_groups(base.topology)}; "
    f"nearest: factor {' or '.join(text(factor) for factor in near)}"
  )


def _blocks(request: BranchRequest, batches: Sequence[int], block: int, block_tokens: int) -> int:
  """Returns the number of blocks of each branch."""
  fewest = math.ceil(FEWEST_BLOCKS / request.smoothing)
  if request.branch_tokens == -1:
    return max(_DEFAULT_BLOCKS, fewest)
  blocks = Fraction(request.branch_tokens, block_tokens)
  what = (
    f"a step of {block} samples"
    if block in batches
    else f"{block} samples: whole steps of {', '.join(map(str, batches))}"
  )
  if blocks < fewest:
    raise UserError(
      f"branch_tokens={request.branch_tokens} is too few: {float(blocks):.3g} times {block_tokens} "
      f"tokens ({what}), and the last smoothing={text(request.smoothing)} of a branch, which is "
      f"judged, needs {FEWEST_BLOCKS}; the smallest that works: "
      f"branch_tokens={fewest * block_tokens}, less with smaller factors"
    )
  if blocks.denominator != 1:
    tokens = nearest_multiples(block_tokens, Fraction(request.branch_tokens))
    near = list(map(text, tokens))
    raise UserError(
      f"branch_tokens={request.branch_tokens} must be a multiple of {block_tokens} tokens "
      f"({what}), so that all branches train on the same samples; nearest: "
      f"{' or '.join(f'branch_tokens={tokens}' for tokens in near)}"
    )
  return int(blocks)
