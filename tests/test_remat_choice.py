"""remat_policy=auto: the order of tensors by what they save, and the choice over made-up machines."""

import dataclasses
import pathlib
from fractions import Fraction

import jax
import pytest
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.compile_step import Saving, remat_savings
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.models.remat import all_steps, ladder, with_step
from maxbatch.modes.method import Purpose
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.training.build import build_trainer
from maxbatch.tuning import microbatch_size
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.microbatch_size import before_remat, choose_remat_policy
from maxbatch.tuning.search import ProbeResult

GIB = 1 << 30
EACH = [
  Saving("query_proj", 4e9, 4 * GIB),
  Saving("out_proj", 3e9, 4 * GIB),
  Saving("mlpwi_0", 5e9, 16 * GIB),
  Saving("context", 1e9, 4 * GIB),
]
"""The best by FLOPs per byte first."""


def asked_for(**keys: object) -> tuple[Config, BatchPlan, Target]:
  """A run on one device, its plan and its device."""
  settings = config(remat_policy="auto", ici_data_parallelism=1, **keys)
  layout = topology(settings.mesh, 1)
  plan = plan_batches(settings.batch, settings.run, layout, settings.optimizer)
  return settings, plan, Target(jax.devices()[:1], layout)


class Machine:
  """10 GiB, and 2 for each GiB that a layer keeps; keeping saves time."""

  def __init__(self, capacity: float, slower: str = ""):
    self.capacity, self.slower, self.asked = capacity, slower, list[str]()

  def __call__(self, candidate: Candidate) -> ProbeResult:
    step = candidate.remat_policy or ""
    assert step not in self.asked, "asked twice"
    self.asked.append(step)
    kept = [one for one in EACH if one.name in step.split("+") or step == "none"]
    peak = 10 + 2 * sum(one.bytes for one in kept) // GIB + (4 if step == "none" else 0)
    seconds = 20 - sum(one.flops for one in kept) / 1e9 + (30 if step == self.slower else 0)
    fits = peak <= self.capacity
    return ProbeResult(peak * GIB, round(self.capacity * GIB), fits, seconds)


@pytest.fixture
def made_up(monkeypatch):
  monkeypatch.setattr(microbatch_size, "remat_savings", lambda *_: EACH)
  monkeypatch.setattr(microbatch_size, "what_it_depends_on", lambda *_: {})


def chosen(machine: Machine, folder: pathlib.Path) -> tuple[str, str]:
  """The tensors that are kept, or the policy, and what is said."""
  settings, plan, place = asked_for()
  lines: list[str] = []
  parts = before_remat(settings), plan, place, machine, folder
  model = choose_remat_policy(*parts, say=lines.append).model
  if model.remat_policy != "custom":
    return model.remat_policy, "\n".join(lines)
  names = [one.name for one in EACH if getattr(model, one.name) == "device"]
  return "+".join(names), "\n".join(lines)


def test_what_is_worth_most_a_byte_comes_first():
  settings, plan, place = asked_for(per_device_batch_size=3, base_mlp_dim=48, dtype="bfloat16")
  found = {one.name: one for one in remat_savings(before_remat(settings), plan, place.devices)}
  tokens, layers, width = 3 * 16, 2, 32
  widths = {"query_proj": 32, "key_proj": 16, "value_proj": 16, "mlpwi_0": 48, "mlpwi_1": 48}
  assert {name: one.bytes for name, one in found.items() if name in widths} == {
    name: tokens * each * 2 for name, each in widths.items()
  }
  assert found["value_proj"].flops == 2 * tokens * width * widths["value_proj"] * layers
  assert found["mlpwi_1"].flops == 2 * tokens * width * widths["mlpwi_1"] * layers
  # The last product of a layer is not needed again.
  assert "mlpwo" not in found
  ratios = [one.flops / one.bytes for one in found.values()]
  assert ratios == sorted(ratios, reverse=True)


def test_each_step_keeps_one_tensor_more():
  steps = ladder([one.name for one in EACH])
  assert steps == (
    *("full", "query_proj", "query_proj+out_proj", "query_proj+out_proj+mlpwi_0"),
    *("query_proj+context+out_proj+mlpwi_0", "none"),
  )
  assert set(steps) <= set(all_steps())


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
  ("capacity", "kept"),
  [
    (10, "full"),
    (18, "query_proj"),
    (26, "query_proj+out_proj"),
    # The next tensor does not fit, a smaller one does.
    (34, "query_proj+out_proj+context"),
    (58, "query_proj+out_proj+mlpwi_0"),
    (66, "query_proj+out_proj+mlpwi_0+context"),
    (70, "none"),
  ],
)
def test_as_much_is_kept_as_fits(capacity, kept, tmp_path):
  machine = Machine(capacity)
  assert chosen(machine, tmp_path)[0] == kept
  assert len(machine.asked) <= 6


@pytest.mark.usefixtures("made_up")
def test_a_step_that_is_slower_is_not_taken(tmp_path):
  assert chosen(Machine(70, slower="none"), tmp_path)[0] == "query_proj+out_proj+mlpwi_0+context"


@pytest.mark.usefixtures("made_up")
def test_the_line_says_the_keys_and_a_second_start_remembers_them(tmp_path):
  _, said = chosen(Machine(26), tmp_path)
  (file,) = tmp_path.iterdir()
  words = "remat_policy auto: remat_policy=custom query_proj=device out_proj=device (26 of 26 GiB"
  assert said.startswith(words)
  assert said.endswith(f"remembered in {file}")
  again = Machine(26)
  kept, said = chosen(again, tmp_path)
  assert (kept, again.asked) == ("query_proj+out_proj", [])
  assert "remembered from" in said


@pytest.mark.usefixtures("made_up")
def test_nothing_fits(tmp_path):
  with pytest.raises(UserError, match=r"not even micro_batch_size=4.*needs 10 of 9 GiB"):
    chosen(Machine(9), tmp_path)


def test_the_choice_is_what_its_keys_say():
  by_hand = config(remat_policy="custom", query_proj="device", mlpwi_1="device")
  assert with_step(config(remat_policy="auto").model, "query_proj+mlpwi_1") == by_hand.model
  assert with_step(config(remat_policy="auto").model, "none").remat_policy == "none"


def test_nothing_is_built_before_it_is_chosen():
  settings, plan, place = asked_for()
  with pytest.raises(UserError, match="remat_policy=auto is not chosen here"):
    build_trainer(settings, plan, place.devices)


def test_a_run_chooses_by_its_own_compiler(monkeypatch, tmp_path):
  """All that a tiny model keeps fits; and where the device has less, less is kept."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  settings, _, place = asked_for(per_device_batch_size=4)
  resolved = PRETRAINING.resolve(settings, place, Purpose.RUN)
  assert resolved.config.model.remat_policy in ("none", "custom")
  assert resolved.plan.per_device_batch_size == Fraction(4)
  checked = PRETRAINING.resolve(settings, place, Purpose.VALIDATE)
  assert checked.config.model.remat_policy == "full"
  assert any("remat_policy=auto is chosen when the run starts" in note for note in checked.notes)
  assert dataclasses.replace(resolved.config, model=checked.config.model) == checked.config
