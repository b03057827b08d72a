"""What hostile calls are about: runs, models, tokenizers and data, whole, and damaged one file at a time."""

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
from hf_folders import llama_tensors, write_folder
from hostile_calls import TEMPLATES
from processes import small_run
from record_files import arrow_stream, jsonl, parquet
from test_chat import CHATML, ENDS, SPECIAL, TALK
from vocabularies import huggingface
from written_runs import write_run

from maxbatch import convert, train

VOCABULARY = 304
"""Of the folder's model, a little more than its tokenizer's."""
LORA = "lora_rank=2 load_parameters_path={run} run_name=lora steps=1"


class Places:
  """Paths by name, each made when it is first asked for; `name!damage!file` is a damaged copy."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._made: dict[str, pathlib.Path] = {}
    self.training = small_run(folder / "runs", folder / "text.txt", folder / "cache")

  def __getitem__(self, name: str) -> pathlib.Path:
    if name not in self._made:
      self._made[name] = self._make(name)
    return self._made[name]

  def forget_damaged(self) -> None:
    """Removes the damaged copies: each call looks at all files before and after."""
    shutil.rmtree(self.folder / "damaged", ignore_errors=True)
    self._made = {name: path for name, path in self._made.items() if "!" not in name}

  def _make(self, name: str) -> pathlib.Path:
    if "!" in name:
      original, damage, *file = name.split("!")
      return self._damaged(self[original], damage, "".join(file))
    if name in ("nothing", "new"):
      return self.folder / name
    path = self.folder / "runs" / name if name in ("run", "st", "lora") else self.folder / name
    if not path.exists():
      path.parent.mkdir(exist_ok=True)
      getattr(self, f"_write_{name.partition('.')[0].replace('-', '_')}")(path)
    return path

  def _damaged(self, original: pathlib.Path, damage: str, file: str) -> pathlib.Path:
    """A copy of a file, or of a folder in which one file is damaged."""
    number = sum("!" in name for name in self._made)
    copy = self.folder / "damaged" / str(number) / original.name
    copy.parent.mkdir(parents=True)
    if original.is_file():
      shutil.copy(original, copy)
      apply(damage, copy)
    else:
      shutil.copytree(original, copy)
      apply(damage, max(copy.glob(file), default=copy / file))
    return copy

  def _write_run(self, path: pathlib.Path) -> None:
    own = [f"run_name={path.name}", "steps=2", "checkpoint_period=1", "num_simulated_devices=8"]
    assert train.main([*self.training, *own]) == 0

  def _write_lora(self, path: pathlib.Path) -> None:
    keys = LORA.format(run=self["run"]).split()
    assert train.main([*self.training, *keys, "num_simulated_devices=8"]) == 0
    assert path.is_dir()

  def _write_st(self, path: pathlib.Path) -> None:
    runs = f"base_output_directory={path.parent}"
    assert convert.main([f"from_hf={self['hf']}", runs, f"run_name={path.name}"]) == 0

  def _write_hf(self, path: pathlib.Path) -> None:
    _write_model(path, 1)

  def _write_shards(self, path: pathlib.Path) -> None:
    _write_model(path, 3)

  def _write_tokenizer(self, path: pathlib.Path) -> None:
    huggingface(path, SPECIAL, **ENDS, chat_template=CHATML)

  def _write_records(self, path: pathlib.Path) -> None:
    write = {".jsonl": jsonl, ".parquet": parquet, ".arrow": arrow_stream}[path.suffix]
    write(path, [f"the number {n} follows {n - 1}" for n in range(300)])

  def _write_chats(self, path: pathlib.Path) -> None:
    jsonl(path, [TALK] * 61, "messages")

  def _write_questions(self, path: pathlib.Path) -> None:
    lines = [json.dumps({"text": f"{n}+1=", "answer": f"{n + 1}"}) for n in range(64)]
    path.write_text("".join(f"{line}\n" for line in lines))

  def _write_mixture(self, path: pathlib.Path) -> None:
    path.write_text(json.dumps({"a": {"path": str(self.folder / "text.txt"), "weight": 1}}))

  def _write_schedule(self, path: pathlib.Path) -> None:
    path.write_text("[[0, 8], [16, 16]]\n")

  def _write_own(self, path: pathlib.Path) -> None:
    path.write_text("base_config: base\nsteps: 3\n")

  def _write_prompts(self, path: pathlib.Path) -> None:
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

  def _write_compile_report(self, path: pathlib.Path) -> None:
    path.write_text('[{"tokens_per_second": 1}]')

  def _write_other(self, path: pathlib.Path) -> None:
    path.write_text("another text, and another one\n" * 99)

  def _write_noisy(self, path: pathlib.Path) -> None:
    write_run(path)

  def _write_branched(self, path: pathlib.Path) -> None:
    write_run(path / "run")
    step = path / "run-critical_batch" / "step-2"
    step.mkdir(parents=True)
    (step / "critical_batch.json").write_text("{}")

  def _write_damaged_runs(self, path: pathlib.Path) -> None:
    shutil.copytree(self["run"].parent, path)

  def _write_empty(self, path: pathlib.Path) -> None:
    path.mkdir()

  def _write_file(self, path: pathlib.Path) -> None:
    path.write_text("not what you take me for\n")


def _write_model(path: pathlib.Path, num_files: int) -> None:
  tensors = llama_tensors()
  rows = np.ones((VOCABULARY, 16), np.float32)
  tensors |= {"model.embed_tokens.weight": rows, "lm_head.weight": rows * 2}
  write_folder(path, tensors, num_files=num_files, vocab_size=VOCABULARY)
  huggingface(path, SPECIAL, **ENDS, chat_template=CHATML)


def _longer_header(content: bytes) -> bytes:
  return (2**62).to_bytes(8, "little") + content[8:]


def _shorter_header(content: bytes) -> bytes:
  return (9).to_bytes(8, "little") + content[8:]


def _wrong_offsets(content: bytes) -> bytes:
  return content.replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1)


def _wrong_dtype(content: bytes) -> bytes:
  return content.replace(b'"F32"', b'"Q99"', 1)


def _twice(content: bytes) -> bytes:
  first = content.partition(b"\n")[0]
  return content + (first if first.startswith(b"{") else b"steps: 3\nsteps: 4") + b"\n"


def _flipped(content: bytes) -> bytes:
  middle = len(content) // 2
  return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
  "binary": lambda content: bytes(range(256)) * 4,
  "bomb": lambda content: BOMB,
  "broken-line": lambda content: content + b'{"text": "cut\n',
  "deep": lambda content: b"[" * 100_000,
  "empty": lambda content: b"",
  "flipped": _flipped,
  "list": lambda content: b"[1, 2]",
  "longer-header": _longer_header,
  "null": lambda content: b"null",
  "number": lambda content: b"7",
  "shorter-header": _shorter_header,
  "text": lambda content: b"not what you take me for\n",
  "truncated": lambda content: content[: len(content) // 2],
  "twice": _twice,
  "utf-16": lambda content: "base_config: base\n".encode("utf-16"),
  "words": lambda content: (
    b'{"step": "a", "gns/total_tokens": "b", "tokens": {}, "step_seconds": []}\n' * 4
  ),
  "talk": lambda content: b'{"messages": [{"role": "user"}]}\n',
  "rows-bomb": lambda content: b"batch_schedule: [[%s]]\n" % b", ".join(_LINES),
  "wrong-dtype": _wrong_dtype,
  "wrong-object": lambda content: b'{"a": {"b": []}, "weight_map": 3}',
  "wrong-offsets": _wrong_offsets,
}
"""Other content of a file."""
_LINES = [b"&a0 [x, x, x, x, x, x, x, x, x]"]
_LINES += [b"&a%d [%s]" % (n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)]
BOMB = b"\n".join(b"a%d: %s" % line for line in enumerate(_LINES))
"""YAML whose aliases are 9 to the power of 12 values."""


def apply(damage: str, path: pathlib.Path) -> None:
  """Damages a file, or what stands in its place."""
  if damage.startswith("template-"):
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(content | {"chat_template": TEMPLATES[damage.partition("-")[2]]}))
    return
  if damage in DAMAGE:
    content = path.read_bytes()
    damaged = DAMAGE[damage](content)
    assert damaged != content, (damage, path)
    path.write_bytes(damaged)
    return
  if path.is_dir():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
  if damage == "folder":
    path.mkdir()
  elif damage == "loop":
    path.symlink_to(path)
  elif damage == "file":
    path.write_text("not what you take me for\n")
  else:
    assert damage == "missing", damage
