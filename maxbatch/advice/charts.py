"""Draws advice: the frontier of time and tokens, and the batch by the rules."""

from maxbatch.advice.advice import Advice
from maxbatch.advice.words import short
from maxbatch.plots.chart import Chart, Line, Panel


def charts(advice: Advice) -> list[Chart]:
  """Returns the frontier, where a place is known, and the batch by the rules."""
  return [*([_frontier(advice)] if advice.curves else []), _rules(advice)]


def _frontier(advice: Advice) -> Chart:
  lines = []
  for number, curve in enumerate(advice.curves):
    tokens, days = [one.tokens for one in curve.points], [one.days for one in curve.points]
    lines.append(Line(str(curve.place), [tokens], days, color=number, dash=number, style="both"))
  knees = [curve.knee for curve in advice.curves]
  at = [[one.tokens for one in knees]]
  lines.append(Line("knees", at, [one.days for one in knees], color=len(lines), style="dots"))
  if advice.here:
    own = advice.here
    lines.append(Line("advised", [[own.tokens]], [own.days], color=len(lines), style="dots"))
  panel = Panel("days to the same loss", lines, low=0)
  return Chart("days over tokens, to the same loss", ["tokens"], [panel])


def _rules(advice: Advice) -> Chart:
  """Draws every rule's batch over the data overhead: those that can be carried are lines through
  0."""
  overheads = [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
  lines = []
  for one in advice.size.said:
    if one.at_overhead is not None:
      scale = one.at_overhead / advice.size.data_overhead
      values = [scale * overhead for overhead in overheads]
      number = len(lines)
      lines.append(Line(one.rule.title, [overheads], values, color=number, dash=number))
  taken = f"taken, {short(advice.size.tokens)}"
  point = [[advice.size.data_overhead]]
  lines.append(Line(taken, point, [advice.size.tokens], color=len(lines), style="dots"))
  panel = Panel("batch by rule, tokens of a step", lines, log=True)
  name = "batch over data overhead, by rule"
  return Chart(name, ["data overhead"], [panel], log_x=True, ticks=overheads)
