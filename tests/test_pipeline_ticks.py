"""How often a pipeline's program does what: by formula, by the timetable, and by the TPU compiler."""

import json
import pathlib
from collections.abc import Sequence

import pytest

from maxbatch.compile.report_time import beside_layers, in_filling, in_microbatches
from maxbatch.compile.traced_flops import StepFlops
from maxbatch.estimate.costs import OperationCost
from maxbatch.estimate.flops import Products
from maxbatch.pipeline_parallel.schedule import SCHEDULES, TimetableShape, schedule_named, timetable
from maxbatch.pipeline_parallel.sizes import (
  EVERY_TICK,
  OPERATIONS,
  Pipeline,
  operation_in_path,
  scope_name,
  ticks_by_operation,
)
from maxbatch.pipeline_parallel.timetable_arrays import step_arrays, timetable_arrays
from maxbatch.train import main

SHAPES = {
  "gpipe": [TimetableShape(2, 2), TimetableShape(4, 8), TimetableShape(3, 6, 1, 2)],
  "circular": [TimetableShape(2, 2, 3), TimetableShape(4, 12, 2), TimetableShape(2, 6, 2, 2)],
  "1f1b": [TimetableShape(2, 2), TimetableShape(4, 16), TimetableShape(3, 6, 1, 2)],
  "interleaved_1f1b": [
    TimetableShape(2, 2, 3),
    TimetableShape(4, 16, 2),
    TimetableShape(2, 8, 2, 2),
  ],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_formulas_count_what_the_program_is_told(name):
  for shape in SHAPES[name]:
    table = timetable(name, shape)
    printed = timetable_arrays(
      table, schedule_named(name).limits(shape), len(table.ticks)
    ).all_stages
    expected = {work: int(printed._asdict()[work].sum()) for work in OPERATIONS}
    assert ticks_by_operation(name, shape) == expected | {EVERY_TICK: len(table.ticks)}, shape


def test_the_innermost_work_is_found():
  assert operation_in_path("jit(step)/while/body/cond") == EVERY_TICK
  for work in OPERATIONS:
    assert operation_in_path(f"jit(step)/while/body/{scope_name(work)}/cond") == work
  assert (
    operation_in_path(f"{scope_name('forward')}/cond/{scope_name('embedding')}/cond") == "embedding"
  )
  assert operation_in_path("tick_loss_of_something_else/tick_tock") == EVERY_TICK


# --- what is counted so ---------------------------------------------------------------------------


def pipeline(schedule: str, repeats: int = 1) -> Pipeline:
  """4 microbatches a pass on 4 stages."""
  return Pipeline(schedule, 4, repeats, 1, 4, 3, 3, 1, 2, (4, 8), 1)


def cost(work: str, *, in_loop: bool = True) -> OperationCost:
  path = f"while/body/{scope_name(work)}/cond" if work else ""
  products = Products()
  return OperationCost(
    "x", "dot", "", "other", "body", in_loop, 5, products, 0, None, condition=path
  )


COSTS = [cost(EVERY_TICK, in_loop=False), *map(cost, (EVERY_TICK, *OPERATIONS))]


def counts(costs: Sequence[OperationCost]) -> list[float]:
  return [one.count / 5 for one in costs]


def test_a_pass_and_the_filling_of_an_interleaved_pipeline():
  one, flops = pipeline("interleaved_1f1b", repeats=2), StepFlops(100.0, 7.0, {"loss": 60.0})
  costs, expected = in_microbatches(one, COSTS, flops)
  # 2 rounds of 4 microbatches: 8 forwards and backwards, but 4 losses.
  assert counts(costs) == [1, 8, 8, 4, 4, 8, 4]
  assert expected == StepFlops(8 * 40.0 + 4 * 60.0, 7.0)
  # 3 ticks to fill and 3 to empty, and a round of 4 stages before the first loss.
  assert counts(in_filling(one, COSTS)) == [10, 3, 0, 0, 3, 0]
  assert counts(beside_layers(one, COSTS)) == [4, 4, 4]


def test_ticks_of_gpipe_are_forward_or_backward():
  costs, _ = in_microbatches(pipeline("gpipe"), COSTS, StepFlops(0.0, 0.0))
  assert counts(costs) == [1, 8, 4, 4, 4, 4, 4]
  assert counts(in_filling(pipeline("gpipe"), COSTS)) == [6, 3, 0, 0, 3, 0]


def test_without_a_pipeline_a_trip_is_a_pass():
  assert in_microbatches(None, COSTS, StepFlops(3.0, 1.0)) == (COSTS, StepFlops(3.0, 1.0))
  assert (in_filling(None, COSTS), beside_layers(None, COSTS)) == ((), ())


def test_a_step_of_no_passes_is_an_empty_timetable():
  one = pipeline("1f1b")
  empty, full = step_arrays(one, 0), step_arrays(one, 3)
  assert int(empty.num_ticks) == 0
  assert empty.all_stages.forward.shape == full.all_stages.forward.shape


# --- by the TPU compiler --------------------------------------------------------------------------

T, D, V, M = 128, 128, 8192, 128


def test_a_loss_follows_one_repeat_of_two(tmp_path: pathlib.Path):
  """The program's products in a pass are those by hand: with a loss per tick, twice the head's."""
  pytest.importorskip("libtpu")
  keys = {
    **{"compile_only": "true", "dataset_type": "synthetic", "dtype": "bfloat16"},
    **{"base_emb_dim": D, "base_mlp_dim": M, "vocab_size": V, "max_target_length": T},
    **{"base_num_query_heads": 1, "base_num_kv_heads": 1, "head_dim": D},
    **{"base_num_decoder_layers": 4, "num_pipeline_repeats": 2, "attention": "dot_product"},
    **{"compile_topology": "v5e-4", "ici_pipeline_parallelism": 2, "ici_data_parallelism": 2},
    **{"pipeline_schedule": "interleaved_1f1b", "per_device_batch_size": 8, "batch_size": 32},
    **{"num_pipeline_microbatches": 4, "base_output_directory": tmp_path, "run_name": "run"},
  }
  assert main(["config=base", *(f"{key}={value}" for key, value in keys.items())]) == 0
  (report,) = json.loads((tmp_path / "run" / "compile_report.json").read_text())
  tokens = 16 * T  # Of a group of devices in a pass.
  layer = 2 * (4 * D * D + 3 * D * M) + 4 * D * T
  head = 3 * 2 * D * V / 2
  # A stage has 2 layers, forward, and again with the way back; the last product is not done again.
  by_hand = tokens * (2 * 4 * layer + head)
  assert head > 3 * layer
  assert report["flops_per_device"]["program_microbatch"] == pytest.approx(by_hand, rel=0.06)
  assert 0.94 < report["estimate"]["coverage"] < 1.06
