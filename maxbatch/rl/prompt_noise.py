"""The noise scale of the policy gradient as a run goes on: what steps measured, as figures and a line.

Each microbatch is fed as two halves, which have half of the completions of each of its prompts, and the
gradients of both are squared, and that of the whole (noise/prompts.py): as many operations as without.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxbatch.config.schema import NoiseConfig
from maxbatch.core.confidence import Interval
from maxbatch.core.noise_scale import TOTAL, Estimate, Moments
from maxbatch.models.registry import Model
from maxbatch.noise.advice import NoiseTracker
from maxbatch.noise.prompt_advice import prompt_advice
from maxbatch.noise.prompts import PromptMoments, prompt_moments
from maxbatch.rl.completions import Completions
from maxbatch.run_folder.metrics import Record
from maxbatch.training.step import StepMetrics, rows_shardings

SAMPLING = "sampling"


def in_halves(num_generations: int, mesh: Mesh) -> Callable[[Completions], Completions]:
  """Returns a program from a microbatch (1, B, …) on the devices to (2, B / 2, …): half of each
  group in either."""

  def split(x_1B: jax.Array) -> jax.Array:
    groups = x_1B.reshape(-1, 2, num_generations // 2, *x_1B.shape[2:])
    return jnp.moveaxis(groups, 1, 0).reshape(2, -1, *x_1B.shape[2:])

  @jax.jit
  def halved(completions: Completions) -> Completions:
    result = jax.tree.map(split, completions)
    return jax.lax.with_sharding_constraint(result, rows_shardings(result, mesh))

  return halved


class PromptNoiseMeter:
  """A `Meter` whose unit is the prompt, with its completions."""

  def __init__(self, config: NoiseConfig, model: Model, num_generations: int, num_iterations: int):
    """Makes a meter that has seen nothing.

    Args:
      config: its window.
      model: of all steps.
      num_generations: completions of a prompt.
      num_iterations: steps on each batch, of which the first is measured: afterwards the policy has
        been trained on what it is measured with.
    """
    self._model, self._generations, self._iterations = model, num_generations, num_iterations
    self._tracker = NoiseTracker(config.gns_window_steps)

  def is_calibration(self, step: int) -> bool:
    """Returns False: no step is for calibration. See `Meter`."""
    del step
    return False

  def model_at(self, step: int) -> Model:
    """Returns the model; see `Meter`."""
    del step
    return self._model

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what a step adds to its record; see `Meter`."""
    result = None if step % self._iterations else self._moments(metrics)
    if result is None:
      return self._figures()
    whole = result.whole
    self._tracker.add({TOTAL: whole, SAMPLING: Moments(whole.signal, result.within)})
    raw = {
      "total/signal": whole.signal,
      "total/noise": whole.noise,
      "sampling/noise": result.within,
    }
    return {f"gns/{name}": value for name, value in raw.items()} | self._figures()

  def total(self) -> Estimate:
    """Returns the noise scale in prompts; see `Meter`."""
    return self._tracker.estimate(TOTAL)

  def sampling(self) -> Interval | None:
    """Returns the share of the noise that is by sampling; None: not known."""
    return self._tracker.share(SAMPLING, TOTAL)

  def line(self, batch: int) -> str:
    """Says what is known for steps of `batch` completions; see `Meter`."""
    prompts = batch // self._generations
    return prompt_advice(self.total(), self.sampling(), prompts, self._generations)

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON; see `Meter`."""
    return {"tracker": self._tracker.as_dict()}

  def restore(self, content: Mapping[str, Any]) -> None:
    """Restores what `as_dict` gave; see `Meter`."""
    tracker = NoiseTracker.from_dict(content["tracker"])
    if tracker.window_steps == self._tracker.window_steps:
      self._tracker = tracker

  def _moments(self, metrics: StepMetrics) -> PromptMoments | None:
    """Returns the moments; None where the step has no tokens, or its parts cannot be compared."""
    noise, weight_squared = metrics.noise, float(metrics.weight) ** 2
    if noise is None or noise.squares is None or weight_squared == 0:
      return None
    return prompt_moments(
      prompts=round(float(noise.rows)) // self._generations,
      generations=self._generations,
      # A dispatch is fed one microbatch in two halves, so a replica's part of it is whole groups.
      share=float(noise.squares.replica_divisors) / weight_squared,
      halves=float(noise.squares.of_microbatches) / weight_squared,
      small=float(noise.squares.of_replicas) / weight_squared,
      big=float(metrics.grad_norm) ** 2,
    )

  def _figures(self) -> Record:
    """Returns the scale, in prompts and in completions, and the share of sampling, as far as they
    are known."""
    record: Record = {}
    total, sampling = self.total(), self.sampling()
    if total.scale is not None:
      record["gns/total"] = total.scale.value
      record["gns/total_completions"] = total.scale.value * self._generations
      record["gns/total_low"], record["gns/total_high"] = total.scale.low, total.scale.high
    if total.negative_share is not None:
      record["gns/negative_share"] = total.negative_share
    if sampling is not None:
      record["gns/sampling"] = sampling.value
      record["gns/sampling_low"], record["gns/sampling_high"] = sampling.low, sampling.high
    return record
