"""Figures in one style, and their files, by matplotlib.

Lines differ in their dashes too, so that a picture is read without telling colors apart. The same
data give the same bytes. Words stay words in an SVG, to be searched and selected.
"""

from __future__ import annotations

import io
import pathlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.errors import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.axis import Axis
  from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Of Okabe and Ito (2008), which people with any color vision tell apart."""
DASHES = ("-", "--", "-.", ":")
"""As many as have no factor in common with the number of colors: pairs repeat after 28 lines."""
MARKERS = "osD^vPX"
FAINT = "#767676"
_WIDTH_INCHES, _PANEL_INCHES = 8.0, 2.8
_DOTS_PER_INCH = 120


def new_figure(
  title: str, num_panels: int, *, width: float = _WIDTH_INCHES, panel: float = _PANEL_INCHES
) -> tuple[Figure, list[Axes]]:
  """A figure with panels under each other, and their axes.

  Args:
    title: stands above all panels, letter by letter.
    num_panels: how many.
    width: of the figure, in inches.
    panel: height of each panel, in inches.
  """
  # Importing matplotlib takes 0.3 s and brings numpy: only who draws pays for that.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, num_panels * panel + 0.4), layout="constrained")
  # A $ in a run's name begins no formula.
  figure.suptitle(title, parse_math=False)
  axes = [figure.add_subplot(num_panels, 1, place + 1) for place in range(num_panels)]
  for one in axes:
    one.grid(visible=True, color="#dddddd", linewidth=0.8)
    one.set_axisbelow(True)
    one.spines[["top", "right"]].set_visible(False)
  return figure, axes


def count_axis(axis: Axis) -> None:
  """Marks an axis of samples, tokens or steps at whole numbers: 1200000 as 1.2M."""
  from matplotlib.ticker import EngFormatter, MaxNLocator

  axis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 2.5, 5, 10]))
  axis.set_major_formatter(EngFormatter(sep=""))


def legend(axes: Axes) -> None:
  """Names the lines and areas that have a label, to the right of the panel, letter by letter."""
  found = axes.legend(
    loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize="small", frameon=False
  )
  for words in found.get_texts():
    words.set_parse_math(False)


def render(figure: Figure, suffix: str) -> bytes:
  """The figure as the content of a file with this suffix, one of FORMATS."""
  import matplotlib

  kind = suffix.removeprefix(".")
  # Dates, and names of parts drawn at random, would make every file another one.
  metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
  written = io.BytesIO()
  with (
    matplotlib.rc_context({"svg.hashsalt": "maxbatch", "svg.fonttype": "none"}),
    warnings.catch_warnings(),
  ):
    # A run's name may have letters that the font lacks; they are drawn as boxes.
    warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
    figure.savefig(written, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
  return written.getvalue()


def check_picture_file(option: str, file: str, example: str) -> None:
  """Refuses a file whose name does not say what kind of picture it is to be.

  Args:
    option: how the file was asked for, for the message.
    file: what was asked for.
    example: a name without a suffix.

  Raises:
    UserError: with a name that works.
  """
  if pathlib.Path(file).suffix not in FORMATS:
    raise UserError(
      f"{option} {file}: name a file that ends in {_listed(FORMATS)}; "
      f"for example {option} {example}.svg"
    )


def _listed(words: Sequence[str]) -> str:
  return f"{', '.join(words[:-1])} or {words[-1]}"
