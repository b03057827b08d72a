"""What tests set of jax's options they set back, so that they pass in any order."""

import jax
import noise_runs


def test_runs_that_measure_the_noise_leave_the_options_alone(tmp_path):
  before = dict(jax.config.values)
  with noise_runs.training(tmp_path):
    pass
  assert jax.config.values == before
