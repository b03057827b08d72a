"""A whole run with a vocabulary and files of records, and its resume."""

import re

import pytest
from record_files import parquet
from support import SMALLEST
from vocabularies import END, TEXT, huggingface

from maxbatch import train
from maxbatch.run_folder.metrics import read_metrics

SMALL = SMALLEST | {
  "vocab_size": 384,
  "per_device_batch_size": 1,
  "eval_interval": -1,
  "eval_samples": 8,
  "generate_length": 6,
  "prompt": "The naïve line",
}


@pytest.mark.usefixtures("own_cache")
def test_a_run_with_a_vocabulary_writes_text_and_resumes_with_the_same(tmp_path, capsys):
  vocabulary = huggingface(tmp_path / "vocabulary", bos_token=END, eos_token=END)
  parquet(tmp_path / "train-0.parquet", [*TEXT, None, *TEXT * 3])
  parquet(tmp_path / "validation-0.parquet", TEXT[:40])

  def run(**keys: object) -> int:
    given = SMALL | {
      "base_output_directory": tmp_path,
      "dataset_cache_directory": tmp_path / "tokens",
      "dataset_type": "grain",
      "grain_train_files": f"{tmp_path}/*.parquet",
      "tokenizer_type": "huggingface",
      "tokenizer_path": vocabulary,
      "max_bad_records": 1,
    }
    return train.main(["config=base", *(f"{key}={value}" for key, value in (given | keys).items())])

  assert run(steps=4, checkpoint_period=4) == 0
  printed = capsys.readouterr().out
  assert "(parquet, column text): " in printed
  assert "validation: validation-0.parquet" in printed
  assert "files and records skipped: 1 bad\n" in printed
  assert f"train-0.parquet, record {len(TEXT)}: null instead of text\n" in printed
  (sample,) = re.findall(r"text after training\n(.*)\n\nFinished", printed, re.DOTALL)
  assert sample.startswith("The naïve line")
  records = read_metrics(tmp_path / "first_run")
  assert [record["data/skipped_records"] for record in records] == [1] * 5

  # Nothing of the text is made of the last merge, and yet it is another vocabulary.
  path = vocabulary / "tokenizer.json"
  path.write_text(path.read_text() + "\n")
  assert run(steps=6) == 2
  refused = capsys.readouterr().err
  assert "tokenizer is " in refused
  assert "allow_changed_resume=true" in refused
  path.write_text(path.read_text().rstrip())
  assert run(steps=6) == 0
  assert "Resuming after step 4" in capsys.readouterr().out

  assert run(steps=6, vocab_size=264) == 2
  refused = capsys.readouterr().err
  assert "vocab_size=264 must be at least the 300 tokens of tokenizer_type=huggingface" in refused
  assert "vocab_size=300, or vocab_size=384, a multiple of 128" in refused
