"""Vocabularies of other libraries: text to tokens to text, special tokens, and what is refused."""

import dataclasses
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from support import base, config
from token_caches import starts_of
from vocabularies import END, MAKERS, huggingface, sentencepiece_model, tiktoken_file

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.checkpoints.record import identity
from maxbatch.config.load import load_config, without_effect
from maxbatch.config.schema import DataConfig
from maxbatch.data.document_rows import TokenWindows
from maxbatch.data.registry import build_dataset, build_tokenizer
from maxbatch.data.rows import Dataset
from maxbatch.data.tokenizer import Tokenizer, ordinary_ids
from maxbatch.data.tokenizers.vocabulary_file import bounded_pieces
from maxbatch.errors import UserError
from maxbatch.hardware.devices import find_devices
from maxbatch.training.build import build_trainer

WORDS = "The naïve line 7,\n  and a line of 日本語 🎉.\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
  return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in MAKERS.items()}


def keys(kind: str, path: Path | str, **more: object) -> DataConfig:
  given = {"tokenizer_type": kind, "tokenizer_path": str(path)} | more
  return dataclasses.replace(base().data, **given)


def refusal(kind: str, path: Path | str, **more: object) -> str:
  with pytest.raises(UserError) as caught:
    build_tokenizer(keys(kind, path, **more))
  return str(caught.value)


def special(tokenizer: Tokenizer) -> tuple[int, int, int]:
  return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id


@pytest.mark.parametrize("kind", MAKERS)
def test_text_comes_back(folders, kind):
  tokenizer = build_tokenizer(keys(kind, folders[kind]))
  ids = tokenizer.encode(WORDS.encode())
  assert len(ids) < len(WORDS.encode()), "no two bytes are one token"
  assert ids.max() < tokenizer.vocab_size
  assert tokenizer.decode(ids) == WORDS
  assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == WORDS
  assert tokenizer.decode(np.append(ids, 10**6)) == WORDS, "an id that the model has and it not"
  again = pickle.loads(pickle.dumps(tokenizer))
  assert again.version == tokenizer.version
  np.testing.assert_array_equal(again.encode(WORDS.encode()), ids)


@pytest.mark.parametrize("kind", MAKERS)
def test_half_a_character_is_shown_as_such(folders, kind):
  tokenizer = build_tokenizer(keys(kind, folders[kind]))
  ids = tokenizer.encode("🎉".encode())
  assert "\ufffd" in tokenizer.decode(ids[:-1])
  assert tokenizer.decode(tokenizer.encode("a🎉".encode()[:-1])).startswith("a")


@pytest.mark.parametrize(
  ("kind", "name"),
  [("huggingface", END), ("sentencepiece", "</s>"), ("tiktoken", "<|end_of_text|>")],
)
def test_no_text_ends_a_document(folders, kind, name):
  tokenizer = build_tokenizer(keys(kind, folders[kind]))
  ids = tokenizer.encode(f"a{name}b".encode())
  assert tokenizer.eos_id not in ids
  assert tokenizer.decode(ids) == f"a{name}b"


def test_the_tokenizer_says_which_tokens_are_special(folders):
  gpt2 = build_tokenizer(keys("huggingface", folders["huggingface"]))
  assert special(gpt2) == (0, 0, 0), "one token for all, as GPT-2 has it"
  llama2 = build_tokenizer(keys("sentencepiece", folders["sentencepiece"] / "tokenizer.model"))
  assert special(llama2) == (1, 2, 2), "no pad token: the end of a document fills up"
  llama3 = build_tokenizer(keys("tiktoken", folders["tiktoken"]))
  assert special(llama3) == (261, 262, 265)
  assert llama3.vocab_size == 261 + 256
  assert 0 not in ordinary_ids(gpt2)


def test_the_configuration_names_special_tokens(tmp_path):
  path = huggingface(tmp_path, ("<s>", "</s>", "<pad>"))
  named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
  assert special(build_tokenizer(keys("huggingface", path, **named))) == (0, 1, 2)
  message = refusal("huggingface", path, **(named | {"eos_token": "</s"}))
  assert f"eos_token=</s: tokenizer_type=huggingface tokenizer_path={path}" in message
  assert "Did you mean </s>?" in message
  assert "Its special tokens: <s>, </s>, <pad>" in message


def test_special_tokens_that_nobody_names_are_asked_for(tmp_path):
  path = huggingface(tmp_path)
  message = refusal("huggingface", path)
  assert "does not say which token begins a document, and add_bos=true" in message
  assert f"bos_token='{END}' or add_bos=false" in message
  build_tokenizer(keys("huggingface", path, add_bos=False, eos_token=END))
  build_tokenizer(keys("huggingface", path, bos_token=END, eos_token=END))


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (True, False)])
def test_documents_are_begun_and_ended_as_asked_for(folders, tmp_path, bos, eos):
  (tmp_path / "in").mkdir()
  for name in ("a.txt", "b.txt"):
    (tmp_path / "in" / name).write_text("The line of here")
  data = keys("tiktoken", folders["tiktoken"], add_bos=bos, add_eos=eos)
  dataset = read(data, tmp_path)
  tokenizer = build_tokenizer(data)
  text = tokenizer.encode(b"The line of here").tolist()
  one = [tokenizer.bos_id] * bos + text + [tokenizer.eos_id] * eos
  assert isinstance(dataset.train, TokenWindows)
  cache = dataset.train.cache
  assert cache.read(0, 1000).tolist() == one * 2
  assert starts_of(cache) == [0, len(one)]
  # Rows know where documents begin without a token that says so.
  rows = dataset.train.rows(np.arange(len(dataset.train)))
  flat = rows["positions"].reshape(-1)[: len(one) + 1]
  assert flat[len(one)] == 0
  assert rows["weights"].reshape(-1)[len(one) - 1] == 0


def read(data: DataConfig, place: Path) -> Dataset:
  changes = {
    "dataset_path": str(place / "in"),
    "dataset_cache_directory": str(place / "cache"),
    "eval_fraction": 0.0,
  }
  return build_dataset(dataclasses.replace(data, **changes), 4)


def test_another_vocabulary_is_another_cache_and_another_run(folders, tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "a.txt").write_text("The line of here")
  path = tmp_path / "vocabulary"
  path.write_bytes((folders["tiktoken"] / "tokenizer.model").read_bytes())
  data = keys("tiktoken", path)
  first = read(data, tmp_path)
  lines = path.read_text().splitlines()
  lines[-1] = "YWI= 260"  # The last merge is another one, which no word here has.
  path.write_text("\n".join(lines))
  second = read(data, tmp_path)
  assert first.fingerprint == second.fingerprint, "the merge makes no difference to this text"
  assert len(list((tmp_path / "cache").glob("*.tokens"))) == 2
  run = dataclasses.replace(config(), data=data)
  assert identity(run, first)["tokenizer"] != identity(run, second)["tokenizer"]
  assert "tokenizer" not in identity(config(), first), "old checkpoints of bytes go on"


def test_a_model_with_too_few_logits_is_refused_with_sizes_that_work(folders):
  def build(vocab_size: int) -> None:
    given = {"tokenizer_type": "tiktoken", "tokenizer_path": folders["tiktoken"]}
    run = config(vocab_size=vocab_size, **given)
    plan = plan_batches(run.batch, run.run, topology(run.mesh, num_devices=8))
    build_trainer(run, plan, find_devices(run).devices)

  with pytest.raises(UserError) as caught:
    build(264)
  message = str(caught.value)
  assert message.startswith("vocab_size=264 must be at least the 517 tokens of tokenizer_type=tik")
  assert "for example vocab_size=517, or vocab_size=640, a multiple of 128" in message
  build(517)
  build(640)


def test_a_file_of_another_kind_is_named(folders):
  for kind, folder in folders.items():
    (file,) = (each for each in folder.iterdir() if each.name.startswith("tokenizer."))
    for other in MAKERS:
      if other != kind:
        message = refusal(other, file)
        assert message.startswith(f"tokenizer_type={other} tokenizer_path={file}: this is not such")
        assert f"tokenizer_type={kind} has it" in message


@pytest.mark.parametrize("kind", MAKERS)
def test_a_damaged_or_missing_file_is_named(folders, kind, tmp_path):
  (file,) = (each for each in folders[kind].iterdir() if each.name.startswith("tokenizer."))
  damaged = tmp_path / file.name
  damaged.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  assert f"tokenizer_type={kind} tokenizer_path={damaged}: this is" in refusal(kind, damaged)
  assert f"cannot read {tmp_path}/no: No such file" in refusal(kind, tmp_path / "no")
  message = refusal(kind, "s3://b/tokenizer")
  assert (
    "tokenizer_path=s3://b/tokenizer: a vocabulary cannot be read from a URL; copy it" in message
  )
  (tmp_path / "empty").mkdir()
  assert "the folder holds no tokenizer." in refusal(kind, tmp_path / "empty")
  assert f"tokenizer_type={kind} needs the vocabulary's file" in refusal(kind, "")


def test_a_damaged_configuration_beside_it_is_named(tmp_path):
  path = huggingface(tmp_path)
  (path / "tokenizer_config.json").write_text("{")
  assert f"{path}/tokenizer_config.json beside it cannot be read" in refusal("huggingface", path)


@pytest.mark.parametrize(
  ("kind", "package"),
  [("huggingface", "tokenizers"), ("sentencepiece", "sentencepiece"), ("tiktoken", "tiktoken")],
)
def test_a_missing_library_is_named_with_what_installs_it(folders, monkeypatch, kind, package):
  monkeypatch.setitem(sys.modules, package, None)
  message = refusal(kind, folders[kind])
  assert f"tokenizer_type={kind}" in message
  assert f"needs the package {package}, which cannot be imported" in message
  assert "pip install 'maxbatch[data]'" in message


def test_bytes_need_no_vocabulary():
  with pytest.raises(UserError, match="tokenizer_path=x has no effect with tokenizer_type=byte"):
    without_effect(load_config(["config=base", "tokenizer_path=x"]))


def test_long_runs_are_divided_and_others_are_not():
  text = "ab cd " * 100 + "x" * 60_000 + " y " + " " * 30_000
  pieces = list(bounded_pieces(text))
  assert "".join(pieces) == text
  assert [len(piece) for piece in pieces] == [600 + 25_000, 25_000, 10_000 + 3 + 24_999, 5_001]
  assert list(bounded_pieces(WORDS * 100)) == [WORDS * 100]
  assert [len(piece) for piece in bounded_pieces("a " * 300_000)] == [400_000, 200_000]


@pytest.mark.parametrize("maker", [tiktoken_file, sentencepiece_model])
def test_a_run_of_a_million_characters_is_tokenized(maker, tmp_path):
  kind = "tiktoken" if maker is tiktoken_file else "sentencepiece"
  tokenizer = build_tokenizer(keys(kind, maker(tmp_path)))
  assert tokenizer.decode(tokenizer.encode(b"x" * 10**6)) == "x" * 10**6
