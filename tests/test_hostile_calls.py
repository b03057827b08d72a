"""Hundreds of calls that nobody means: each ends with exit code 2 and a sentence, and harms no folder.

Beside test_hostile_values.py, which tries every key with every hostile value before anything is read:
here commands run, on damaged runs, models, tokenizers and data. Calls are of hostile_calls.py.
"""

import collections
import pathlib
from collections.abc import Iterator

import hostile_calls
import pytest
from hostile_runner import Runner

PARTS = 24
"""Tests; the quick tier runs the first."""
CALLS = sorted(set(hostile_calls.every()))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
  folder = tmp_path_factory.mktemp("hostile")
  (folder / "here").mkdir()
  (folder / "here" / "configs").symlink_to(pathlib.Path(__file__).parents[1] / "configs")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.chdir(folder / "here")
    with Runner(folder) as made:
      yield made


@pytest.mark.parametrize("part", range(PARTS))
def test_a_hostile_call_ends_with_a_sentence_and_harms_nothing(runner, part):
  outcomes = [runner(call) for call in CALLS[part::PARTS]]
  wrong = [
    f"{each.call}\n  {', '.join(each.faults)}\n  {each.message[-600:]}"
    for each in outcomes
    if each.faults
  ]
  assert not wrong, "\n".join(wrong)


def test_validation_data_of_which_no_token_counts_are_no_division_by_zero(runner):
  chat, tokenizer = hostile_calls.CHATS, "<tokenizer!template-answers!tokenizer_config.json>"
  outcome = runner(f"{chat} run_name=other tokenizer_path={tokenizer}")
  assert outcome.code == 2
  assert "no token of the validation data counts in the loss; give others" in outcome.message


def test_there_are_500_of_every_new_command():
  counts = collections.Counter(call.split()[0] for call in CALLS)
  assert counts.total() >= 500
  assert min(counts[name] for name in ("advise", "convert", "sample", "train_rl", "train")) >= 40
  assert min(counts[name] for name in ("report", "runs", "plan", "critical_batch")) >= 5
