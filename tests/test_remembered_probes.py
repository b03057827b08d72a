"""An exploration for a slice that is interrupted goes on from what it has compiled."""

import json
import pathlib

import jax
import pytest
from support import config

from maxbatch.batch.from_config import topology
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Target
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.microbatch_size import explore_sizes
from maxbatch.tuning.remembered_probes import remembering
from maxbatch.tuning.search import ProbeResult


class Compiler:
  """Takes as many seconds for a sample as its size; is interrupted before the candidate after `last`."""

  def __init__(self, last: int = 99):
    self.last, self.asked = last, list[int]()

  def __call__(self, one: Candidate) -> ProbeResult:
    if len(self.asked) == self.last:
      raise KeyboardInterrupt
    self.asked.append(int(one.per_device))
    seconds = float(one.per_device) ** 2
    return ProbeResult(1, 2, fits=True, seconds_per_microbatch=seconds, how="estimated")


def settings(**keys: object) -> Config:
  sizes = "{explore: {min: 1, max: 4}}"
  return config(micro_batch_size=sizes, batch_size=32, compile_only=True, **keys)


def run(compiler: Compiler, folder: pathlib.Path, *, retune: bool = False, **keys: object) -> str:
  lines, of = list[str](), settings(**keys)
  place = Target(jax.devices(), topology(of.mesh, 8))
  probe = remembering(compiler, of, place, folder, retune=retune, say=lines.append)
  chosen, result = explore_sizes(of, place, probe, say=lines.append)
  assert chosen.batch.micro_batch_size == 1
  assert len(result.tried) == 3
  return "\n".join(lines)


def test_what_is_compiled_before_an_interruption_is_not_compiled_again(tmp_path: pathlib.Path):
  first, second, third = Compiler(last=2), Compiler(), Compiler()
  with pytest.raises(KeyboardInterrupt):
    run(first, tmp_path)
  assert len(first.asked) == len(list(tmp_path.iterdir())) == 2
  said = run(second, tmp_path)
  assert sorted(first.asked + second.asked) == [1, 2, 4]
  assert said.count("INFO: remembered from ") == 2
  assert run(third, tmp_path).count("INFO: remembered from ") == 3
  assert third.asked == []


def test_what_is_asked_anew_or_depends_on_something_else_is_compiled(tmp_path: pathlib.Path):
  run(Compiler(), tmp_path)
  again, other, damaged = Compiler(), Compiler(), Compiler()
  run(again, tmp_path, retune=True)
  assert sorted(again.asked) == [1, 2, 4]
  run(other, tmp_path, base_emb_dim=64)
  assert sorted(other.asked) == [1, 2, 4]
  for file in tmp_path.iterdir():
    content = json.loads(file.read_text())
    del content["choice"]["explored"]["peak_bytes"]
    file.write_text(json.dumps(content))
  run(damaged, tmp_path)
  assert sorted(damaged.asked) == [1, 2, 4]
