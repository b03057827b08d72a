"""Somebody's model, fine-tuned as torch would, and adapters handed over: merged, or alone for peft."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from late_imports import WhenUsed
from processes import small_run
from support import in_microbatches, mesh, uneven_rows
from test_conversion_transformers import random_model

from maxbatch.checkpoints.find import newest_record
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.conversion.source import find_source, open_source
from maxbatch.convert import main as convert
from maxbatch.data.rows import Rows
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import build_model
from maxbatch.modes.run import run
from maxbatch.train import main as train
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import Trainer, rows_shardings, step_function

peft = WhenUsed("peft")
torch = WhenUsed("torch")
transformers = WhenUsed("transformers")

T = 16


def our_logits(config: Config, parameters: Any, tokens_BT: np.ndarray) -> np.ndarray:
  model = build_model(config.model, T, trainable=config.optimizer.trainable)
  some = jnp.asarray(tokens_BT)
  rows = Rows(some, some, jnp.ones(tokens_BT.shape), jnp.arange(len(tokens_BT)))

  @jax.jit
  def logits(parameters, rows):
    bound = model.bind(parameters)
    return hidden_of(bound(rows, None)) @ bound.output_matrix()

  return np.asarray(logits(jax.device_get(parameters), rows))


def their_logits(model: Any, tokens_BT: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    return model.eval()(torch.tensor(tokens_BT).long()).logits.numpy()


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
  ("model_type", "targets"),
  [("llama", "[query,value,out,gate,down]"), ("gpt2", "[query,value,out,up]")],
)
def test_adapters_of_a_model_that_is_somebodys(tmp_path, model_type, targets):
  """From a folder of transformers, through a run that trains adapters, and back."""
  theirs = tmp_path / "theirs"
  random_model(model_type).save_pretrained(theirs)
  made = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  keys = f"model_name={theirs} run_name=tuned steps=2 learning_rate=0.1 warmup_steps=0 "
  keys += f"vocab_size=264 lora_rank=3 lora_alpha=5 lora_targets={targets} "
  keys += f"load_parameters_path={theirs} block_cross_document_attention=false"
  own = ("base_emb", "base_num", "base_mlp", "head_dim", "vocab_size")
  arguments = [*(each for each in made if not each.startswith(own)), *keys.split()]
  state, _ = run(load_config(arguments))
  # Nothing of the model is saved but the adapters.
  record = newest_record(tmp_path / "tuned" / "checkpoints")
  assert record is not None
  saved = {name.rpartition("/")[2] for name in record["leaves"] if name.startswith("params/")}
  assert saved == {"lora_a", "lora_b"}
  tokens_BT = np.random.default_rng(0).integers(0, 68, (3, T)).astype(np.int32)
  # A resume reads the others where they are.
  resumed, _ = run(load_config([*arguments, "steps=3"]))
  assert fingerprints(resumed.frozen) == fingerprints(state.frozen)
  expected = our_logits(load_config(arguments), resumed.parameters, tokens_BT)

  checkpoint = f"checkpoint={tmp_path / 'tuned'}"
  assert convert([f"to_hf={tmp_path / 'merged'}", checkpoint]) == 0
  merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
  np.testing.assert_allclose(their_logits(merged, tokens_BT), expected, atol=1e-4)

  assert convert([f"to_peft={tmp_path / 'adapter'}", checkpoint]) == 0
  base = transformers.AutoModelForCausalLM.from_pretrained(theirs)
  before = their_logits(base, tokens_BT)
  adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
  result = their_logits(adapted, tokens_BT)
  np.testing.assert_allclose(result, expected[..., :68], atol=1e-4)
  assert np.abs(result - before).max() > 0.01


def test_what_a_peft_adapter_cannot_hold_is_refused(tmp_path, capsys):
  made = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  assert train([*made, "steps=1", "warmup_steps=0", "lora_rank=2", "trainable=[head]"]) == 0
  capsys.readouterr()
  out, checkpoint = tmp_path / "out", f"checkpoint={tmp_path / 'first_run'}"
  for more, said in (
    (["lora_rank=0", "trainable=[]"], "has no adapters (lora_rank=0)"),
    ([], "but head too (trainable="),
  ):
    assert convert([f"to_peft={out}", checkpoint, *more]) == 2
    assert said in capsys.readouterr().err
  assert not out.exists()
  # Merged, what trained beside the adapters is there too.
  assert convert([f"to_hf={out}", checkpoint]) == 0


def test_a_fine_tune_has_the_losses_of_a_loop_in_torch(tmp_path):
  """AdamW with clipping on rows of which some tokens count, as transformers' Trainer would."""
  theirs, steps, rate = tmp_path / "theirs", 4, 3e-3
  reference = random_model("llama")
  reference.save_pretrained(theirs)
  settings = load_config(["config=base", f"model_name={theirs}", f"max_target_length={T}"])
  model = build_model(settings.model, T)
  optimizer = make_optimizer(settings.optimizer, model.axes(), 1)
  parts = Trainer(model, optimizer, mesh(2, 2, 1), jax.random.key(0))
  source = open_source("load_parameters_path", find_source("load_parameters_path", str(theirs)))
  source.check(model)
  state = parts.begin(0, source.read(model, parts.abstract.parameters))
  batches = [uneven_rows(16, T, seed) for seed in range(steps)]
  batches = [rows._replace(inputs=rows.inputs % 68, targets=rows.targets % 68) for rows in batches]
  function, ours = step_function(parts, in_microbatches(batches[0], 2, 2)), []
  for rows in batches:
    fed = in_microbatches(rows, 2, 2)
    placed = jax.device_put(fed, rows_shardings(fed, parts.mesh))
    state, metrics = function(state, placed, np.int32(2), np.float32(rate))
    ours.append(float(metrics.loss))

  keys = settings.optimizer
  norms = [each for name, each in reference.named_parameters() if "norm" in name]
  others = [each for name, each in reference.named_parameters() if "norm" not in name]
  adam = torch.optim.AdamW(
    [
      {"params": others, "weight_decay": keys.adam_weight_decay},
      {"params": norms, "weight_decay": 0.0},
    ],
    lr=rate,
    betas=(keys.adam_b1, keys.adam_b2),
    eps=keys.adam_eps,
  )
  expected = []
  for rows in batches:
    weights_BT = torch.tensor(rows.weights)
    logits_BTV = reference.train()(torch.tensor(rows.inputs).long()).logits
    targets_BT = torch.tensor(rows.targets).long()
    losses_BT = torch.nn.functional.cross_entropy(
      logits_BTV.transpose(1, 2), targets_BT, reduction="none"
    )
    loss = (losses_BT * weights_BT).sum() / weights_BT.sum()
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), keys.gradient_clipping_threshold)
    adam.step()
    expected.append(loss.item())
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  assert expected[0] - expected[-1] > 0.01
