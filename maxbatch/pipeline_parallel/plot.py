"""A timetable drawn: a row per stage, time to the right, a backward twice as wide as a forward."""

from collections.abc import Iterator

from maxbatch.pipeline_parallel.cost import PassCosts, tick_times
from maxbatch.pipeline_parallel.timetable import Timetable
from maxbatch.plots.chart import Bars, Chart, Panel

_COSTS = PassCosts()
_COLORS = {"forward": 4, "backward": 5}
_PALER = 0.6
"""Later repeats are, by at most so much."""


def timetable_chart(table: Timetable, title: str) -> Chart:
  """A bar per forward and backward, labelled with its microbatch: repeat.microbatch if the stages
  compute several repeats. Where there is none, a stage is idle."""
  bars = [bar for repeat in range(table.shape.repeats) for bar in _bars(table, repeat)]
  axis = "time (a forward of one microbatch on one stage takes 1)"
  names = [_name(stage) for stage in range(table.shape.stages)]
  return Chart(f"timetable of {title}", [axis], [Panel("", bars)], row_names=names)


def _bars(table: Timetable, repeat: int) -> Iterator[Bars]:
  """The forwards and the backwards of a repeat."""
  clock, repeats = tick_times(table, _COSTS), table.shape.repeats
  passes = {
    "forward": (
      _COSTS.forward,
      [(clock[tick].forward_start, place, one) for tick, place, one in table.forwards()],
    ),
    "backward": (
      _COSTS.backward,
      [(clock[tick].backward_start, place, one) for tick, place, one in table.backwards()],
    ),
  }
  for name, (width, entries) in passes.items():
    own = [entry for entry in entries if entry[1].repeat == repeat]
    yield Bars(
      name if repeats == 1 else f"{name}, repeat {repeat}",
      [_name(place.stage) for _, place, _ in own],
      [width] * len(own),
      [begin for begin, _, _ in own],
      color=_COLORS[name],
      opacity=1 - _PALER * repeat / repeats,
      words=[
        f"{repeat}.{one.microbatch}" if repeats > 1 else f"{one.microbatch}" for *_, one in own
      ],
    )


def _name(stage: int) -> str:
  return f"stage {stage}"
