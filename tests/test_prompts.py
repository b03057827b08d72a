"""Prompts of tasks and of files, and the stream of them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import configured

from maxbatch.batch.prompt_epochs import PromptEpochs
from maxbatch.errors import UserError
from maxbatch.rl.checkers import exact, gsm8k
from maxbatch.rl.prompt_set import read_prompts
from maxbatch.rl.prompts import Prompt, Prompts, PromptStream, epoch_size
from maxbatch.rl.tasks import TASKS, Task, is_held_out, task_named

GSM8K = [
  {"question": f"What is {n} + 1? ü", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}", "id": n}
  for n in range(40)
]


def keys(path: Path, *more: str) -> list[str]:
  return [
    "dataset_type=grain",
    f"grain_train_files={path}",
    "train_data_columns=[question, answer]",
    "eval_data_columns=[question, answer]",
    *more,
  ]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
  path = tmp_path / "train.jsonl"
  path.write_text("".join(json.dumps(each) + "\n" for each in GSM8K))
  return path


SORT = ("s776051=", "015677")
FORMAT = ("f4672=", "<4672>")

# --- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_is_a_function_of_seed_and_number(name):
  task = task_named(name)
  numbers = [5, 3, 5, 0, 10**12]
  assert [task.prompt(7, n) for n in numbers] == [task.prompts(7).at(n) for n in numbers]
  prompts = {task.prompt(7, n).text for n in range(200)}
  assert len(prompts) > 150
  assert task.prompt(7, 3) != task.prompt(8, 3)
  assert task.prompt(7, 3, "validation") != task.prompt(7, 3)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_for_validation_are_never_trained_on(name):
  """As many as configs/post_train/rl.yml trains on, its warm start included, and the 64 it evaluates on."""
  task = task_named(name)
  held_out = {task.prompt(0, number, "validation").text for number in range(64)}
  trained = {task.prompt(0, number).text for number in range(120 * 16)}
  shown = {task.demonstration(0, number)[0] for number in range(150 * 64)}
  assert len(held_out) > 60
  assert not held_out & (trained | shown)
  assert len(trained) > 0.8 * 120 * 16


def test_a_task_of_one_prompt_has_none_to_hold_out():
  task = Task(lambda draws: ("only=", str(draws(2))), lambda draws, text, answer: answer)
  part = "train" if is_held_out("only=") else "validation"
  with pytest.raises(UserError, match="too few to hold one in eight out"):
    task.prompt(0, 0, part)


def test_what_the_tasks_ask_stays_as_it_is():
  """A resumed run goes on with the prompts that it would have had."""
  assert task_named("mix-sort").prompt(0, 0) == Prompt(SORT[0], {"answer": SORT[1]})
  assert task_named("format").prompt(3, 14) == Prompt(FORMAT[0], {"answer": FORMAT[1]})


def test_answers_are_right_and_demonstrations_often_are_not():
  for number in range(100):
    prompt = task_named("mix-sort").prompt(1, number)
    digits = prompt.text[1:-1]
    assert prompt.text == f"s{digits}="
    assert 4 <= len(digits) <= 6
    assert exact([prompt.text], ["".join(sorted(digits))], answer=[prompt.columns["answer"]]) == [1]
    prompt = task_named("format").prompt(1, number)
    assert prompt.columns["answer"] == f"<{prompt.text[1:5]}>"
  for name, expected in (("mix-sort", 0.4), ("format", 0.4)):
    task, right = task_named(name), 0
    for number in range(500):
      text, shown = task.demonstration(1, number)
      digits = text[1:-1]
      wanted = "".join(sorted(digits)) if name == "mix-sort" else f"<{digits}>"
      assert sorted(shown.strip("<>")) == sorted(digits)
      right += shown == wanted
    assert expected - 0.07 < right / 500 < expected + 0.12  # Some copies are sorted.


def test_an_unknown_task_offers_the_nearest():
  with pytest.raises(UserError, match="Did you mean mix-sort"):
    task_named("mixsort")


# --- files ---------------------------------------------------------------------------------------


def test_gsm8k_s_layout_from_jsonl_and_parquet(jsonl: Path, tmp_path: Path):
  parquet = tmp_path / "train.parquet"
  pq.write_table(pa.Table.from_pylist(GSM8K), parquet, row_group_size=7)
  results = [
    read_prompts(configured(*keys(path), "eval_fraction=0.1").data) for path in (jsonl, parquet)
  ]
  for data in results:
    assert (data.train.count, data.validation.count, data.num_skipped) == (36, 4, 0)
    prompts = [data.train.at(n) for n in range(36)] + [data.validation.at(n) for n in range(4)]
    assert prompts == [Prompt(e["question"], {"answer": e["answer"]}) for e in GSM8K]
  right = results[0].train.at(11)
  assert gsm8k([right.text] * 2, ["12", "#### 13"], answer=[right.columns["answer"]] * 2) == [1, 0]


def test_columns_of_any_kind_go_to_the_reward_functions(jsonl: Path):
  data = read_prompts(configured(*keys(jsonl), "train_data_columns=[question, id]").data)
  assert data.train.at(3).columns == {"id": 3}


def test_files_for_validation_are_its_own(jsonl: Path, tmp_path: Path):
  other = tmp_path / "test.jsonl"
  other.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
  data = read_prompts(configured(*keys(jsonl, f"grain_eval_files={other}")).data)
  assert (data.train.count, data.validation.count) == (40, 1)


def test_bad_records_are_counted_and_more_are_refused(jsonl: Path):
  lines = jsonl.read_text().splitlines()
  lines[2], lines[5], lines[7] = "not JSON", '{"question": 3, "answer": ""}', '{"question": "q"}'
  jsonl.write_text("\n".join(lines) + "\n")
  data = read_prompts(configured(*keys(jsonl), "max_bad_records=3", "eval_fraction=0").data)
  assert (data.train.count, data.validation.count, data.num_skipped) == (37, 0, 3)
  with pytest.raises(UserError, match=r"3 bad records, and max_bad_records=2; .*line 3"):
    read_prompts(configured(*keys(jsonl), "max_bad_records=2").data)


@pytest.mark.parametrize(
  ("more", "said"),
  [
    ("train_data_columns=[task, answer]", "40 bad records"),
    ("train_data_columns=[]", "the first of them is the prompt"),
    ("dataset_type=text", "prompts are read from files of records; for example dataset_type=grain"),
    ("grain_train_files=nowhere.jsonl", "nowhere.jsonl"),
  ],
)
def test_data_without_prompts_are_refused(jsonl: Path, more: str, said: str):
  with pytest.raises(UserError) as caught:
    read_prompts(configured(*keys(jsonl), more).data)
  assert said in str(caught.value)


# --- the stream ----------------------------------------------------------------------------------


def numbered(count: int) -> Prompts:
  return Prompts(lambda number: Prompt(str(number), {}), count)


def test_every_prompt_comes_once_per_epoch_in_another_order():
  stream = PromptStream(numbered(10), PromptEpochs(10, 4, "carry"), seed=3)
  batches = [[int(prompt.text) for prompt in stream.batch(first)] for first in range(0, 20, 4)]
  taken = [number for batch in batches for number in batch]
  assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
  assert taken[:10] != taken[10:]
  assert [int(stream(index).text) for index in (7, 3)] == [taken[7], taken[3]]


def test_dropped_prompts_are_others_in_another_epoch():
  stream = PromptStream(numbered(10), PromptEpochs(10, 4, "drop"), seed=3)
  epochs = [[int(stream(index).text) for index in range(at, at + 8)] for at in range(0, 80, 8)]
  assert all(len(set(epoch)) == 8 for epoch in epochs)
  assert set().union(*map(set, epochs)) == set(range(10))


def test_a_task_without_end_is_not_shuffled():
  stream = PromptStream(numbered(-1), PromptEpochs(-1, 4, "carry"), seed=3)
  assert [prompt.text for prompt in stream.batch(4)] == ["4", "5", "6", "7"]


def test_an_epoch_has_as_many_prompts_as_there_are():
  assert epoch_size(-1, numbered(10)) == 10
  assert epoch_size(5, numbered(10)) == 5 == epoch_size(5, numbered(-1))
  assert epoch_size(-1, numbered(-1)) == -1
  with pytest.raises(
    UserError, match=r"num_prompts=11: the data have 10 prompts; .*num_prompts=10"
  ):
    epoch_size(11, numbered(10))
