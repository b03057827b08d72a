"""What is written of a trace, once it is there."""

import json
from typing import cast

import jax

from maxbatch.compile.profile import StepProfile, step_profile
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.profiling import Traced
from maxbatch.training.step import Step


def write_profile(folder: RunFolder, traced: Traced, step: Step) -> None:
  """Writes profile.json, and says where the time went.

  Raises:
    UserError: it cannot be written.
  """
  text = cast(jax.stages.Compiled, step).as_text() or ""
  found = step_profile(folder.profile, text, traced.last - traced.first)
  print(f"\nTraced steps {traced.first + 1} to {traced.last}, in {folder.profile}", flush=True)
  if found is None:
    print("  the trace has no operation of the step", flush=True)
    return
  write_run_file(folder.profile_json, json.dumps(found.as_dict(), indent=2) + "\n")
  print("\n".join(_lines(found)), flush=True)


def _lines(found: StepProfile) -> list[str]:
  scopes = found.by_scope()
  total = sum(scopes.values())
  return [f"  {name:<26}{each:10.4g} s {each / total:6.1%}" for name, each in scopes.items()]
