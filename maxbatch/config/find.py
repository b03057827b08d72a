"""Where configuration files are: by path, or by bare name among those that travel with maxbatch."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from maxbatch.errors import UserError

_PACKAGE = Path(__file__).resolve().parent.parent


def packaged_folder() -> Path:
  """The folder of base.yml: inside an installed package, beside it in a source checkout."""
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def packaged_names() -> list[str]:
  """The bare names that `config=` and `base_config:` understand."""
  return _names(packaged_folder())


def model_names() -> list[str]:
  """The names that `model_name` understands."""
  return _names(packaged_folder() / "models")


def config_path(name: str) -> Path:
  """The file that a path or a packaged bare name (`base`) means; UserError if there is none."""
  return _existing("config", name, Path(), _packaged(name))


def base_config_path(name: str, child: Path, where: str) -> Path:
  """The file that `base_config: name` means when written in the file `child`, at `where`.

  A bare name is a packaged file; a path is relative to the folder of `child`. `base.yml` is the
  packaged file too where no other file of that name lies beside `child`.
  """
  packaged = _packaged(name)
  if packaged is None and name in (f"{known}.yml" for known in packaged_names()):
    beside = child.parent / name
    if not beside.is_file() or beside.resolve() == child.resolve():
      packaged = packaged_folder() / name
  return _existing(f"{where}: base_config", name, child.parent, packaged)


def model_path(name: str, folder: Path) -> Path:
  """The file that `model_name` means: a known name, or the path of a .yml file.

  The path is relative to `folder` (that of the file that names it), else to the working directory.
  """
  if not name.endswith((".yml", ".yaml")):
    if name in model_names():
      return packaged_folder() / "models" / f"{name}.yml"
    hint = did_you_mean(name, model_names())
    raise UserError(
      f"model_name={name}: there is no model of that name.{hint} "
      f"Known: {', '.join(model_names())}; or give the path of a .yml file."
    )
  here = Path(name) if Path(name).is_file() and not (folder / name).is_file() else None
  return _existing("model_name", name, folder, here)


def closest(name: str, known: Iterable[str]) -> str | None:
  """The known name closest to `name`, or None if none is close."""
  lowered = {candidate.lower(): candidate for candidate in known}
  close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
  return lowered[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """` Did you mean X?` for the known name closest to `name`, or nothing."""
  found = closest(name, known)
  return "" if found is None else f" Did you mean {found}?"


def _names(folder: Path) -> list[str]:
  return sorted(path.stem for path in folder.glob("*.yml"))


def _packaged(name: str) -> Path | None:
  return packaged_folder() / f"{name}.yml" if name in packaged_names() else None


def _existing(key: str, name: str, folder: Path, known: Path | None) -> Path:
  path = known or folder / name
  if path.is_file():
    return path
  what = "a folder, not a file" if path.is_dir() else "no such file"
  beside = [str(other) for pattern in ("*.yml", "*.yaml") for other in path.parent.glob(pattern)]
  hint = did_you_mean(str(path), beside) or did_you_mean(Path(name).stem, packaged_names())
  raise UserError(
    f"{key}={name}: {what}.{hint} "
    f"Give the path of a .yml file, or one that comes with maxbatch: {', '.join(packaged_names())}."
  )
