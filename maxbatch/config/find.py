"""Where configuration files are: by path, or by bare name among those that travel with maxbatch."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from maxbatch.config.yaml_file import shown
from maxbatch.errors import UserError

_LONGEST_PATH = 1000
_PACKAGE = Path(__file__).resolve().parent.parent


def packaged_folder() -> Path:
  """Returns the folder of base.yml: inside an installed package, beside it in a source checkout."""
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def packaged_names() -> list[str]:
  """Returns the bare names that `config=` and `base_config:` understand."""
  return _names(packaged_folder())


def model_names() -> list[str]:
  """Returns the names that `model_name` understands."""
  return _names(packaged_folder() / "models")


def config_path(name: str) -> Path:
  """Returns the file that a path or a packaged bare name (`base`) means, or raises UserError."""
  return _existing(
    f"config={shown(name, _LONGEST_PATH)}", _packaged(name) or Path(name).expanduser()
  )


def base_config_path(name: str, child: Path, given: str) -> Path:
  """Returns the file that `base_config: name` means when written in the file `child`.

  A bare name is a packaged file; a path is relative to the folder of `child`. `base.yml` is the
  packaged file too where no other file of that name lies beside `child`. `given` starts the message
  when there is no such file.
  """
  beside = child.parent / Path(name).expanduser()
  is_other = os.path.isfile(beside) and beside.resolve() != child.resolve()
  packaged = _packaged(name) or (None if is_other else _packaged(name.removesuffix(".yml")))
  return _existing(given, packaged or beside)


def model_path(name: str, folder: Path, given: str) -> Path:
  """Returns what `model_name` means: a known name's file, another, or a Hugging Face folder.

  A path is relative to `folder` (that of the file that names it), else to the working directory.
  `given` starts the message when there is no such thing.
  """
  if name in model_names():
    return packaged_folder() / "models" / f"{name}.yml"
  given_path = Path(name).expanduser()
  paths = (folder / given_path, given_path)
  for path in paths:
    is_yaml = name.endswith((".yml", ".yaml")) and os.path.isfile(path)
    if is_yaml or os.path.isfile(path / "config.json"):
      return path
  if any(map(os.path.isdir, paths)):
    raise UserError(
      f"{given}: there is no such model: that folder has no config.json. Give a Hugging Face "
      "model's folder, which holds one beside the weights."
    )
  raise UserError(
    f"{given}: there is no such model.{did_you_mean(name, model_names())} "
    f"Known: {', '.join(model_names())}; or give the path of a .yml file, or of a folder with "
    "Hugging Face's config.json."
  )


def closest(name: str, known: Iterable[str]) -> str | None:
  """Returns the known name closest to `name`, or None if none is close."""
  lowered = {candidate.lower(): candidate for candidate in known}
  close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
  return lowered[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns ` Did you mean X?` for the known name closest to `name`, or nothing."""
  result = closest(name, known)
  return "" if result is None else f" Did you mean {result}?"


def _names(folder: Path) -> list[str]:
  return sorted(path.stem for path in folder.glob("*.yml"))


def _packaged(name: str) -> Path | None:
  return packaged_folder() / f"{name}.yml" if name in packaged_names() else None


def _existing(given: str, path: Path) -> Path:
  # Not Path.is_file, to which a name that is too long is an error.
  if os.path.isfile(path):
    return path
  what = "that is a folder, not a file" if os.path.isdir(path) else "there is no such file"
  raise UserError(
    f"{given}: {what}.{_file_hint(path)} "
    f"Give the path of a .yml file, or one that comes with maxbatch: {', '.join(packaged_names())}."
  )


def _file_hint(path: Path) -> str:
  if path.stem in model_names():
    return f" That is a model: write config=base model_name={path.stem}."
  if not os.path.isdir(path.parent):
    return did_you_mean(path.stem, packaged_names())
  beside = {other.stem: other for end in ("yml", "yaml") for other in path.parent.glob(f"*.{end}")}
  result = closest(path.stem, beside)
  return f" Did you mean {beside[result]}?" if result else did_you_mean(path.stem, packaged_names())
