"""Pages in a real Chromium: all is drawn, nothing is complained about, nothing hostile runs."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, sync_playwright
from test_critical_batch_verdict import report as report_of
from written_runs import HOSTILE, write_run

from maxbatch import report
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.batch.plan_plot import plan_chart
from maxbatch.config.load import load_config
from maxbatch.experiments.plot import critical_batch_charts
from maxbatch.pipeline_parallel.drawings import timetable_chart
from maxbatch.pipeline_parallel.schedule import TimetableShape, timetable
from maxbatch.plots.page import picture

CHROMIUM = next(
  filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_MILLISECONDS = 300_000
pytestmark = pytest.mark.skipif(
  not CHROMIUM, reason="there is no Chromium: apt-get install chromium"
)

DRAWN = """() => {
  const inside = root => [...root.querySelectorAll('*')].flatMap(
    one => [one, ...(one.shadowRoot ? inside(one.shadowRoot) : [])])
  return [...document.querySelectorAll('.panel')].map(panel => inside(panel).filter(
    one => one.tagName == 'CANVAS').map(canvas => canvas.width == 0 ? 0 :
      new Set(new Uint32Array(canvas.getContext('2d').getImageData(
        0, 0, canvas.width, canvas.height).data.buffer)).size).reduce((a, b) => Math.max(a, b), 0))
}"""
"""How many colors each panel's drawing has."""
RANGES = "() => Bokeh.documents[0].roots().filter(one => one.x_range).map(one => one.x_range.end)"


class Looked:
  """A page, opened, with all that the browser complained about."""

  def __init__(self, browser: Browser, file: Path, **screen: Any):
    self.complaints: list[str] = []
    self.page = browser.new_context(offline=True, **screen).new_page()
    self.page.set_default_timeout(PATIENCE_MILLISECONDS)
    self.page.on("console", lambda said: self._hear(said.type, said.text))
    self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
    self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
    self.page.on("dialog", self._dismiss)
    self.page.goto(file.as_uri())
    self.page.wait_for_function("() => Bokeh.documents.length && Bokeh.documents[0].is_idle")

  def _dismiss(self, dialog: Dialog) -> None:
    self.complaints.append("a dialog")
    dialog.dismiss()

  def _hear(self, kind: str, text: str) -> None:
    if kind in ("error", "warning"):
      self.complaints.append(text)

  def close(self) -> None:
    assert self.complaints == []
    self.page.context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
  with sync_playwright() as playwright:
    yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
  keys = "pipeline_schedule=1f1b ici_pipeline_parallelism=2 gradient_accumulation_steps=2"
  name = "<img src=x onerror=alert(3)>"
  folder = write_run(tmp_path_factory.mktemp("runs") / name, 4000, *keys.split(), text=HOSTILE)
  assert report.main([str(folder)]) == 0
  return folder / "report.html"


def test_every_plot_is_drawn_and_the_axis_of_x_switches(browser, one):
  looked = Looked(browser, one, viewport={"width": 1100, "height": 900})
  page = looked.page
  colors = page.evaluate(DRAWN)
  assert len(colors) >= 9
  assert min(colors) > 3, colors
  assert page.locator("h1").inner_text() == "<img src=x onerror=alert(3)>"
  for button, end in (("tokens", 4000 * 32 * 128), ("seconds of steps", 2000), ("steps", 4000)):
    page.get_by_role("button", name=button, exact=True).click()
    page.wait_for_function(f"() => Math.abs(({RANGES})()[0] / {end} - 1) < 0.05")
  place = page.locator(".panel").first.bounding_box()
  assert place is not None
  page.mouse.move(place["x"] + 400, place["y"] + 120)
  page.get_by_text("seconds of steps:").first.wait_for()
  looked.close()


def test_on_a_phone_in_the_dark_and_in_print(browser, one, tmp_path):
  phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
  looked = Looked(browser, one, color_scheme="dark", **phone)
  page = looked.page
  assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
  assert min(page.evaluate(DRAWN)) > 3
  dark = "() => getComputedStyle(document.body).backgroundColor"
  assert page.evaluate(dark) == "rgb(20, 24, 29)"
  page.emulate_media(media="print")
  assert page.evaluate(dark) == "rgb(255, 255, 255)"
  assert not page.locator("nav").is_visible()
  looked.close()


def test_runs_over_each_other_are_hidden_together(browser, tmp_path):
  runs = [
    write_run(tmp_path / name, 40, loss=2.0 + n) for n, name in enumerate(("$$x$$", "<b>&amp;"))
  ]
  file = tmp_path / "both.html"
  assert report.main([*map(str, runs), "--out", str(file)]) == 0
  looked = Looked(browser, file, viewport={"width": 1100, "height": 900})
  assert min(looked.page.evaluate(DRAWN)) > 3
  visible = "() => Bokeh.documents[0].roots().filter(one => one.renderers).map(one => one.renderers[0].visible)"
  looked.page.evaluate("() => {Bokeh.documents[0].roots()[0].renderers[0].visible = false}")
  assert not any(looked.page.evaluate(visible)[:4])
  looked.close()


def test_the_other_pictures_are_drawn_too(browser, tmp_path):
  config = load_config(["config=base"])
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  tables = {
    "few words": timetable("interleaved_1f1b", TimetableShape(2, 4, 2)),
    "too many words": timetable("1f1b", TimetableShape(2, 800)),
  }
  charts = [
    plan_chart(plan, learning_rate(config.optimizer, plan, config.run.schedule_unit)),
    *[timetable_chart(table, name) for name, table in tables.items()],
    *critical_batch_charts(report_of({1: 3.0, 2: 3.001, 4: 3.05, 8: math.inf})),
  ]
  file = tmp_path / "pictures.html"
  file.write_bytes(picture(HOSTILE, charts))
  looked = Looked(browser, file, viewport={"width": 1100, "height": 900})
  colors = looked.page.evaluate(DRAWN)
  assert len(colors) == 6
  assert min(colors) > 3, colors
  # Too narrow for its number, a box says it where one points at it.
  panel = looked.page.locator(".panel").nth(3)
  panel.scroll_into_view_if_needed()
  place = panel.bounding_box()
  assert place is not None
  looked.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 65)
  looked.page.get_by_text("stage 0", exact=True).first.wait_for()
  looked.close()
