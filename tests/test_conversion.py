"""Weights of Hugging Face folders, in and out: the same bits, or a refusal that leaves nothing."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from hf_folders import (
  BESIDE,
  BFLOAT16,
  CONFIG,
  D,
  H,
  L,
  N,
  V,
  assert_same_bits,
  llama_tensors,
  read_tensors,
  write_folder,
)
from processes import PATIENCE_SECONDS, REPOSITORY, environment, small_run
from small_disk import small
from support import mesh
from terminals import Terminal
from test_hub_tokenizer import Hub
from vocabularies import END, huggingface

from maxbatch.checkpoints import formats
from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.checkpoints.parameters_only import open_checkpoint
from maxbatch.checkpoints.record import fixed_keys, is_parameters_only
from maxbatch.checkpoints.tensor_files import StoredArray
from maxbatch.config.load import load_config
from maxbatch.conversion import to_folder
from maxbatch.conversion.reading import FolderReader, Place, load_parameters
from maxbatch.convert import main
from maxbatch.core.plan import Position
from maxbatch.hardware.sharding import sharding
from maxbatch.hugging_face.family import Tensor
from maxbatch.models.registry import Model, build_model, by_path
from maxbatch.train import main as train


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  return write_folder(tmp_path / "theirs")


def take(folder: pathlib.Path, *keys: str) -> pathlib.Path:
  """A run of the folder's model."""
  runs = folder.parent / "runs"
  assert main([f"from_hf={folder}", f"base_output_directory={runs}", "run_name=taken", *keys]) == 0
  return runs / "taken"


def give(run: pathlib.Path, *keys: str) -> pathlib.Path:
  """The folder of a run's model."""
  out = run.parent / "ours"
  assert main([f"to_hf={out}", f"config={run / 'config.yml'}", *keys]) == 0
  return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
  capsys.readouterr()
  assert main(arguments) == 2
  text = capsys.readouterr().err
  assert text.startswith("error: ")
  assert text.count("\n") == 1
  return text


def model_of(folder: pathlib.Path, *keys: str) -> Model:
  config = load_config(["config=base", f"model_name={folder}", "max_target_length=16", *keys])
  return build_model(config.model, 16)


def abstract(model: Model, **sizes: int) -> Any:
  """Where the parameters lie on a mesh."""
  axes, where = model.axes(), mesh(**sizes)

  def place(path: tuple[str, ...], leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding(axes[path], leaf.shape, where)
    )

  return by_path(place, model.shapes())


@pytest.mark.parametrize(
  ("theirs", "kept", "num_files", "keys"),
  [
    (np.float32, "float32", 1, []),
    (BFLOAT16, "float32", 3, ["save_dtype=bfloat16"]),
    (BFLOAT16, "bfloat16", 1, []),
    (np.float16, "float32", 1, ["save_dtype=float16"]),
  ],
)
def test_what_goes_in_comes_out_bit_for_bit(tmp_path, theirs, kept, num_files, keys, monkeypatch):
  tensors = llama_tensors(theirs)
  folder = write_folder(tmp_path / "theirs", tensors, num_files=num_files)
  run = take(folder, f"weight_dtype={kept}")
  monkeypatch.setattr(to_folder, "MAX_FILE_BYTES", 4000 if num_files > 1 else 10**9)
  out = give(run, *keys)
  assert_same_bits(read_tensors(out), tensors)
  assert (len(list(out.glob("*.safetensors"))) > 1) == (num_files > 1)
  dtype = np.dtype(theirs).name
  assert json.loads((out / "config.json").read_text()) == CONFIG | {"torch_dtype": dtype}
  assert {name: (out / name).read_text() for name in BESIDE} == BESIDE
  assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "theirs"]
  assert sorted(path.name for path in run.parent.iterdir()) == ["ours", "taken"]


def test_a_run_is_made_of_the_model_that_training_begins_with(folder, capsys):
  huggingface(folder, eos_token=END, chat_template="{{ messages }}")
  run = take(folder, "learning_rate=0.5")
  out = capsys.readouterr().out
  assert " parameters of a model of type llama in float32: " in out
  assert f"maxbatch train config={run / 'config.yml'}" in out
  assert "%" not in out  # No bar where nobody sees it move.
  keys = yaml.safe_load((run / "config.yml").read_text())
  assert (keys["base_emb_dim"], keys["learning_rate"], keys["run_name"]) == (D, 0.5, "taken")
  checkpoint = open_checkpoint(run / "checkpoints" / "0")
  assert is_parameters_only(checkpoint.record)
  assert checkpoint.record["notes"]["origin"] == {"folder": str(folder), "vocab_size": V}
  assert (run / "hugging_face" / "config.json").read_text() == json.dumps(CONFIG)
  assert (keys["tokenizer_type"], keys["tokenizer_path"]) == (
    "huggingface",
    str(run / "hugging_face"),
  )
  assert (keys["add_bos"], keys["add_eos"]) == (False, True)  # As it has the one token alone.
  out = give(run)
  for name in ("tokenizer.json", "tokenizer_config.json", *BESIDE):
    assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 2, "stage": 2}, {"fsdp": 4}])
def test_parameters_arrive_in_their_places(folder, sizes):
  model = model_of(folder)
  wanted = abstract(model, **sizes)
  result, tensors = load_parameters(folder, model, wanted), llama_tensors()
  assert jax.tree.map(lambda leaf: leaf.sharding, wanted) == jax.tree.map(
    lambda leaf: leaf.sharding, result
  )
  layers = result["layers"]
  for layer in range(L):
    name = f"model.layers.{layer}."
    for path, key, shape in [
      (("attention", "query", "kernel"), "self_attn.q_proj", (D, N, H)),
      (("attention", "out", "kernel"), "self_attn.o_proj", (N, H, D)),
      (("mlp", "down", "kernel"), "mlp.down_proj", (-1, D)),
      (("mlp_norm", "scale"), "post_attention_layernorm", (D,)),
    ]:
      ours = layers
      for part in path:
        ours = ours[part]
      expected = tensors[f"{name}{key}.weight"].T.reshape(shape)
      np.testing.assert_array_equal(ours[layer], expected)
  np.testing.assert_array_equal(result["head"], tensors["lm_head.weight"].T)
  np.testing.assert_array_equal(result["embedding"], tensors["model.embed_tokens.weight"])


KINDS = {
  "vector": (Tensor("a", ("x",), 0, transposed=False), [(6,)]),
  "vectors": (Tensor("a", ("x", "y"), 0, transposed=False), [(2, 3), (4,)]),
  "matrix": (Tensor("a", ("x",), 1, transposed=False), [(6, 4)]),
  "linear": (Tensor("a", ("x",), 1, transposed=True), [(6, 4, 2)]),
  "two dims in": (Tensor("a", ("x",), 2, transposed=True), [(2, 3, 5)]),
  "fused": (Tensor("a", ("x", "y", "z"), 1, transposed=False), [(6, 4), (6, 2, 2), (6, 4)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_parameter_is_found(kind):
  tensor, shapes = KINDS[kind]
  theirs = np.arange(np.prod(tensor.shape(shapes))).reshape(tensor.shape(shapes))
  stored = StoredArray(theirs.shape, theirs.dtype, 1, lambda index: theirs[index])
  random = np.random.default_rng(0)
  for number, whole in enumerate(tensor.ours(theirs, shapes)):
    place = Place(tensor, number, tuple(shapes))
    for _ in range(20):
      ends = [sorted(random.choice(size + 1, 2, replace=False)) for size in whole.shape]
      index = tuple(slice(int(first), int(last)) for first, last in ends)
      np.testing.assert_array_equal(place.read(stored, index), whole[index])


def test_only_what_a_device_holds_is_read(folder, monkeypatch):
  model = model_of(folder)
  read: list[int] = []
  whole = StoredArray.__init__

  def counting(self: Any, *arguments: Any) -> None:
    whole(self, *arguments)

    def counted(index: Any, read_part: Any = self.read) -> np.ndarray:
      part = read_part(index)
      read.append(part.size)
      return part

    object.__setattr__(self, "read", counted)

  monkeypatch.setattr(StoredArray, "__init__", counting)
  shapes = {path: leaf.shape for path, leaf in flat(model.shapes()).items()}
  reader = FolderReader(folder, shapes, model.axes())
  for path, shape in shapes.items():
    half = tuple(slice(0, size) for size in shape)
    axis = next((n for n, name in enumerate(model.axes()[path]) if name == "embed"), None)
    if axis is None:
      continue
    half = (*half[:axis], slice(shape[axis] // 2, shape[axis]), *half[axis + 1 :])
    read.clear()
    assert reader.read(path, half, np.dtype(np.float32)).size == sum(read)
    assert 2 * sum(read) == np.prod(shape)


def flat(tree: Any) -> dict[tuple[str, ...], Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {tuple(entry.key for entry in path): leaf for path, leaf in leaves}


def test_fused_projections_are_divided_and_joined_again(tmp_path):
  sizes = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": N, "n_positions": 16}
  config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
  shapes: dict[str, tuple[int, ...]] = {"wte.weight": (V, D), "wpe.weight": (16, D)}
  shapes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
  for layer in range(L):
    parts = {"ln_1": None, "ln_2": None, "attn.c_attn": 3 * D, "attn.c_proj": D}
    for name, width in parts.items():
      shapes[f"h.{layer}.{name}.weight"] = (D,) if width is None else (D, width)
      shapes[f"h.{layer}.{name}.bias"] = (width or D,)
    shapes |= {f"h.{layer}.mlp.c_fc.weight": (D, 4 * D), f"h.{layer}.mlp.c_fc.bias": (4 * D,)}
    shapes |= {f"h.{layer}.mlp.c_proj.weight": (4 * D, D), f"h.{layer}.mlp.c_proj.bias": (D,)}
  generator = np.random.default_rng(0)
  tensors = {name: generator.normal(size=shape).astype("f") for name, shape in shapes.items()}
  folder = tmp_path / "theirs"
  # As published: without its head, and with the masks that older versions kept.
  write_folder(folder, tensors | {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)})
  (folder / "config.json").write_text(json.dumps(config))
  out = give(take(folder, "max_target_length=16"))
  assert_same_bits(read_tensors(out), {f"transformer.{n}": x for n, x in tensors.items()})
  model = model_of(folder)
  result = load_parameters(folder, model, abstract(model, fsdp=2, tensor=2))
  value = result["layers"]["attention"]["value"]["kernel"][1]
  fused = tensors["h.1.attn.c_attn.weight"]
  np.testing.assert_array_equal(np.asarray(value).reshape(D, D), fused[:, 2 * D :])


def test_what_is_rounded_is_said(folder, capsys):
  run = take(folder, "weight_dtype=bfloat16")
  out = capsys.readouterr().out
  assert "weight_dtype=bfloat16: float32 in the folder, and so rounded" in out
  kept = read_tensors(give(run))
  assert_same_bits(kept, {name: x.astype(BFLOAT16) for name, x in llama_tensors().items()})


def test_a_second_copy_of_a_tied_table_is_not_needed(tmp_path):
  out = give(take(write_folder(tmp_path / "theirs", tie_word_embeddings=True)))
  assert_same_bits(read_tensors(out), without("lm_head.weight"))


def test_a_padded_vocabulary_has_rows_of_zeros_and_is_cut_on_request(folder, capsys):
  run = take(folder, "vocab_size=48")
  assert "vocab_size=48: the folder's 40 rows, and 8 of zeros after them" in capsys.readouterr().out
  model = model_of(folder, "vocab_size=48")
  result = load_parameters(folder, model, abstract(model, tensor=4))
  assert not np.asarray(result["head"])[:, V:].any()
  assert not np.asarray(result["embedding"])[V:].any()
  whole = read_tensors(give(run))
  assert whole["lm_head.weight"].shape == (48, D)
  assert json.loads((run.parent / "ours" / "config.json").read_text())["vocab_size"] == 48
  shutil.rmtree(run.parent / "ours")
  assert_same_bits(read_tensors(give(run, "export_vocab_size=40")), llama_tensors())
  assert "the last 8 rows are left out" in capsys.readouterr().out


def without(name: str) -> dict[str, np.ndarray]:
  return {key: tensor for key, tensor in llama_tensors().items() if key != name}


UP = "model.layers.1.mlp.up_proj.weight"


def _truncate(folder: pathlib.Path) -> None:
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-10])


def _pickled(folder: pathlib.Path) -> None:
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(content: str) -> Callable[[pathlib.Path], None]:
  def change(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)

  return change


@pytest.mark.parametrize(
  ("tensors", "config", "change", "message"),
  [
    (without(UP), {}, None, f"tensor {UP} is missing, which a model of type llama has"),
    (llama_tensors() | {"extra": np.ones(3)}, {}, None, "the tensor extra would be left over"),
    (
      None,
      {"num_hidden_layers": 1},
      None,
      "the tensor model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
      "model.layers.1.mlp.gate_proj.weight and 6 more would be left over",
    ),
    (
      llama_tensors() | {UP: np.ones((3, D), np.float32)},
      {},
      None,
      f"the tensor {UP} is [3, 16], and this run's parameters make it [24, 16] (layers.mlp.up.kernel)",
    ),
    (
      llama_tensors() | {UP: np.ones((24, D), np.int16)},
      {},
      None,
      f"{UP} is of type I16, and what is read is F64, F32, F16, BF16",
    ),
    (
      llama_tensors() | {UP: np.ones((24, D), np.int8)},
      {},
      None,
      f"the tensor {UP} is int8, and parameters are floating-point numbers",
    ),
    (None, {"model_type": "mamba"}, None, "model_type=mamba is not supported"),
    (None, {"hidden_act": "relu"}, None, 'hidden_act="relu": not supported'),
    (None, {"new_key": 3}, None, "new_key=3: maxbatch would ignore this key"),
    (None, {}, _truncate, "model.safetensors: it cannot be read"),
    (None, {}, _pickled, "pytorch_model.bin is pickled"),
    (
      None,
      {},
      _index('{"weight_map": {"a": "gone.safetensors"}}'),
      "gone.safetensors: it is missing",
    ),
    (None, {}, _index('{"weight_map": {"a": "../b"}}'), "it names files of other folders"),
    (None, {}, _index("[]"), "this is not an index of safetensors files"),
  ],
)
def test_what_is_not_such_a_model_is_refused_by_name(
  tmp_path, capsys, tensors, config, change, message
):
  folder = write_folder(tmp_path / "theirs", tensors, **config)
  if change is not None:
    change(folder)
  before = sorted(tmp_path.rglob("*"))
  text = refused(capsys, f"from_hf={folder}", f"base_output_directory={tmp_path / 'runs'}")
  assert message in text
  assert sorted(tmp_path.rglob("*")) == before


def test_arguments_that_do_not_work_say_what_does(folder, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  run = take(folder)
  config, runs = f"config={run / 'config.yml'}", f"base_output_directory={tmp_path / 'runs'}"
  assert "give one of from_hf, to_hf and to_peft" in refused(capsys)
  assert "give one of from_hf, to_hf and to_peft" in refused(capsys, "from_hf=a", "to_hf=b")
  again = refused(capsys, f"from_hf={folder}", runs, "run_name=taken")
  assert "it exists and would be overwritten" in again
  assert "run_name=taken-2" in again
  smaller = refused(capsys, f"from_hf={folder}", runs, "vocab_size=39")
  assert "vocab_size=39 is less than the 40 of" in smaller
  assert "leave out model_name" in refused(capsys, f"from_hf={folder}", "model_name=gpt2-small")
  assert "has no effect with from_hf" in refused(capsys, f"from_hf={folder}", "checkpoint=1")
  assert "there is no such folder" in refused(capsys, f"from_hf={tmp_path / 'none'}")
  assert "hf download owner/name" in refused(capsys, "from_hf=owner/name")
  out = f"to_hf={tmp_path / 'ours'}"
  assert f"{tmp_path / 'theirs'}" in refused(capsys, f"to_hf={folder}", config)
  assert "there is no checkpoint of that step" in refused(capsys, out, config, "checkpoint=7")
  assert "there is no such folder" in refused(capsys, out, "config=base", runs, "run_name=none")
  other = refused(capsys, out, config, "rope_max_timescale=500")
  assert "rope_max_timescale=500.0 is not what checkpoint=" in other
  assert "export_vocab_size=50 is more than the 40 rows" in refused(
    capsys, out, config, "export_vocab_size=50"
  )
  assert not (tmp_path / "ours").exists()
  assert main([out, f"checkpoint={run}"]) == 0
  assert_same_bits(read_tensors(tmp_path / "ours"), llama_tensors())


def test_a_damaged_checkpoint_is_not_handed_on(folder, capsys):
  run = take(folder)
  file = run / "checkpoints" / "0" / "state" / "model.safetensors"
  content = bytearray(file.read_bytes())
  content[-7] ^= 1
  file.write_bytes(content)
  text = refused(capsys, f"to_hf={run.parent / 'ours'}", f"config={run / 'config.yml'}")
  assert "differs from its fingerprint" in text
  assert [path.name for path in run.parent.iterdir()] == ["taken"]


def test_a_checkpoint_of_training_is_read_layer_by_layer(folder, monkeypatch):
  monkeypatch.setattr(formats, "_BYTES_TOGETHER", 1000)
  monkeypatch.setattr(formats, "_SMALLEST_CHUNK_BYTES", 100)
  run, model = take(folder), model_of(folder)
  config = load_config([f"config={run / 'config.yml'}"])
  params = load_parameters(folder, model, abstract(model, fsdp=2, tensor=2))
  state = {"params": params, "opt_state": {"count": np.int32(3)}}
  state = jax.tree.map(jax.numpy.asarray, state)
  with Checkpointer(run / "checkpoints", config.checkpoint, fixed_keys(config)) as checkpointer:
    checkpointer.save(state, Position(5, 40), {})
  checkpoint = open_checkpoint(run / "checkpoints" / "5")
  assert checkpoint["params/layers/mlp/up/kernel"].rows_together == 1
  assert_same_bits(read_tensors(give(run)), llama_tensors())


def test_a_whole_state_in_safetensors_comes_back(tmp_path):
  config = load_config(["config=base", "checkpoint_format=safetensors"]).checkpoint
  state = {"a": jax.numpy.arange(6.0).reshape(2, 3), "b": jax.numpy.int32(7)}
  with Checkpointer(tmp_path, config, {}) as checkpointer:
    checkpointer.save(state, Position(1, 8), {})
  shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
  with Checkpointer(tmp_path, config, {}) as checkpointer:
    restored = checkpointer.restore(shapes)
  assert restored is not None
  jax.tree.map(np.testing.assert_array_equal, restored.state, state)


def test_a_model_by_its_name_on_the_hub(tmp_path):
  theirs = write_folder(tmp_path / "theirs")
  files = {path.name: path.read_bytes() for path in theirs.iterdir()}
  command = ["-m", "maxbatch.convert", "from_hf=owner/model", "run_name=taken"]
  with Hub(files | {"pytorch_model.bin": b"large"}) as hub:
    process = subprocess.run(
      [sys.executable, *command, f"base_output_directory={tmp_path}", "hf_access_token=hf_secret"],
      cwd=REPOSITORY,
      capture_output=True,
      text=True,
      timeout=PATIENCE_SECONDS,
      env=environment(
        JAX_PLATFORMS="cpu",
        HF_HOME=str(tmp_path / "cache"),
        HF_ENDPOINT=f"http://127.0.0.1:{hub.server_address[1]}",
      ),
      check=False,
    )
  assert process.returncode == 0, process.stderr
  assert hub.downloads == dict.fromkeys(files, 1)
  assert "Bearer hf_secret" in hub.tokens
  kept = [path for path in (tmp_path / "taken").rglob("*") if path.is_file()]
  assert not [path for path in kept if b"hf_secret" in path.read_bytes()]
  assert_same_bits(read_tensors(give(tmp_path / "taken")), llama_tensors())


DRIVER = """
import os, signal, sys
from maxbatch import convert
from maxbatch.checkpoints import tensor_files
made = []
def killed(part, whole=tensor_files._bytes):
  made.append(part)
  if len(made) == 12:
    os.kill(os.getpid(), signal.SIGKILL)
  return whole(part)
tensor_files._bytes = killed
convert.main(sys.argv[1:])
"""


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_a_killed_conversion_leaves_nothing_that_looks_whole(folder, direction):
  runs = folder.parent / "runs"
  arguments = [f"from_hf={folder}", f"base_output_directory={runs}", "run_name=taken"]
  if direction == "to_hf":
    run = take(folder)
    arguments = [f"to_hf={runs / 'ours'}", f"config={run / 'config.yml'}"]
  process = subprocess.run(
    [sys.executable, "-c", DRIVER, *arguments],
    cwd=REPOSITORY,
    capture_output=True,
    timeout=PATIENCE_SECONDS,
    env=environment(JAX_PLATFORMS="cpu"),
    check=False,
  )
  assert process.returncode == -signal.SIGKILL, process.stderr
  name = "taken" if direction == "from_hf" else "ours"
  left = {path.name for path in runs.iterdir()} - {"taken"}
  assert left == {f".{name}.unfinished", f".{name}.lock"}
  assert main(arguments) == 0
  assert {path.name for path in runs.iterdir()} == {"taken", name}
  if direction == "to_hf":
    assert_same_bits(read_tensors(runs / "ours"), llama_tensors())


def test_free_space_is_looked_at_first(folder, tmp_path, capsys, monkeypatch):
  with small(tmp_path / "disk", 64) as disk:
    arguments = [f"from_hf={folder}", f"base_output_directory={disk}"]
    text = refused(capsys, *arguments)
    num_bytes = sum(tensor.nbytes for tensor in llama_tensors().values()) + 2**25
    assert f"needs {num_bytes:,} bytes, and 65,536 are free in {disk}" in text
    # And if it was there when one looked:
    usage = shutil.disk_usage(disk)._replace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    filler = disk / "filler"
    filler.write_bytes(bytes(50_000))
    text = refused(capsys, *arguments)
    assert "(No space left on device); nothing was left there" in text
    assert list(disk.iterdir()) == [filler]


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "a+b") as file:
  fcntl.lockf(file, fcntl.LOCK_EX)
  print("held", flush=True)
  sys.stdin.read()
"""


def test_two_processes_do_not_write_the_same_folder(folder, tmp_path, capsys):
  (tmp_path / "runs").mkdir()
  command = [sys.executable, "-c", HOLDER, str(tmp_path / "runs" / ".taken.lock")]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    keys = [f"base_output_directory={tmp_path / 'runs'}", "run_name=taken"]
    text = refused(capsys, f"from_hf={folder}", *keys)
    other.communicate()
  assert "another process is writing it" in text


def test_a_terminal_shows_how_fast_it_goes(folder, monkeypatch):
  stream = Terminal()
  monkeypatch.setattr("sys.stdout", stream)
  take(folder)
  assert "reading 100% " in stream.getvalue()
  assert "B/s]" in stream.getvalue()


def test_training_begins_with_what_was_converted_and_then_resumes(folder, tmp_path, capsys):
  run = take(folder, "vocab_size=264")
  words = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  own = [key for key in words if key.startswith(("dataset", "batch_size", "generate", "eval"))]
  keys = [f"config={run / 'config.yml'}", "max_target_length=16", "lr_schedule_type=constant", *own]
  still = ["learning_rate=0", "adam_weight_decay=0", "warmup_steps=0", "checkpoint_period=1"]
  keys += ["max_num_checkpoints_to_keep=1", *still]
  capsys.readouterr()
  assert train([*keys, "validate_only=true"]) == 0
  assert f"parameters of {run / 'checkpoints' / '0'}, with a new" in capsys.readouterr().out
  assert train([*keys, "steps=2"]) == 0
  assert f"parameters of {run / 'checkpoints' / '0'}, with a new" in capsys.readouterr().out
  assert {path.name for path in (run / "checkpoints").iterdir()} == {"0", "2"}
  out = give(run, "export_vocab_size=40")
  assert_same_bits(read_tensors(out), llama_tensors())
  assert train([*keys, "steps=3", "validate_only=true"]) == 0
  assert "resumes after step 2 (16 samples)" in capsys.readouterr().out
  assert main([f"to_hf={tmp_path / 'first'}", f"checkpoint={run / 'checkpoints' / '0'}"]) == 0
