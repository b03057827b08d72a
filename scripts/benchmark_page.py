"""Measures how long a page takes to open in Chromium: until its text is there, and until all is drawn.

    .venv/bin/python scripts/benchmark_page.py runs/first_run/report.html

Several pages are opened in turns. Prints the median of seven times, with the least, in milliseconds: the
first paint, all plots drawn, and the processor time of the page until then. A copy of the page from before a
change, beside that from after it, shows what the change gains, however busy the machine is.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from screenshot import DRAWN, chromium

_TIMES = 7
_FIRST_PAINT = "() => performance.getEntriesByType('paint')[0].startTime"
_NOW = "() => performance.now()"


def opened(browser: Browser, file: Path) -> tuple[float, float, float]:
  """Milliseconds: the first paint, all plots drawn, and processor time until then."""
  context = browser.new_context(offline=True, viewport={"width": 1100, "height": 900})
  page = context.new_page()
  session = context.new_cdp_session(page)
  session.send("Performance.enable", {"timeDomain": "threadTicks"})
  page.goto(file.resolve().as_uri())
  page.wait_for_function(DRAWN, polling=10)
  drawn = page.evaluate(_NOW)
  results = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
  times = page.evaluate(_FIRST_PAINT), drawn, 1000 * results["TaskDuration"]
  context.close()
  return times


def main(arguments: Sequence[str]) -> None:
  """Opens the pages in turns."""
  files = [Path(argument) for argument in arguments]
  with sync_playwright() as playwright:
    browser = chromium(playwright)
    rounds = [[opened(browser, file) for file in files] for _ in range(_TIMES)]
  for number, file in enumerate(files):
    shown = ", ".join(
      f"{name} {statistics.median(times):.0f} ({min(times):.0f})"
      for name, times in zip(
        ("first paint", "drawn", "processor"),
        zip(*(one[number] for one in rounds), strict=True),
        strict=True,
      )
    )
    print(f"{file}: {shown} ms")


if __name__ == "__main__":
  main(sys.argv[1:])
