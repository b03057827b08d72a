"""Pages that need no network: a template, its charts, and all that draws them, in one file."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxbatch.command_line.output_file import check_output
from maxbatch.command_line.screen import printable
from maxbatch.errors import UserError
from maxbatch.plots.chart import Chart
from maxbatch.plots.interactive import embed, library

if TYPE_CHECKING:
  import jinja2

SUFFIX = ".html"
_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def rendered(
  template: str, charts: Mapping[str, Chart], folder: pathlib.Path = _TEMPLATES, **shown: Any
) -> str:
  """Returns the HTML of a page.

  Args:
    folder: where the template is.
  """
  # Only who draws pays for it.
  import markupsafe

  script, embedded = embed(charts)
  return (
    _environment(folder)
    .get_template(template)
    .render(
      charts=embedded,
      library=markupsafe.Markup(library(list(charts.values()))),
      script=markupsafe.Markup(script),
      **shown,
    )
  )


def _environment(folder: pathlib.Path) -> jinja2.Environment:
  import jinja2

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader([folder, _TEMPLATES]),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["visible"] = lambda text: printable(str(text))
  return environment


def picture(title: str, charts: Sequence[Chart]) -> bytes:
  """Returns a page of charts under each other, as the content of a file."""
  named = {str(number): chart for number, chart in enumerate(charts)}
  return encoded(rendered("picture.html", named, title=title))


def encoded(text: str) -> bytes:
  """Returns a page as bytes; of text that is none, such as half a surrogate pair, a ? stays."""
  return text.encode("utf-8", errors="replace")


def check_picture_file(option: str, file: str, example: str) -> None:
  """Refuses a file whose name does not say that it is a page, or that cannot be written.

  Args:
    option: how the file was asked for, for the message.
    example: a name without a suffix.

  Raises:
    UserError: with a name that works.
  """
  if pathlib.Path(file).suffix != SUFFIX:
    raise UserError(
      f"{option} {file}: a picture is a page to be opened in a browser, which zooms into it and "
      f"saves it as PNG; name a file that ends in {SUFFIX}; for example {option} {example}{SUFFIX}"
    )
  check_output(option, file, picture("", []))
