"""Refuses an estimated time where the program's text was not understood.

The text of a compiled program is no stable format: another compiler may write loops, operands or
kernels in a new way. What is then not counted would make the estimate a wrong figure.
"""

import collections
from collections.abc import Mapping, Sequence

from maxbatch.errors import UserError
from maxbatch.estimate.costs import OperationCost
from maxbatch.estimate.step_time import StepEstimate

LEAST_COVERAGE = 0.97
"""Of the traced matrix products, which the program does at least: it computes some of them again."""

TESTED_VERSIONS = (
  {"jax": "0.10.2", "libtpu": "0.0.51"},
  {"jax": "0.12.0.1", "libtpu": "0.0.52"},
)
"""With which the tests compare estimates with traced programs; the first is in constraints.txt."""

_NUM_NAMED = 5
_TERA = 1e12


def check_coverage(
  work: StepEstimate,
  costs: Sequence[OperationCost],
  expected_flops: float,
  versions: Mapping[str, object],
) -> None:
  """Checks that the operations found in a program account for its matrix products.

  Args:
    work: the estimate.
    costs: the operations that it is made from.
    expected_flops: as traced, of a step of one microbatch on one device.
    versions: of jax and libtpu, by package.

  Raises:
    UserError: they do not; with what was counted, what was not, and versions that work.
  """
  if not work.coverage < LEAST_COVERAGE:
    return
  known = [_words(each) for each in TESTED_VERSIONS]
  pins = " ".join(f"{package}=={version}" for package, version in TESTED_VERSIONS[0].items())
  raise UserError(
    f"the time of the compiled step cannot be estimated: {work.coverage:.1%} of its matrix products "
    f"were found in the compiler's text, and less than {LEAST_COVERAGE:.0%} is no estimate. "
    f"Counted, of {expected_flops / _TERA:.4g} TFLOP a device: {_counted(costs)}. Not counted: "
    f"{_not_counted(costs)}. This is {_words(versions)}; estimates are tested with "
    f"{' and with '.join(known)}: pip install {pins}"
  )


def _words(versions: Mapping[str, object]) -> str:
  return f"jax {versions['jax']} and libtpu {versions['libtpu']}"


def _counted(costs: Sequence[OperationCost]) -> str:
  """FLOPs by the model's parts."""
  scopes: dict[str, int] = collections.defaultdict(int)
  for cost in costs:
    scopes[cost.scope] += cost.flops * cost.count
  found = sorted(((flops, scope) for scope, flops in scopes.items() if flops), reverse=True)
  return ", ".join(f"{scope} {flops / _TERA:.4g}" for flops, scope in found) or "nothing"


def _not_counted(costs: Sequence[OperationCost]) -> str:
  """What is known to be missing: further iterations of loops, and kernels."""
  loops = {name for cost in costs for name in cost.unread_loops}
  kernels = {cost.name for cost in costs if cost.opcode == "custom-call" and not cost.flops}
  parts = ["what is written in a way that is not known here"]
  if kernels:
    parts.insert(0, f"products in the kernels {_some(kernels)} (pallas_call takes a cost_estimate)")
  if loops:
    parts.insert(0, f"all but one iteration of the loops {_some(loops)}")
  return "; ".join(parts)


def _some(names: set[str]) -> str:
  listed = sorted(names)
  more = len(listed) - _NUM_NAMED
  return ", ".join(listed[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
