"""Figures and their files: the same bytes each time, words as they were given, one style."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pictures import parsed, png_size

from maxbatch.errors import UserError
from maxbatch.plots.figure import (
  COLORS,
  DASHES,
  FORMATS,
  check_picture_file,
  count_axis,
  legend,
  new_figure,
  render,
)

ROOT = Path(__file__).resolve().parent.parent


def example(title: str = "a title") -> Figure:
  figure, (above, below) = new_figure(title, 2)
  above.plot([0, 1_000_000, 2_000_000], [1.0, 2.0, 3.0], label="$x_$", gid="curve")
  count_axis(above.xaxis)
  legend(above)
  below.fill_between([0, 1], [0, 1], hatch="/", label="area")
  legend(below)
  return figure


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_same_data_give_the_same_bytes(suffix):
  assert render(example(), suffix) == render(example(), suffix)


def test_an_svg_is_the_same_from_another_process():
  code = (
    "import sys; sys.path.insert(0, 'tests'); import test_figure; "
    "sys.stdout.buffer.write(test_figure.render(test_figure.example(), '.svg'))"
  )
  other = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True)
  assert other.stdout == render(example(), ".svg")


def test_each_kind_is_what_its_suffix_says():
  ElementTree.fromstring(render(example(), ".svg"))
  width, height = png_size(render(example(), ".png"))
  assert 0.5 < height / width < 1
  assert render(example(), ".pdf").startswith(b"%PDF-")


@pytest.mark.parametrize("title", ["a < b & c", "$broken$ \\frac{", "a_b^c", "批量"])
def test_a_title_is_drawn_letter_by_letter(title):
  assert title in parsed(example(title)).words


def test_names_and_counts_are_words():
  drawing = parsed(example())
  assert "$x_$" in drawing.words
  assert {"0", "1M", "2M"} <= set(drawing.words)
  assert len(drawing.points("curve")) == 3


def test_pairs_of_color_and_dashes_repeat_late():
  count = 28
  pairs = {(COLORS[n % len(COLORS)], DASHES[n % len(DASHES)]) for n in range(count)}
  assert len(pairs) == count


@pytest.mark.parametrize("file", ["", "out", "out.gif", "steps=3", "out.SVGZ"])
def test_other_files_are_refused(file):
  with pytest.raises(UserError) as caught:
    check_picture_file("--plot", file, "batch")
  assert str(caught.value) == (
    f"--plot {file}: name a file that ends in .svg, .png or .pdf; for example --plot batch.svg"
  )


def test_drawing_leaves_no_global_state_behind():
  # Asking for the backend would choose one, by way of pyplot.
  code = (
    "import test_figure, matplotlib, sys\n"
    "settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
    "before = settings()\n"
    "test_figure.render(test_figure.example(), '.png')\n"
    "assert settings() == before\n"
    "assert 'matplotlib.pyplot' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", check=True)
