"""To which part of the model an operation belongs: by jax's named scopes."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from maxbatch.estimate.hlo import Computation, HloModule, Instruction

SCOPES = ("attention", "mlp", "norm", "embedding", "head", "optimizer")
"""The model's parts, by jax.named_scope."""
OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Naming:
  """What in a program's names stands for which part of the model."""

  words: Mapping[str, str]
  """Parts by a word of jax's path of scopes; the innermost counts."""

  def of(self, one: Instruction) -> str:
    """Returns the part that an instruction's own names say, without what it calls; or "other".

    transpose(jvp(mlp)) is mlp; splash attention needs no scope.
    """
    words = re.findall(r"\w+", one.op_name or one.name)
    named = [self.words[word] for word in words if word in self.words]
    if named:
      return named[-1]
    return "attention" if any("splash_m" in word for word in words) else OTHER


OURS = Naming({scope: scope for scope in SCOPES})


def scope_of(
  naming: Naming, program: HloModule, one: Instruction, called: Sequence[Computation], around: str
) -> str:
  """Returns an instruction's innermost scope, else the called code's most frequent, else `around`."""
  own = naming.of(one)
  if own != OTHER:
    return own
  inner = [naming.of(each) for body in called for each in _inner(program, body)]
  return max(SCOPES, key=inner.count) if set(inner) - {OTHER} else around


def _inner(program: HloModule, body: Computation) -> Iterator[Instruction]:
  for inner in body:
    yield inner
    for called in program.called_by(inner):
      yield from _inner(program, called)
