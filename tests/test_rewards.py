"""Reward functions in real processes: their rewards, what they raise, and where they hang."""

import concurrent.futures
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from several_processes import free_port
from support import configured

from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware.agreement import Exchange
from maxbatch.hardware.peers import Peers
from maxbatch.rl.checkers import exact, final_number, gsm8k
from maxbatch.rl.reward_calls import Call, make_call
from maxbatch.rl.rewards import Failure, Group, RewardPool, Scores, SharedRewards, check_rewards

MODULE = """
import os
import time


def lengths(prompts, completions, bonus, **columns):
  assert len(prompts) == len(completions) == len(bonus)
  return [len(each) + extra for each, extra in zip(completions, bonus)]


def mine(prompts, completions, **columns):
  if prompts[0] == "raise":
    raise ValueError("I do not like\\nthis one")
  if prompts[0] == "hang":
    time.sleep(3600)
  if prompts[0] == "die":
    os._exit(7)
  return [1.0 for _ in completions]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
  """A module of the user's."""
  (tmp_path / "own_rewards.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  yield "own_rewards"
  sys.modules.pop("own_rewards", None)


def groups(*prompts: str) -> list[Group]:
  return [Group(prompt, ["a", "bbb"], {"bonus": place}) for place, prompt in enumerate(prompts)]


def test_rewards_are_summed_and_a_failure_is_counted_and_scores_zero(module):
  """One start for all: a raise, a hang, a death, and what comes after them. Five seconds are long enough
  for a busy machine to answer."""
  names = f"reward_functions=[{module}:lengths, {module}:mine]"
  rl = configured(names, "reward_timeout_seconds=5", "reward_failure=zero").rl
  with RewardPool(rl) as pool:
    whole = pool.score(groups("x", "y"))
    prompts = ("x", "raise", "die", "z")
    result = pool.score(groups(*prompts))
    late = pool.score(groups("hang", "y"))
    pids = [worker.process.pid for worker in pool._workers]
  np.testing.assert_array_equal(whole.rewards_N, [2, 4, 3, 5])
  assert whole.failures == ()
  np.testing.assert_array_equal(result.rewards_N, [2, 4, 0, 0, 0, 0, 5, 7])
  assert [str(each) for each in result.failures] == [
    "reward function own_rewards:mine, prompt raise: ValueError: I do not like this one "
    "(own_rewards.py:13)",
    "reward function own_rewards:mine, prompt die: its process ended with exit code 7",
  ]
  np.testing.assert_array_equal(late.rewards_N, [0, 0, 3, 5])
  assert [each.problem for each in late.failures] == ["no answer within reward_timeout_seconds=5"]
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_a_failure_stops_the_run_and_names_function_prompt_and_the_way_on(module):
  rl = configured(f"reward_functions=[{module}:mine]", "reward_processes=1").rl
  with RewardPool(rl) as pool, pytest.raises(UserError) as caught:
    pool.score(groups("x", "raise"))
  assert str(caught.value).startswith("reward function own_rewards:mine, prompt raise: ValueError")
  assert "reward_failure=zero" in str(caught.value)


def test_a_process_ends_with_the_one_that_started_it(module):
  rl = configured(f"reward_functions=[{module}:mine]", "reward_processes=1").rl
  with RewardPool(rl) as pool:
    pool.score(groups("x"))
    worker = pool._workers[0]
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(60) < 0


def test_calls_that_hang_are_given_up(module):
  """As when a run is stopped: nobody waits for them, and later calls are answered."""
  rl = configured(f"reward_functions=[{module}:mine]", "reward_processes=2").rl
  with RewardPool(rl) as pool, concurrent.futures.ThreadPoolExecutor(1) as thread:
    pool.score(groups("x", "y"))
    hanging = thread.submit(pool.score, groups("hang", "hang", "x"))
    while not all(worker.call for worker in pool._workers):
      time.sleep(0.01)
    pool.give_up()
    with pytest.raises(concurrent.futures.CancelledError):
      hanging.result(60)
    np.testing.assert_array_equal(pool.score(groups("x", "y")).rewards_N, [1, 1, 1, 1])


# --- several processes ---------------------------------------------------------------------------


class Scored(RewardPool):
  """Rewards that need no process."""

  def score(self, groups):
    for group in groups:
      if group.prompt == "raise":
        raise UserError("no reward for raise")
    rewards = [float(group.prompt) + place for group in groups for place in range(2)]
    failed = [Failure(name, group.prompt, "x") for group in groups for name in "fg"]
    return Scores(np.array(rewards), tuple(failed))


@pytest.fixture
def as_processes(monkeypatch):
  """Calls a function of the number of the process in three of them; what each returns or raises."""
  place, port = threading.local(), free_port()
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  monkeypatch.setattr(jax, "process_index", lambda: place.peers.process)
  monkeypatch.setattr("maxbatch.hardware.agreement.own_peers", lambda: place.peers)
  monkeypatch.setattr("maxbatch.hardware.agreement._exchanges", itertools.repeat(0))

  def call(function):
    def one(number: int):
      place.peers = Peers(60)
      if number:
        place.peers.check_in(f"localhost:{port}", number)
      else:
        place.peers.serve(f"[::]:{port}", 3)
      try:
        return function(number), place.peers
      except (UserError, concurrent.futures.CancelledError) as error:
        return error, place.peers

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
      return zip(*threads.map(one, range(3)), strict=True)

  return call


def test_processes_share_groups_and_all_have_all_rewards(as_processes):
  rl = configured("rl_task=format").rl

  def rewarded(number: int):
    shared = SharedRewards(Scored(rl))
    batches = [groups(*map(str, range(first, first + 5))) for first in (0, 5, 10)]
    return [shared(batch, first) for batch, first in zip(batches, (0, 5, 10), strict=True)]

  all_found, (first, *_) = as_processes(rewarded)
  for result in all_found:
    for start, each in zip((0, 5, 10), result, strict=True):
      numbers = np.arange(start, start + 5)[:, None] + np.arange(2)[None]
      np.testing.assert_array_equal(each.rewards_N, numbers.reshape(-1))
      assert each.num_failures == 5
  assert not first._values  # Nothing is kept of what was said.


def test_a_reward_that_fails_in_one_process_fails_in_all(as_processes):
  result, _ = as_processes(
    lambda number: SharedRewards(Scored(configured("rl_task=format").rl))(groups("0", "raise"), 0)
  )
  assert [type(each) for each in result] == [UserError, *[SaidByAnotherError] * 2]
  assert str(result[0]) == f"process 1 on {socket.gethostname()}: no reward for raise"


def test_an_exchange_with_a_process_that_never_comes_can_be_given_up(as_processes):
  def waits(number: int):
    if number == 2:
      return None
    exchange = Exchange()
    timer = threading.Timer(0.2, exchange.give_up)
    timer.start()
    return exchange(number)

  result, _ = as_processes(waits)
  assert [type(each) for each in result] == [*[concurrent.futures.CancelledError] * 2, type(None)]


# --- one call ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("function", "problem"),
  [
    (lambda prompts, completions, **_: [1.0], "it returned 1 rewards for 2 completions"),
    (lambda prompts, completions, **_: [1.0, float("nan")], "its reward of completion 1 is nan"),
    (lambda prompts, completions, **_: None, "TypeError: 'NoneType' object is not iterable"),
    (lambda prompts, completions: [1.0, 1.0], "unexpected keyword argument 'bonus'"),
    (lambda prompts, completions, **_: ["a", "b"], "ValueError: could not convert string"),
  ],
)
def test_what_is_returned_is_checked(function, problem):
  assert problem in make_call(function, Call(0, "p", ["a", "b"], {"bonus": 1})).problem


def test_numbers_of_any_kind_are_rewards():
  result = make_call(
    lambda prompts, completions: np.array([True, False]), Call(0, "p", ["a", "b"], {})
  )
  assert result.rewards == [1.0, 0.0]


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (["reward_functions=[gsm9k]"], "there is no such reward_function. Did you mean gsm8k?"),
    (["reward_functions=[no_such_file:score]"], "there is no module no_such_file"),
    ([], "nothing says what a good completion is; for example reward_functions=[my_rewards:score]"),
  ],
)
def test_a_function_that_is_not_there_is_found_before_the_run(keys, said):
  with pytest.raises(UserError) as caught:
    check_rewards(configured(*keys).rl)
  assert said in str(caught.value)


def test_a_built_in_task_brings_its_checker():
  assert check_rewards(configured("rl_task=format").rl) == ("exact",)


def test_exact_answers():
  assert exact(["p"] * 3, ["12", " 12\n", "21"], answer=["12"] * 3) == [1, 1, 0]


@pytest.mark.parametrize(
  ("text", "number"),
  [
    ("He has 3 + 4 = 7 apples.\n#### 7", 7),
    ("#### 1,234", 1234),
    ("#### $1,234.50 in all, of 3", 1234.5),
    ("so the answer is 18.", 18),
    ("-3", -3),
    ("first 5, then 70%", 70),
    ("it is .5", 0.5),
    ("####", None),
    ("none", None),
    ("1,000,000", 10**6),
  ],
)
def test_the_final_number_of_a_text(text, number):
  assert final_number(text) == number


def test_gsm8k_compares_final_numbers():
  answer = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
  completions = ["72", "#### 72.00", "#### 73", "the 72 clips cost 3", "?"]
  assert gsm8k(["p"] * 5, completions, answer=[answer] * 5) == [1, 1, 0, 0, 0]


def test_the_processes_start_without_jax():
  program = "import sys; sys.modules['jax'] = None; import maxbatch.rl.reward_worker"
  subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
