"""maxbatch runs [FOLDER …]: the runs that are there, how they go, and how to go on."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from maxbatch.command_line.arguments import Arguments, Command
from maxbatch.command_line.run import run_command
from maxbatch.command_line.screen import Color, colored, in_columns, printable
from maxbatch.command_line.signals import leave
from maxbatch.config.find import shown, user_path
from maxbatch.errors import UserError
from maxbatch.run_folder.history import RunHistory, State, Status, glance_at, runs_below, status_of

_COLORS: dict[State, Color] = {
  "running": "blue", "finished": "green", "stopped": "yellow", "diverged": "red",
  "failed": "red", "killed": "red", "silent": "red", "compiled": "faint", "unknown": "faint",
}  # fmt: skip
_NAME_COLUMNS = 22
_HEAD = ("run", "state", "step", "loss", "eval", "batch", "tokens/s")
_WIDTHS = (_NAME_COLUMNS, 9, 14, 7, 7, 7, 8)
"""With a space between each two they are 80 columns."""


@dataclasses.dataclass(frozen=True)
class RunsArguments:
  """There are only the folders."""


COMMAND = Command(
  "runs",
  """\
Lists the runs in a folder (runs, if none is named), a line each: state, step, training and validation
loss, batch and speed; and for those that have stopped the command that continues them.
""",
  RunsArguments,
  usage="[FOLDER ...]",
  takes_keys=False,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _list)


def _list(arguments: Arguments[RunsArguments]) -> None:
  given = [user_path(one) for one in arguments.configuration or ("runs",)]
  folders = list(dict.fromkeys(run for folder in given for run in runs_below(folder)))
  if not folders:
    places = " and ".join(shown(str(folder)) for folder in given)
    raise UserError(f"{places}: no run found; give a folder that holds runs, for example runs")
  print(colored(_line(_HEAD), "bold"))
  stopped = [result for folder in folders if (result := _show(folder, given)) is not None]
  for name, status in stopped:
    print(f"\n{name} {colored(status.state, _COLORS[status.state])}: {printable(status.sentence)}")
    print(f"  {printable(status.go_on)}")


def _show(folder: Path, given: Sequence[Path]) -> tuple[str, Status] | None:
  """Prints the line of a run; its name and status if there is something to do."""
  run = glance_at(folder)
  status = status_of(run)
  name = printable(_name(folder, given))
  shown = name if len(name) <= _NAME_COLUMNS else f"…{name[1 - _NAME_COLUMNS :]}"
  line = _line((shown, status.state, *_figures(run)))
  begin, end = line[:_NAME_COLUMNS], line[_NAME_COLUMNS + 1 + _WIDTHS[1] :]
  state = line[_NAME_COLUMNS : _NAME_COLUMNS + 1 + _WIDTHS[1]]
  print(begin + colored(state, _COLORS[status.state]) + end)
  return (name, status) if status.go_on else None


def _name(folder: Path, given: Sequence[Path]) -> str:
  """Returns the folder's path within the one that was named; its own name if that is it."""
  above = next(one for one in given if folder.is_relative_to(one))
  return str(folder.relative_to(above)) if folder != above else folder.absolute().name


def _figures(run: RunHistory) -> tuple[str, ...]:
  last, steps = run.metrics.last, run.derived.get("steps")
  step = f"{last['step']}" if "step" in last else "–"
  batch, speed = last.get("global_batch_to_train"), last.get("tokens_per_second")
  return (
    f"{step}/{steps}" if isinstance(steps, int) else step,
    *(f"{last[key]:.3f}" if key in last else "–" for key in ("loss", "eval/loss")),
    "–" if batch is None else f"{batch}",
    "–" if speed is None else _short(speed),
  )


def _short(number: float) -> str:
  """Formats three digits: 832, 12.3k, 4.56M."""
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if number >= size:
      return f"{number / size:.3g}{unit}"
  return f"{number:.3g}"


def _line(cells: Sequence[str]) -> str:
  return in_columns(cells, _WIDTHS, left=(0, 1), gap=" ")


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
