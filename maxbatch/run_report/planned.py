"""What a run's keys mean: its plan, and the timetable of its pipeline."""

import dataclasses

from maxbatch.batch.plan import BatchPlan, plan_batches
from maxbatch.batch.rl_plan import plan_rl
from maxbatch.batch.rl_sizes import is_rl
from maxbatch.batch.topology import topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.plot import timetable_chart
from maxbatch.pipeline_parallel.schedule import timetable
from maxbatch.plots.chart import Chart
from maxbatch.run_folder.history import RunHistory
from maxbatch.run_folder.paths import RunFolder

_MOST_CELLS = 1500
"""Of a timetable that is drawn in a page."""


@dataclasses.dataclass(frozen=True)
class Planned:
  """What follows from the keys of the latest start."""

  derivation: str = ""
  pipeline: str = ""
  timetable: Chart | None = None
  missing: str = ""
  """Why it is not known; empty: it is."""


def planned(run: RunHistory) -> Planned:
  """Plans the run again, on the devices that it had."""
  num_devices = run.derived.get("num_devices")
  if not run.config or not isinstance(num_devices, int):
    return Planned(missing="the batch cannot be derived: config.yml does not say it")
  try:
    config = load_config([f"config={RunFolder(run.folder).config}"])
    layout = topology(config.mesh, num_devices, config.compile.compile_topology_num_slices)
    plan = (
      plan_rl(config, layout).pairs
      if is_rl(config.rl)
      else plan_batches(config.batch, config.run, layout)
    )
    return _with_pipeline(config, plan)
  except UserError as error:
    return Planned(missing=f"the batch cannot be derived from config.yml by this version: {error}")


def _with_pipeline(config: Config, plan: BatchPlan) -> Planned:
  if config.pipeline.pipeline_schedule == "none":
    return Planned(str(plan))
  pipeline = pipeline_of(config, plan.topology, plan)
  shape = pipeline.shape
  if shape.forwards_per_stage * shape.stages > _MOST_CELLS:
    return Planned(
      str(plan), f"{pipeline}\nToo long to be drawn here: python -m maxbatch.pipeline --plot"
    )
  table = timetable(pipeline.schedule, shape)
  return Planned(str(plan), str(pipeline), timetable_chart(table, pipeline.schedule))
