"""Two compiled training steps side by side: why is theirs faster?

    .venv/bin/python scripts/compare_tpu_step.py --peer-hlo FILE model_name=llama2-7b compile_topology=v5e-256 …
    .venv/bin/python scripts/compare_tpu_step.py --peer-hlo FILE --hlo FILE --chip v5e

Ours is compiled from keys, as by compile_only=true, or read from a file. A file is the optimized HLO
text that XLA writes with --xla_dump_to=FOLDER --xla_dump_hlo_as_text=true, *after_codegen.txt on a TPU;
FOLDER itself works too. docs/yardstick.md says how to have MaxText write one.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Callable

from step_breakdown import Breakdown, Comparison, breakdown, peers

from maxbatch.compile.compile_step import compile_reports
from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.estimate import hlo
from maxbatch.estimate.chips import CHIPS, Chip
from maxbatch.estimate.costs import OURS, Naming, program_costs
from maxbatch.hardware.devices import find_devices
from maxbatch.modes.method import Purpose
from maxbatch.modes.pretraining import PRETRAINING
from maxbatch.training.build import build_trainer

_MEMORY = re.compile(r"Memory Space: default.*\nTotal bytes: (\d+)")


def program_text(path: pathlib.Path) -> tuple[str, int | None]:
  """The optimized HLO text of a file, or of the largest program dumped to a folder; and the bytes that
  the compiler's memory report beside it says a device needs, if there is one.

  Raises:
    UserError: there is no such text.
  """
  if path.is_dir():
    results = sorted(path.glob("*after_codegen.txt"), key=lambda file: file.stat().st_size)
    results = results or sorted(
      path.glob("*after_optimizations.txt"), key=lambda f: f.stat().st_size
    )
    if not results:
      raise UserError(
        f"{path}: no *after_codegen.txt or *after_optimizations.txt in it; compile with "
        f"--xla_dump_to={path} --xla_dump_hlo_as_text=true"
      )
    path = results[-1]
  try:
    text = path.read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"{path} cannot be read as HLO text: {error}") from error
  stem = path.name.replace("after_codegen.txt", "").replace("after_optimizations.txt", "")
  report = path.with_name(f"{stem}after_optimizations-memory-usage-report.txt")
  memory = _MEMORY.search(report.read_text()) if report.exists() else None
  return text, int(memory[1]) if memory else None


def from_file(
  name: str, chip: Chip, num_microbatches: int, naming: Callable[[str], Naming]
) -> Breakdown:
  """The step of a file.

  Raises:
    UserError: it is no HLO text.
  """
  text, peak = program_text(pathlib.Path(name).expanduser())
  try:
    costs = program_costs(hlo.parse(text), naming(text))
  except ValueError as error:
    raise UserError(f"{name}: {error}") from error
  return breakdown(name, costs, chip, num_microbatches=num_microbatches, peak_bytes=peak)


def from_keys(keys: list[str]) -> tuple[Breakdown, Chip]:
  """Our own step, compiled, and the chip that it is for.

  Raises:
    UserError: the keys do not work, or name no TPU.
  """
  config = load_config(["config=base", "compile_only=true", *keys])
  run = PRETRAINING.resolve(config, find_devices(config), Purpose.COMPILE)
  trainer = build_trainer(run.config, run.plan, run.target.devices)
  report = compile_reports(run.config, run.plan, trainer, run.target.devices)[-1]
  if report.chip is None:
    raise UserError(
      "these keys compile for no TPU, whose times are what is compared; name one, for example "
      "compile_topology=v5e-16"
    )
  layout = run.plan.topology
  result = breakdown(
    " ".join(keys),
    report.operations,
    report.chip,
    num_microbatches=report.num_microbatches,
    devices_per_slice=layout.devices_per_slice if layout.num_slices > 1 else None,
    peak_bytes=report.peak,
  )
  return result, report.chip


def arguments(given: list[str]) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--peer-hlo", required=True, metavar="FILE", help="theirs: HLO text or dump")
  parser.add_argument("--hlo", metavar="FILE", help="ours, instead of keys to compile")
  parser.add_argument("--chip", choices=sorted(CHIPS), help="of both programs, with --hlo")
  parser.add_argument(
    "--microbatches", type=int, default=1, help="of our step in --hlo; theirs are counted"
  )
  parser.add_argument("keys", nargs="*", metavar="key=value", help="ours, as for compile_only")
  return parser.parse_args(given)


def compare(given: list[str]) -> Comparison:
  """Their step and ours.

  Raises:
    UserError: a file or the keys do not work.
  """
  asked = arguments(given)
  if bool(asked.hlo) == bool(asked.keys):
    raise UserError(
      "ours is either --hlo FILE or key=value …: for example --hlo ours.hlo --chip v5e, or "
      "model_name=llama2-7b compile_topology=v5e-256"
    )
  if asked.hlo:
    if not asked.chip:
      raise UserError(
        f"--hlo {asked.hlo}: HLO text does not name its device; add --chip, one of "
        f"{', '.join(sorted(CHIPS))}"
      )
    chip = CHIPS[asked.chip]
    ours = from_file(asked.hlo, chip, asked.microbatches, lambda _: OURS)
  else:
    ours, chip = from_keys(asked.keys)
  return Comparison(from_file(asked.peer_hlo, chip, 1, peers), ours, chip)


def main(given: list[str]) -> int:
  """Compares and prints."""
  try:
    print(compare(given))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
