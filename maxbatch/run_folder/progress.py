"""What a person sees while a run goes on: one live line on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import tqdm

from maxbatch.run_folder.metrics import Record


class Progress:
  """Shows the steps of a run; a context manager."""

  def __init__(self, start: int, steps: int, log_period: int):
    self._steps, self._period, self._start = steps, log_period, start
    self._began = time.perf_counter()
    self._bar = _terminal_bar(
      total=steps,
      initial=start,
      unit="step",
      bar_format="step {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )
    self._num_steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
    self._line_tokens, self._line_seconds = 0.0, 0.0

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    if self._bar is not None:
      self._bar.close()

  def begin(self) -> None:
    """Takes note that the first step begins now: what was prepared before it is no step's time."""
    self._began = time.perf_counter()
    if self._bar is not None:
      self._bar.unpause()

  def expect(self, steps: int) -> None:
    """Takes note that the run will end after another number of steps."""
    self._steps = steps
    if self._bar is not None:
      self._bar.total = steps

  def show(self, record: Record) -> None:
    """Shows a finished step; its rate is that of all since the last line."""
    step = int(record["step"])
    is_line = step % self._period == 0 or step == self._steps or _is_evaluated(record)
    if "step_seconds" in record:
      self._num_steps += 1
      self._seconds += record["step_seconds"]
      self._waited_seconds += record["data_wait_seconds"]
      self._line_seconds += record["step_seconds"]
      self._line_tokens += record["tokens_per_second"] * record["step_seconds"]
      record = record | {"tokens_per_second": self._line_tokens / self._line_seconds}
    if is_line:
      self._line_tokens, self._line_seconds = 0.0, 0.0
    if self._bar is not None:
      now = {name: value for name, value in record.items() if not name.startswith("eval/")}
      self._bar.set_postfix_str(_figures(now), refresh=False)
      self._bar.update(step - self._bar.n)
    elif is_line:
      # Beside an evaluation there is no room.
      per_step = (time.perf_counter() - self._began) / max(step - self._start, 1)
      left = tqdm.tqdm.format_interval(per_step * (self._steps - step))
      eta = "" if _is_evaluated(record) else f"  eta {left}"
      print(f"step {step}/{self._steps}  {_figures(record)}{eta}", flush=True)
    if self._bar is not None and _is_evaluated(record):
      self.say(f"step {step}/{self._steps}  {_figures(record)}")

  def data_wait(self) -> str:
    """Says how much of the time of the steps shown this process has waited for rows; or nothing."""
    if not self._num_steps:
      return ""
    share = self._waited_seconds / self._seconds
    return (
      f"Waited for data: {share:.2%} of the time of {self._num_steps:,} steps "
      f"({self._waited_seconds:.3g} of {self._seconds:,.4g} s)"
    )

  def say(self, text: str) -> None:
    """Prints a line without breaking the live one."""
    if self._bar is None:
      print(text, flush=True)
    else:
      self._bar.write(text, file=sys.stdout)


class ByteProgress:
  """Shows on a terminal how much of a file or folder is done, and how fast; a context manager."""

  def __init__(self, what: str, total_bytes: int):
    self._bar = _terminal_bar(
      total=total_bytes,
      unit="B",
      unit_scale=True,
      desc=what,
      bar_format="{desc} {percentage:.0f}% {n_fmt}B of {total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]",
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    if self._bar is not None:
      self._bar.close()

  def over(self, parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the same parts, each of which counts as done when the next is asked for."""
    for part in parts:
      yield part
      if self._bar is not None:
        self._bar.update(part.nbytes)


def _terminal_bar(**shown: Any) -> tqdm.tqdm | None:
  """Returns a progress bar; None where the output is no terminal."""
  if not sys.stdout.isatty():
    return None
  # Terminals without a size of their own (in containers) count as 80 by 24, not as 0 by 0.
  size = shutil.get_terminal_size()
  return tqdm.tqdm(file=sys.stdout, ncols=size.columns, nrows=size.lines, **shown)


_SHOWN = {
  "rl/reward": "reward",
  "eval/loss": "eval",
  "eval/pass_at_1": "pass@1",
  "eval/greedy_pass_at_1": "greedy pass@1",
}
"""What is shown beside the loss, where it is known."""


def _is_evaluated(record: Record) -> bool:
  return any(name.startswith("eval/") for name in record)


def _figures(record: Record) -> str:
  parts = []
  if "loss" in record:
    parts.append(f"loss {record['loss']:.3f}")
  parts += [f"{word} {record[name]:.3f}" for name, word in _SHOWN.items() if name in record]
  if "learning_rate" in record:
    parts.append(f"lr {record['learning_rate']:.2e}")
    parts.append(f"batch {record['global_batch_to_train']}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
  return "  ".join(parts)
