"""Libraries that only some data need: imported when a run uses them, so that others start fast."""

import pkgutil
from typing import Any

from maxbatch.errors import UserError


def library(name: str, what: str, extra: str = "data") -> Any:
  """Imports the module `name` of an optional package.

  Args:
    name: as in an import statement.
    what: what needs it, for the message: a key and its value, or a file.
    extra: the extra of maxbatch that installs it.

  Raises UserError: it is not installed, or cannot be imported.
  """
  try:
    return pkgutil.resolve_name(f"{name}:")
  except ImportError as error:
    package = name.partition(".")[0]
    raise UserError(
      f"{what} needs the package {package}, which cannot be imported ({error}); install it with "
      f"pip install 'maxbatch[{extra}]'"
    ) from error
