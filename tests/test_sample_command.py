"""maxbatch sample: from a checkpoint and prompts to texts, or to a sentence that says why not."""

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
from damage import flip_bits
from processes import small_run
from support import base
from test_chat import CHATML, ENDS, SPECIAL, keys
from vocabularies import END, huggingface

from maxbatch import convert, sample, train
from maxbatch.checkpoints.find import config_of
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.tokenizer import ByteTokenizer
from maxbatch.data.tokenizers.libraries import HuggingFaceTokenizer
from maxbatch.errors import UserError
from maxbatch.sampling.requests import PromptEncoder, config_of_folder, ends_of_folder, read_prompts
from maxbatch.sampling.text import TextStream, text_after

SHORT = "max_new_tokens=6"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The folder of a run of two checkpoints, on two devices that share the parameters."""
  folder = tmp_path_factory.mktemp("runs")
  given = small_run(folder, folder / "text.txt", folder / "cache")
  own = ["run_name=tiny", "steps=2", "checkpoint_period=1", "ici_fsdp_parallelism=2"]
  assert train.main([*given, *own, "ici_data_parallelism=4"]) == 0
  return folder / "tiny"


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]):
  """What the command prints elsewhere than on a terminal: the objects of its lines."""

  def written(*arguments: object) -> list[dict[str, object]]:
    capsys.readouterr()
    code = sample.main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert (code, output.err) == (0, "")
    return [json.loads(line) for line in output.out.splitlines()]

  return written


def test_a_text_is_the_same_whatever_is_asked_for_beside_it(run, lines, tmp_path):
  both, one = tmp_path / "both.txt", tmp_path / "one.jsonl"
  both.write_text("the number\nabc\n")
  one.write_text('{"prompt": "abc"}\n')
  asked = f"checkpoint={run}", SHORT, "temperature=1"
  result = lines(*asked, f"prompts_file={both}", "num_samples=2", "samples_at_once=3")
  assert [(each["prompt"], each["sample"]) for each in result] == [
    ("the number", 0),
    ("the number", 1),
    ("abc", 0),
    ("abc", 1),
  ]
  assert result[2]["text"] != result[3]["text"]
  assert [each["tokens"] for each in result] == [6] * 4
  assert all(each["log_probability"] < 0 for each in result)
  assert lines(*asked, f"prompts_file={one}") == result[2:3]
  # Written to a file, and by one device instead of eight.
  alone = "ici_fsdp_parallelism=1", "ici_data_parallelism=8", "prompt=abc"
  assert lines(*asked, *alone, "--output", tmp_path / "texts.jsonl") == []
  assert json.loads((tmp_path / "texts.jsonl").read_text()) == result[2]
  assert lines(*asked, "prompt=abc", "seed=1") != result[2:3]


def test_a_terminal_shows_the_text_as_it_comes(run, lines, capsys, monkeypatch):
  asked = f"checkpoint={run / 'checkpoints' / '1'}", "prompt=abc", "max_new_tokens=12"
  (text,) = [each["text"] for each in lines(*asked, "top_k=5", "top_p=0.9", "min_p=0.01")]
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  assert sample.main([*asked, "top_k=5", "top_p=0.9", "min_p=0.01"]) == 0
  shown = capsys.readouterr().out
  assert shown.startswith("abc" + sample.printable(str(text)) + "\n--- 12 tokens in ")
  assert sample.main([*asked, "num_samples=2"]) == 0
  assert "--- 2 of 2\nabc" in capsys.readouterr().out


def test_a_text_ends_at_a_stop_token_which_is_no_part_of_it(run, lines):
  asked = f"checkpoint={run}", "prompt=abc", "max_new_tokens=12", "temperature=0"
  (whole,) = lines(*asked)
  assert not whole["ended"]
  ids = ByteTokenizer().encode(str(whole["text"]).encode())
  end = next(each for each in ids.tolist() if each < 128)
  place = str(whole["text"]).index(chr(end))
  (cut,) = lines(*asked, f"stop=[{json.dumps(chr(end))}]")
  assert (cut["text"], cut["ended"]) == (str(whole["text"])[:place], True)


def test_a_damaged_checkpoint_writes_nothing(run, tmp_path, capsys):
  shutil.copytree(run, tmp_path / "run")
  flip_bits(tmp_path / "run" / "checkpoints" / "2")
  assert sample.main([f"checkpoint={tmp_path / 'run'}", SHORT]) == 2
  output = capsys.readouterr()
  assert output.out == ""
  step = tmp_path / "run" / "checkpoints"
  assert output.err.startswith(f"error: checkpoint={step / '2'} is damaged (")
  assert output.err.endswith(f"take another, for example checkpoint={step / '1'}\n")


def test_a_run_of_several_processes_is_waited_for_by_none(run, tmp_path):
  shutil.copytree(run, tmp_path / "run")
  written = tmp_path / "run" / "config.yml"
  there = "coordinator_address: ''", "num_processes: -1", "process_id: -1"
  content = written.read_text()
  assert all(line in content for line in there)
  for line, other in zip(
    there, ("coordinator_address: a:1", "num_processes: 2", "process_id: 0"), strict=True
  ):
    content = content.replace(line, other)
  written.write_text(content)
  step = tmp_path / "run" / "checkpoints" / "2"
  assert config_of(step, []).distributed == config_of(run / "checkpoints" / "2", []).distributed
  assert config_of(step, ["num_processes=2"]).distributed.num_processes == 2


MISTAKES = {
  "top_p=0": "top_p=0: top_p must be at least 0.001 and at most 1, or -1",
  "temperature=-2": "temperature=-2: temperature must be at least 0, or -1",
  "num_samples=0": "num_samples=0: num_samples must be at least 1",
  "temprature=1": "there is no key 'temprature'. Did you mean temperature?",
  "stop=[ab]": "stop: 'ab' is 2 tokens of this tokenizer, and a text is stopped by one; "
  'for example stop=["b"]',
  "prompts_file=none.txt": "prompts_file=none.txt cannot be read: No such file or directory; give a "
  "file with a prompt in each line",
  "compile_topology=v5e-4": "compile_topology=v5e-4: sampling runs on the devices of this machine; leave it out",
  "base_emb_dim=32": "has other parameters than this run:\n  embedding is [264, 16] there and [264, 32]",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_a_sentence(mistake, run, capsys):
  assert sample.main([f"checkpoint={run}", mistake]) == 2
  output = capsys.readouterr()
  assert output.out == ""
  assert MISTAKES[mistake] in output.err


def test_prompts_come_from_one_place(run, tmp_path, capsys):
  assert sample.main([f"checkpoint={run}", "prompt=a", "prompts_file=b.txt"]) == 2
  assert "prompt=a and prompts_file=b.txt: one of them says" in capsys.readouterr().err
  for content, reason in (
    ("", "is empty"),
    ('"a"\n', "line 1: it has neither a prompt nor messages"),
    ('{"prompt": "a"}\n{\n', "line 2: no JSON"),
    ('{"messages": []}\n', "line 1: it has neither"),
  ):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=reason):
      read_prompts(str(file))


def test_a_folder_of_hugging_face_writes_with_its_own_tokenizer(run, lines, tmp_path):
  """Exported from the run, so that it writes the same, but for where texts begin and end."""
  folder = tmp_path / "model"
  keys = f"checkpoint={run}", f"to_hf={folder}", f"config={run / 'config.yml'}"
  assert convert.main(keys) == 0
  asked = "prompt=the number", SHORT, "temperature=0"
  with pytest.raises(UserError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
    config_of_folder(folder, [])
  byte = "tokenizer_type=byte", "vocab_size=264", "add_bos=true"
  lines_of_run = lines(f"checkpoint={run}", *asked)
  assert lines(f"checkpoint={folder}", *byte, *asked) == lines_of_run
  huggingface(folder, bos_token=END, eos_token=END)
  assert not config_of_folder(folder, []).data.add_bos
  made = json.loads((folder / "tokenizer.json").read_text())
  made["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [
      {"SpecialToken": {"id": END, "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
  }
  (folder / "tokenizer.json").write_text(json.dumps(made))
  config = config_of_folder(folder, [])
  assert config.data.add_bos
  assert config.batch.max_target_length == config.model.max_position_embeddings == 16
  (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
  assert ends_of_folder(folder) == [7, 9]


def test_a_chat_is_asked_by_its_template(tmp_path):
  huggingface(tmp_path / "model", SPECIAL, **ENDS, chat_template=CHATML)
  data = keys(tmp_path)
  tokenizer = build_tokenizer(data)
  assert isinstance(tokenizer, HuggingFaceTokenizer)
  encode = PromptEncoder(data, tokenizer)
  messages: list[dict[str, object]] = [{"role": "user", "content": "Who?"}]
  text = tokenizer.inner.decode(list(encode("Who?")), skip_special_tokens=False)
  assert text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
  assert encode(messages) == encode("Who?")
  # Prompts are no records: a Hugging Face folder says nothing of where these would come from.
  assert PromptEncoder(keys(tmp_path, dataset_type="text"), tokenizer)("Who?") == encode("Who?")
  special = {token: tokenizer.inner.token_to_id(token) for token in SPECIAL}
  assert encode.ends([]) == [special[END], special["<|im_end|>"]]
  assert encode.ends(["<|im_start|>"])[-1] == special["<|im_start|>"]
  plain = PromptEncoder(base().data, ByteTokenizer())
  assert plain("ab") == (256, 97, 98)
  assert plain("") == (256,)
  with pytest.raises(UserError, match="the run was trained without a chat template"):
    plain(messages)


def test_text_in_pieces_is_the_text(tmp_path):
  tokenizer = ByteTokenizer()
  ids = tokenizer.encode("naïve 🎉!".encode()).tolist()
  shown = TextStream(tokenizer, [104])
  pieces = [shown.more(ids[:end]) for end in range(1, len(ids) + 1)]
  assert "".join(pieces) + shown.more(ids, is_all=True) == "naïve 🎉!"
  assert pieces[2:4] == ["", "ï"]
  cut_off = TextStream(tokenizer, [104])
  assert [cut_off.more(ids[:3]), cut_off.more(ids[:3], is_all=True)] == ["na", "\ufffd"]
  # A space at the beginning stays that of the text.
  model = huggingface(tmp_path / "model", bos_token=END, eos_token=END)
  bpe = build_tokenizer(keys(tmp_path, tokenizer_path=str(model)))
  before, after = (np.asarray(bpe.encode(text)).tolist() for text in (b"The", b" line"))
  assert text_after(bpe, before, after) == " line"
