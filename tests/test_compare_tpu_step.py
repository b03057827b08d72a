"""Two compiled steps side by side: scripts/compare_tpu_step.py, and what it is made from."""

import gzip
import importlib.util
import pathlib
import re
from types import ModuleType

import pytest

from maxbatch.errors import UserError
from maxbatch.estimate.chips import CHIPS
from maxbatch.estimate.costs import OURS, SCOPES, Naming, kind_of, program_costs
from maxbatch.estimate.hlo import parse
from maxbatch.estimate.step_time import estimate
from scripts.step_breakdown import Breakdown, Part, breakdown, differences, peers
from tests.peer_program import B, D, F, L, T, V

ROOT = pathlib.Path(__file__).parents[1]
STEP = gzip.decompress((ROOT / "tests/data/peer_step.hlo.gz").read_bytes()).decode()
"""Of tests/peer_program.py: what each part is, functions and scopes say."""
CHIP = CHIPS["v5e"]
DEVICES = 4


def without_scopes(text: str) -> str:
  """As a trainer without jax.named_scope has it compiled."""
  words = "|".join(SCOPES)
  names = re.compile(r'op_name="[^"]*"')
  return names.sub(lambda name: re.sub(rf"\b({words})\b", "x", name[0]), text)


def broken_down(text: str, naming: Naming = OURS) -> Breakdown:
  return breakdown("step", program_costs(parse(text), naming), CHIP)


def seconds_of(step: Breakdown, scope: str) -> float:
  return step.total(lambda part: part.scope == scope)


@pytest.fixture(scope="module")
def ours() -> Breakdown:
  return broken_down(STEP)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
  monkeypatch.syspath_prepend(ROOT / "scripts")
  spec = importlib.util.spec_from_file_location("compare", ROOT / "scripts/compare_tpu_step.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_parts_add_up_to_the_estimated_step(ours: Breakdown):
  step = estimate(program_costs(parse(STEP)), CHIP, 1.0)
  assert ours.seconds == pytest.approx(step.step_seconds(1))
  assert sum(ours.by_work().values()) == pytest.approx(ours.seconds)
  assert ours.flops() == step.rest_flops


def test_a_peers_parts_are_found_by_its_functions(ours: Breakdown):
  """Where the program's own names say nothing, the stack on which it was traced does."""
  text = without_scopes(STEP)
  assert {part.scope for part in broken_down(text).parts} == {"other"}
  theirs = broken_down(text, peers(text))
  assert {part.scope for part in theirs.parts} >= set(SCOPES)
  for scope in SCOPES:
    assert seconds_of(theirs, scope) == pytest.approx(seconds_of(ours, scope)), scope


def test_products_by_pass(ours: Breakdown):
  """A checkpointed layer forms its first product again, whose value the gradients need."""
  product = L * 2 * (B * T // DEVICES) * D * F

  def flops(scope: str, direction: str) -> int:
    return sum(share.flops for part, share in ours.parts.items() if part[:2] == (scope, direction))

  passes = ("forward", "recomputed", "backward", "update")
  assert [flops("mlp", each) for each in passes] == [2 * product, product, 4 * product, 0]
  head = 2 * (B * T // DEVICES) * D * V
  assert [flops("head", each) for each in passes] == [head, 0, 2 * head, 0]
  assert ours.flops(["recomputed"]) == product + flops("attention", "recomputed")


def test_what_moves_data_is_told_from_what_computes():
  body = (
    "HloModule m\n\n%f (p: bf16[8,128]) -> bf16[128,8] {\n"
    "  %p = bf16[8,128]{1,0} parameter(0)\n"
    "  ROOT %t = bf16[128,8]{1,0} {what}(%p)\n}\n\n"
    "ENTRY %main (a: bf16[8,128]) -> bf16[128,8] {\n  %a = bf16[8,128]{1,0} parameter(0)\n"
    "  ROOT %x = bf16[128,8]{1,0} fusion(%a), kind=kLoop, calls=%f\n}\n"
  )
  kinds = {
    "transpose": "relayouts",
    "copy": "relayouts",
    "slice": "slices",
    "negate": "elementwise",
    "convolution": "products",
  }
  for what, kind in kinds.items():
    program = parse(body.replace("{what}", what))
    assert kind_of(program, program.computations["main"].instructions["x"]) == kind, what


def test_the_screen_names_what_takes_longer(
  script: ModuleType, tmp_path: pathlib.Path, ours: Breakdown
):
  """A product that the compiler says takes ten times as long in ours is the first reason."""
  slow = max(
    ours.parts[Part("attention", "backward", "products")].operations,
    key=lambda one: one.seconds,
  )
  lines = [
    re.sub(r'("estimated_cycles":"?)(\d+)', lambda m: f"{m[1]}{10 * int(m[2])}", line)
    if f"%{slow.cost.name} = " in line
    else line
    for line in STEP.splitlines()
  ]
  (tmp_path / "theirs.after_codegen.txt").write_text(STEP)
  (tmp_path / "theirs.after_optimizations-memory-usage-report.txt").write_text(
    "Memory Space: default (color=0)\nTotal bytes: 2000000000 (1.9GiB)\n"
  )
  (tmp_path / "ours.hlo").write_text("\n".join(lines))
  given = ["--hlo", str(tmp_path / "ours.hlo"), "--chip", "v5e", "--peer-hlo", str(tmp_path)]
  compared = script.compare(given)
  difference, part, _, _ = next(differences(compared.theirs, compared.ours))
  assert part == Part("attention", "backward", "products")
  assert difference == pytest.approx(9 * slow.seconds)
  assert compared.theirs.peak_bytes == 2_000_000_000
  screen = str(compared).splitlines()
  assert len(screen) <= 60
  reason = screen.index("Where ours takes longer:") + 1
  assert str(part) in screen[reason]
  assert slow.cost.name in screen[reason + 1]
  assert screen[-1] == "Where theirs does: nowhere"


def test_what_cannot_be_compared_is_refused(script: ModuleType, tmp_path: pathlib.Path):
  text = tmp_path / "x.hlo"
  text.write_text("nothing")
  for given, words in (
    ([], "ours is either --hlo"),
    (["--hlo", str(text)], "add --chip"),
    (["--hlo", str(text), "--chip", "v5e"], "not HLO text"),
    (["--hlo", str(tmp_path / "none"), "--chip", "v5e"], "cannot be read"),
    (["--hlo", str(tmp_path), "--chip", "v5e"], "xla_dump_to"),
  ):
    with pytest.raises(UserError, match=words):
      script.compare(["--peer-hlo", str(text), *given])
