"""Small vocabularies, made with the libraries that read them."""

import base64
import io
import json
from pathlib import Path

import sentencepiece
import tokenizers

TEXT = [f"The {what} of line {n} is here, naïve and plain.\n" for n in range(60) for what in "abc"]
END = "<|endoftext|>"


def huggingface(folder: Path, special: tuple[str, ...] = (END,), **declared: object) -> Path:
  """A byte-level BPE like GPT-2's, with `declared` in its tokenizer_config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=list(special),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(TEXT, trainer)
  made.save(str(folder / "tokenizer.json"))
  if declared:
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
  return folder


def sentencepiece_model(folder: Path) -> Path:
  """A model with byte fallback, like Llama 2's: it has no pad token."""
  folder.mkdir(parents=True, exist_ok=True)
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXT),
    model_writer=model,
    vocab_size=320,
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    minloglevel=2,
  )
  (folder / "tokenizer.model").write_bytes(model.getvalue())
  return folder


def tiktoken_file(folder: Path) -> Path:
  """All bytes and a few merges, with Llama 3's special tokens after them."""
  folder.mkdir(parents=True, exist_ok=True)
  tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"in", b" l", b"the"]
  lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
  (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
  return folder


MAKERS = {
  "huggingface": lambda folder: huggingface(folder, bos_token=END, eos_token={"content": END}),
  "sentencepiece": sentencepiece_model,
  "tiktoken": tiktoken_file,
}
