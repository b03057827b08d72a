"""maxbatch report RUN [RUN …]: a run, or several, as one HTML file."""

import dataclasses
import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from maxbatch.command_line.arguments import Arguments, Command, File
from maxbatch.command_line.output_file import write_output
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import leave
from maxbatch.config.find import shown, user_path
from maxbatch.errors import UserError
from maxbatch.plots.page import encoded
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.history import is_run, read_history
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_report.page import page

_EXAMPLE = "for example maxbatch report runs/first_run"


@dataclasses.dataclass(frozen=True)
class ReportArguments:
  """Beside the runs."""

  out: Annotated[
    str, File("where it is written, instead of RUN/report.html or report.html", "runs.html")
  ] = ""


COMMAND = Command(
  "report",
  """\
Writes one HTML file that needs no network: what was trained on what, its curves, where the time
went, what it wrote, what went wrong. Several runs are drawn over each other, with the keys that
differ on top and the best marked. A run is a folder, or a pattern of folders ('runs/lr-*').
""",
  ReportArguments,
  usage="RUN [RUN ...]",
  takes_keys=False,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _report)


def _report(arguments: Arguments[ReportArguments]) -> None:
  folders = run_folders(arguments.configuration)
  one = RunFolder(folders[0]).report if len(folders) == 1 else Path("report.html")
  file = arguments.own.out or str(one)
  content = encoded(page([read_history(folder) for folder in folders]))
  if arguments.own.out:
    write_output("--out", file, content)
  else:
    write_run_file(Path(file), content)
  print(f"{file}: {len(content) / 1e6:.1f} MB")


def run_folders(given: Sequence[str]) -> list[Path]:
  """Returns the folders of runs that the arguments name, each once, in their order.

  Raises:
    UserError: there is none, or one is no run's.
  """
  if not given:
    raise UserError(f"give a run's folder; {_EXAMPLE}")
  results: dict[Path, None] = {}
  for one in given:
    path = user_path(one)
    if one and os.path.isdir(path):
      if not is_run(path):
        raise UserError(f"{shown(one)}: that is not a run's folder; {_EXAMPLE}")
      results[path] = None
      continue
    matching = [Path(name) for name in sorted(glob.glob(str(path)))] if one else []
    runs = [folder for folder in matching if folder.is_dir() and is_run(folder)]
    if not runs:
      what = "none of these is a run's folder" if matching else "there is no such folder"
      raise UserError(f"{shown(one) or repr(one)}: {what}; {_EXAMPLE}")
    results |= dict.fromkeys(runs)
  return list(results)


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
