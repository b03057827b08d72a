"""Pictures as pages of their own: what may be their name, and what of a title gets into them."""

import re

import pytest

from maxbatch.errors import UserError
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.interactive import COLORS, DASHES
from maxbatch.plots.page import check_picture_file, picture


@pytest.mark.parametrize("file", ["", "out", "out.svg", "out.png", "steps=3", "out.HTML"])
def test_other_files_are_refused(file):
  with pytest.raises(UserError) as caught:
    check_picture_file("--plot", file, "batch")
  assert str(caught.value) == (
    f"--plot {file}: a picture is a page to be opened in a browser, which zooms into it and saves "
    "it as PNG; name a file that ends in .html; for example --plot batch.html"
  )


def test_words_are_escaped_and_nothing_is_fetched():
  chart = Chart("</script>", ["<i>"], [Panel("a < $b$", [Line("<b>", [[0, 1]], [1, 2])])])
  page = picture("</title><script>alert(1)</script>\x1b", [chart]).decode()
  assert "<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;\\x1b</title>" in page
  assert "<h3>a &lt; $b$</h3>" in page
  assert "alert(1)</script>" not in page
  body = page.partition("</head>\n<body>\n")[2]
  assert not {"<b>", "<i>"} & set(re.findall("<.*?>", body))
  assert 'src="' not in body


def test_pairs_of_color_and_dashes_repeat_late():
  count = 28
  pairs = {(COLORS[n % len(COLORS)], DASHES[n % len(DASHES)]) for n in range(count)}
  assert len(pairs) == count
