"""The batches, steps and tokens of branches, and what is refused before anything trains."""

from fractions import Fraction

import pytest

from maxbatch.core.phases import Phase
from maxbatch.core.plan import Position
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.experiments.branching import BranchBase, Branching, BranchRequest, plan_branches


def branches(
  *factors: str | int, batch: int = 32, micro_batch: int = 32, tokens: int = -1, share: str = "1/4"
) -> Branching:
  phase = Phase(1, Position(0, 0), 1, batch, micro_batch)
  base = BranchBase(phase, Topology.of(data=8), 16)
  return plan_branches(base, BranchRequest(tuple(map(Fraction, factors)), tokens, Fraction(share)))


def test_every_branch_makes_whole_steps_of_the_same_samples():
  result = branches(1, 2, 8, tokens=16 * 256 * 16)
  rows = [(b.name, b.batch, b.tokens_per_step, b.steps, b.steps_per_block) for b in result.branches]
  assert rows == [("x1", 32, 512, 128, 8), ("x2", 64, 1024, 64, 4), ("x8", 256, 4096, 16, 1)]
  assert all(b.tokens_per_step * b.steps == result.tokens for b in result.branches)
  assert (result.tokens, result.block_tokens, result.num_blocks) == (65_536, 4096, 16)
  assert (result.window_blocks, result.window_tokens) == (4, 16_384)


def test_batches_that_do_not_divide_each_other_meet_at_their_common_multiple():
  result = branches(1, "3/2", "5/2")
  assert [b.batch for b in result.branches] == [32, 48, 80]
  assert result.block_tokens == 480 * 16
  assert [b.steps_per_block for b in result.branches] == [15, 10, 6]
  assert [b.name for b in result.branches] == ["x1", "x1.5", "x2.5"]


def test_without_a_length_there_are_forty_blocks_or_what_the_window_needs():
  assert branches(4, 1).num_blocks == 40
  assert [b.factor for b in branches(4, 1).branches] == [1, 4]
  assert branches(1, 4, share="0.05").num_blocks == 80


@pytest.mark.parametrize(
  ("factors", "said"),
  [
    ((1, "1e20"), "samples, and a step has at most 1,099,511,627,776"),
    ((1, "1e999"), "samples, and a step has at most 1,099,511,627,776"),
    (
      [1, *(n for n in range(2, 98) if all(n % d for d in range(2, n)))],
      "end a step together only",
    ),
  ],
)
def test_factors_that_no_branch_can_have_are_refused_at_once(factors, said):
  with pytest.raises(UserError, match=said):
    branches(*factors)


@pytest.mark.parametrize(
  ("factors", "micro_batch", "expected"),
  [((1, 2), 32, 32), ((1, 2), 8, 8), (("0.5", 1), 32, 16), (("0.75", 1), 32, 8), ((2, 3), 24, 16)],
)
def test_the_microbatch_stays_or_becomes_the_largest_that_divides_all(
  factors, micro_batch, expected
):
  result = branches(*factors, micro_batch=micro_batch)
  assert result.micro_batch == expected
  assert result.per_device_batch_size == Fraction(expected, 8)


def test_the_window_is_whole_blocks_and_no_more_than_its_share():
  assert branches(1, 2, tokens=19 * 1024).window_blocks == 4
  assert branches(1, 2, tokens=20 * 1024).window_blocks == 5


def test_a_folder_s_name_has_no_slash():
  assert branches("1/3", 1, batch=24, micro_batch=8).branches[0].name == "x1_3"


@pytest.mark.parametrize(
  ("arguments", "keys", "message"),
  [
    (
      (0.1, 1),
      {},
      "factors: 0.1 × batch 32 is 3.2 samples, which must be a positive multiple of the 8 "
      "data-parallel groups (data 8 × fsdp 1); nearest: factor 0.25",
    ),
    (
      (1, 1.1),
      {},
      "factors: 1.1 × batch 32 is 35.2 samples, which must be a positive multiple of the 8 "
      "data-parallel groups (data 8 × fsdp 1); nearest: factor 1 or 1.25",
    ),
    (
      (1, 2),
      {"tokens": 20_000},
      "branch_tokens=20000 must be a multiple of 1024 tokens (a step of 64 samples), so that all "
      "branches train on the same samples; nearest: branch_tokens=19456 or branch_tokens=20480",
    ),
    (
      (2, 3),
      {"tokens": 50_000},
      "branch_tokens=50000 must be a multiple of 3072 tokens (192 samples: whole steps of 64, 96), "
      "so that all branches train on the same samples; nearest: branch_tokens=49152 or "
      "branch_tokens=52224",
    ),
    (
      (1, 2),
      {"tokens": 10_000},
      "branch_tokens=10000 is too few: 9.77 times 1024 tokens (a step of 64 samples), and the "
      "last smoothing=0.25 of a branch, which is judged, needs 4; the smallest that works: "
      "branch_tokens=16384, less with smaller factors",
    ),
  ],
)
def test_what_does_not_work_names_what_does(arguments, keys, message):
  with pytest.raises(UserError) as caught:
    branches(*map(str, arguments), **keys)
  assert str(caught.value) == message


@pytest.mark.parametrize("tokens", [19_456, 20_480, 16_384])
def test_the_lengths_that_are_offered_work(tokens):
  assert branches(1, 2, tokens=tokens).tokens == tokens
