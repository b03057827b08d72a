"""Pictures as pages of their own: what may be their name, and what of a title gets into them."""

import html
import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest

from maxbatch import advise
from maxbatch.errors import UserError
from maxbatch.plan import main as plan_command
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.interactive import COLORS, DASHES
from maxbatch.plots.page import check_picture_file, picture
from maxbatch.run_folder.metrics import Record
from maxbatch.run_folder.progress import Progress
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.exploration import Exploration
from maxbatch.tuning.search import ProbeResult, Tried


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


# --- pictures of terminals in docs/: scripts/terminal_picture.py drew what a command printed ----------

REPORTS = Path(__file__).resolve().parent.parent / "docs" / "reports"
TEXT = re.compile(r'<text[^>]*? x="([\d.]+)"[^>]*? y="([\d.]+)"[^>]*>(.*?)</text>')


def lines_of(name: str) -> tuple[list[str], list[str]]:
  """Returns the words of the command in a picture, and the lines below it."""
  rows = dict[float, str]()
  for _, y, text in TEXT.findall((REPORTS / name).read_text()):
    rows[float(y)] = rows.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
  lines = [rows[y] for y in sorted(rows)]
  first = next(n for n, line in enumerate(lines) if line.startswith("$ maxbatch"))
  return shlex.split(lines[first])[2:], lines[first + 1 :]


def test_the_picture_of_advice_is_what_the_command_prints(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  (command, *arguments), shown = lines_of("advise.svg")
  assert command == "advise"
  assert advise.main(arguments) == 0
  printed = [line for line in capsys.readouterr().out.splitlines() if line]
  own = [line for line in shown if line != "maxbatch"]
  assert own[-1] == "…"
  assert len(own) > 30
  # If not: maxbatch advise … | head -n 36 | python scripts/terminal_picture.py …
  assert own[:-1] == printed[: len(own) - 1]


def test_the_picture_of_a_run_has_the_lines_of_today(capsys):
  command, shown = lines_of("train.svg")
  assert command == ["train", "config=base"]
  assert plan_command(["config=base"]) == 0
  sizes = capsys.readouterr().out.splitlines()
  sizes = sizes[sizes.index("Batch plan") :][:9]
  assert shown[shown.index("Batch plan") :][:9] == sizes
  steps = [line for line in shown if re.match(r"step \d+/400  loss", line)]
  assert len(steps) > 5
  for line in steps:
    step, loss, rate, batch, speed = (
      float(re.search(rf"(?:{word}) ?([\d.,e+-]+)", line)[1].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]
      for word in ("step", "loss", "lr", "batch", r"batch \d+ ")
    )
    record: Record = {"step": int(step), "loss": loss, "learning_rate": rate}
    record |= {"global_batch_to_train": int(batch), "tokens_per_second": speed}
    record |= {"eval/loss": float(one[1])} if (one := re.search(r"eval ([\d.]+)", line)) else {}
    with Progress(int(step) - 1, 400, 1) as progress:
      progress.show(record)
    today = capsys.readouterr().out.strip()
    assert line.partition("  eta")[0] == today.partition("  eta")[0]


def test_the_picture_of_an_exploration_has_the_headings_of_today():
  command, shown = lines_of("explore.svg")
  assert command[0] == "train"
  tried = Tried(Candidate(Fraction(1), 1, 8, 8, 128), ProbeResult(1, 2, fits=False))
  headings = str(Exploration(1, (tried,))).splitlines()[0].split()
  first = next(n for n, line in enumerate(shown) if "micro_batch_size  microbatches" in line)
  assert " ".join(shown[first : first + 2]).split() == headings
