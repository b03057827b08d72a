"""Whole runs that measure the noise scale: what they report, and that they train as others do."""

import functools
import math
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
from initial_states import initial_state
from noise_runs import CALIBRATE_EVERY, CALIBRATED, Done, Run, T, training

from maxbatch.config.load import load_config
from maxbatch.core.confidence import Interval, ratios_of_means
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Parameters, build_model, by_path
from maxbatch.run_folder.metrics import Record
from maxbatch.training.loss import loss_sum
from maxbatch.training.step import Trainer

MEASURED = ("gns/norm", "gns/total", "gns/attention", "gns/mlp", "gns/embedding", "gns/head")
REPORT_EVERY = 5
PLAIN: dict[str, object] = {"eval_fraction": 0}
"""Evaluations are no part of what these tests are about."""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
  with training(tmp_path_factory.mktemp("runs")) as train:
    yield train


MODES = {
  "off": {"gns": "off"},
  "all": {"gns": "all"},
  "norm": CALIBRATED,
  "streamed": CALIBRATED | {"accumulation": "streamed"},
  "passes": {"gns": "off", "gns_from_microbatches": "true"},
}


@pytest.fixture(scope="module")
def measured(train: Run) -> Callable[[str], Done]:
  """A run of 24 steps, each of eight microbatches, in one of the MODES."""

  @functools.cache
  def of(mode: str) -> Done:
    keys = {"batch_size": 16, "total_samples": 24 * 16, "gns_report_every": REPORT_EVERY}
    return train(mode, **PLAIN, **keys, **MODES[mode], enable_checkpointing="false")

  return of


@pytest.mark.parametrize("mode", ["all", "norm", "streamed", "passes"])
def test_measuring_changes_nothing_about_training(measured, mode):
  off, on = measured("off"), measured(mode)
  np.testing.assert_allclose(on.values("loss"), off.values("loss"), rtol=1e-5)
  np.testing.assert_allclose(on.values("grad_norm"), off.values("grad_norm"), rtol=1e-4)
  assert on.values("learning_rate") == off.values("learning_rate")
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), on.params, off.params
  )


def raw(record: Record) -> set[str]:
  """The groups whose moments of that step alone the record has."""
  results = {key.removeprefix("gns/").removesuffix("/signal") for key in record if "/signal" in key}
  assert all(f"gns/{name}/noise" in record for name in results)
  return results


@pytest.mark.parametrize("mode", ["all", "norm", "streamed"])
def test_records_have_what_the_steps_measured(measured, mode):
  every = {key.removeprefix("gns/") for key in MEASURED}
  for record in measured(mode).records[1:]:
    whole = mode == "all" or record["step"] % CALIBRATE_EVERY == 0
    assert raw(record) == (every if whole else {"norm"})
    # Booleans, text and what JSON does not know are no figures.
    assert all(type(value) in (int, float) for value in record.values())
    assert all(math.isfinite(value) for value in record.values())


def test_records_have_the_scales_once_they_are_known(measured):
  assert not any("gns/total" in record for record in measured("all").records[:8])
  last = measured("all").records[-1]
  assert {*MEASURED, "gns/layer/0", "gns/layer/1"} <= last.keys()
  assert last["gns/total_low"] < last["gns/total"] < last["gns/total_high"]
  assert last["gns/total_tokens"] == T * last["gns/total"]
  assert "gns/slope" not in last
  assert not any(key.startswith("gns") for record in measured("off").records for key in record)


@pytest.mark.parametrize("mode", ["norm", "streamed"])
def test_the_scale_of_the_whole_is_predicted_from_the_norms(measured, mode):
  *earlier, last = measured(mode).records
  # It takes 8 calibration steps.
  assert not any("gns/total" in record for record in earlier[: 8 * CALIBRATE_EVERY])
  assert last["gns/total"] == pytest.approx(last["gns/norm"] * last["gns/slope"])
  assert last["gns/total_low"] < last["gns/total"] < last["gns/total_high"]
  assert {"gns/norm_of_layer/0", "gns/norm_of_layer/1"} <= last.keys()


def test_streamed_steps_measure_what_fused_ones_do(measured):
  for fused, streamed in zip(measured("norm").records, measured("streamed").records, strict=True):
    assert fused.keys() == streamed.keys()
    for key in fused:
      if key.endswith(("/signal", "/noise")):
        scale = fused[key.rsplit("/", 1)[0] + "/noise"]
        assert streamed[key] == pytest.approx(fused[key], rel=1e-3, abs=1e-4 * scale)


def test_passes_of_one_sample_a_replica_measure_what_samples_do(measured):
  for passes, every in zip(measured("passes").records, measured("all").records, strict=True):
    for kind in ("signal", "noise") if passes["step"] else ():
      result, expected = (
        record[f"gns/{group}/{kind}"]
        for record, group in ((passes, "from_microbatches"), (every, "total"))
      )
      assert result == pytest.approx(expected, rel=1e-3, abs=1e-4 * every["gns/total/noise"])
  last = measured("passes").records[-1]
  assert last["gns/total"] == last["gns/from_microbatches"]
  assert last["gns/total"] == pytest.approx(measured("all").records[-1]["gns/total"], rel=1e-2)


def test_a_line_says_what_the_batch_is_worth(measured):
  lines = measured("all").said.splitlines()
  said = [line for line in lines if line.startswith("noise scale")]
  assert len(said) == 24 // REPORT_EVERY
  assert said[0] == "noise scale not known yet: 5 of at least 8 steps measured"
  assert said[-1].startswith("noise scale ≈ ")
  assert "; batch 16 is " in said[-1]
  assert lines[-1].startswith("  batch:   noise scale ≈ ")
  assert "noise scale" not in measured("off").said


def test_the_default_run_calibrates_often_enough_for_a_number(train):
  # The programs are those of `measured`.
  keys = PLAIN | {"batch_size": 16, "gns": "norm", "gns_window_steps": 64}
  keys |= {"enable_checkpointing": "false"}
  done = train("default", steps=120, total_samples=-1, warmup_steps=-1, learning_rate=3e-3, **keys)
  assert done.said.splitlines()[-1].startswith("  batch:   noise scale ≈ ")
  assert "gns/total" in done.records[-1]


# --- against brute force -------------------------------------------------------------------------


def scale_of(records: list[Record], group: str) -> Interval | None:
  """The noise scale of a group, from the moments of these steps alone."""
  rows = [[[record[f"gns/{group}/{kind}"] for record in records]] for kind in ("noise", "signal")]
  return ratios_of_means(*map(np.array, rows)).interval(0)


def brute_force(params: Parameters, folder: pathlib.Path, samples: int) -> dict[str, float]:
  """Trace of the covariance of samples' gradients over their mean's square, by group."""
  config = load_config([f"config={folder / 'config.yml'}", "gns=off"])
  source, model = build_dataset(config.data, T).train, build_model(config.model, T)
  key = jax.random.key(0)

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0))
  def of_each(params: Parameters, row: Rows) -> Parameters:
    one = jax.tree.map(lambda x: x[None], row)
    return jax.grad(lambda p: loss_sum(model, p, one, key))(params)

  chosen = np.random.default_rng(0).choice(len(source), samples, replace=False).astype(np.int64)
  groups: dict[str, list[np.ndarray]] = {"total": [], "norm": []}
  for part in np.split(chosen, samples // 200):
    rows = Rows(**source.rows(part), sample_ids=np.zeros(len(part), np.int32))  # pyright: ignore
    results: dict[tuple[str, ...], np.ndarray] = {}
    by_path(lambda path, x, to=results: to.update({path: np.asarray(x)}), of_each(params, rows))
    for name, parts in groups.items():
      taken = [x for path, x in results.items() if name == "total" or "norm" in "/".join(path)]
      parts.append(np.concatenate([x.reshape(len(part), -1) for x in taken], axis=1))
  return {name: _scale(np.concatenate(parts)) for name, parts in groups.items()}


def _scale(gradients_BG: np.ndarray) -> float:
  """Without bias: the mean's square has a share of the variance in it."""
  variance = gradients_BG.var(0, ddof=1, dtype=np.float64).sum()
  mean = gradients_BG.mean(0, dtype=np.float64)
  return float(variance / ((mean**2).sum() - variance / len(gradients_BG)))


def test_a_frozen_model_has_the_scale_that_its_samples_gradients_have(train, measured, monkeypatch):
  trained = jax.device_get(measured("off").params)
  monkeypatch.setattr(Trainer, "init", lambda trainer, seed: initial_state(trainer, trained))
  keys = PLAIN | {"batch_size": 16, "gns_window_steps": 64, "enable_checkpointing": "false"}
  done = train("frozen", total_samples=64 * 16, learning_rate=0, **keys)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(done.params), trained)
  truth = brute_force(done.params, done.folder, 1000)
  last = done.records[-1]
  assert last["gns/total_low"] < truth["total"] < last["gns/total_high"]
  assert last["gns/total_high"] < 2 * last["gns/total_low"]
  for group in ("total", "norm"):
    scale = scale_of(done.records[-64:], group)
    assert scale is not None
    assert scale.value == pytest.approx(last[f"gns/{group}"])
    assert scale.low < truth[group] < scale.high
    assert scale.high < 2 * scale.low
