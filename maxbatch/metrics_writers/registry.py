"""The key metrics_writers: where records go beside metrics.jsonl.

To add one: a class as `Writer` has it (run_folder/writer.py), and a line in WRITERS.
"""

from collections.abc import Mapping, Sequence

from maxbatch.config.declare import PlugIns
from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.metrics_writers.services import MlflowWriter, WandbWriter
from maxbatch.run_folder.writer import (
  Guarded,
  Opening,
  TensorBoardWriter,
  Writer,
  WriterFactory,
  let_go,
)

JSONL, TENSORBOARD = "jsonl", "tensorboard"
WRITERS: Mapping[str, WriterFactory] = {
  TENSORBOARD: TensorBoardWriter,
  "wandb": WandbWriter,
  "mlflow": MlflowWriter,
}


def chosen_writers(names: Sequence[str], plugins: PlugIns = ()) -> dict[str, WriterFactory]:
  """Returns the writers of these names, beside metrics.jsonl. Raises UserError: one is not known,
  or metrics.jsonl is left out."""
  known = {JSONL: TensorBoardWriter, **WRITERS}
  results = {name: registered("metrics_writers", name, known, plugins) for name in names}
  if results.pop(JSONL, None) is None:
    raise UserError(
      f"{_listed(names)}: {JSONL} must be among them, since a resume, the summary and the report read "
      f"metrics.jsonl; for example {_listed([JSONL, *names])}"
    )
  return results


def _listed(names: Sequence[str]) -> str:
  return f"metrics_writers=[{', '.join(names)}]"


def open_writers(names: Sequence[str], opening: Opening, plugins: PlugIns = ()) -> list[Writer]:
  """Opens the writers of these names; without those whose service cannot be reached, with a
  warning. Raises UserError as `chosen_writers`, or a package is not installed; OSError:
  TensorBoard's files cannot be made."""
  chosen = chosen_writers(names, plugins)
  opened = (_opened(name, factory, opening) for name, factory in chosen.items())
  return [writer for writer in opened if writer is not None]


def _opened(name: str, factory: WriterFactory, opening: Opening) -> Writer | None:
  try:
    writer = factory(opening)
  except UserError:
    raise
  except Exception as error:  # Networks and services fail in ways that no list of classes has.
    if name == TENSORBOARD:
      raise
    opening.report(let_go(name, error))
    return None
  return writer if name == TENSORBOARD else Guarded(name, writer, opening.report)
