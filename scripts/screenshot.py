"""Makes a PNG of a page, as docs/ shows it, in Chromium.

    .venv/bin/python scripts/screenshot.py gns/gns.html docs/reports/noise_scale.png

`width=800` is that of the window in pixels; `dark=true` prefers a dark page.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRAWN = "() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"


def chromium(playwright: Playwright) -> Browser:
  """The machine's own, or playwright's."""
  executable = next(filter(None, map(shutil.which, _CHROMIUM)), None)
  return playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])


def main(arguments: Sequence[str]) -> None:
  """Opens the page, waits until all is drawn, and takes it as it stands."""
  page_file, picture_file = (argument for argument in arguments if "=" not in argument)
  given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
  with sync_playwright() as playwright:
    browser = chromium(playwright)
    page = browser.new_page(
      viewport={"width": int(given.get("width", "800")), "height": 600},
      color_scheme="dark" if given.get("dark") == "true" else "light",
    )
    page.goto(Path(page_file).resolve().as_uri())
    page.wait_for_function(DRAWN)
    page.screenshot(path=picture_file, full_page=True)


if __name__ == "__main__":
  main(sys.argv[1:])
