"""The noise of the policy gradient, split into prompts and sampling, against policies that are known.

P prompts, G completions of each, A answers that a policy chooses from, D parameters, S steps.
"""

import dataclasses
import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from initial_states import initial_state, random_parameters
from support import relative_errors
from test_grpo import B, G
from test_policy_loss import LOSS, config_of, cut_completions, step
from tiny_model import tiny_model

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.rl_sizes import RLTopology, halving_micro_batch_sizes
from maxbatch.config.load import load_config
from maxbatch.core.accumulate import Squares
from maxbatch.core.confidence import Interval
from maxbatch.core.noise_scale import Estimate, Moments
from maxbatch.noise.advice import NoiseTracker
from maxbatch.noise.prompt_advice import prompt_advice
from maxbatch.noise.prompts import prompt_moments, within_at
from maxbatch.rl.advantages import group_advantages
from maxbatch.rl.completions import Completions
from maxbatch.rl.grpo import grpo_sums
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.prompt_noise import PromptNoiseMeter, in_halves
from maxbatch.training.build import build_trainer
from maxbatch.training.step import NoiseSums, StepMetrics, rows_shardings, step_function


@dataclasses.dataclass(frozen=True)
class Bandits:
  """A policy with one answer to each of some prompts: all that can happen can be enumerated."""

  chances_QA: np.ndarray
  rewards_QA: np.ndarray
  scores_QAD: np.ndarray
  """Gradients of the answers' log-probabilities; their mean by the policy is 0."""

  @classmethod
  def drawn(cls, seed: int, prompts: int = 5, answers: int = 3, size: int = 6) -> "Bandits":
    random = np.random.default_rng(seed)
    logits_QA = random.normal(size=(prompts, answers))
    chances_QA = np.exp(logits_QA) / np.exp(logits_QA).sum(1, keepdims=True)
    features_QAD = random.normal(size=(prompts, answers, size)) + random.normal(size=size)
    mean_QD = np.einsum("qa,qad->qd", chances_QA, features_QAD)
    rewards_QA = (np.arange(answers) == 0) + 0.3 * random.random((prompts, answers))
    return cls(chances_QA, rewards_QA, features_QAD - mean_QD[:, None])

  def contributions(self, q: np.ndarray, chosen: np.ndarray, *, scale: bool) -> np.ndarray:
    """c of groups (…, G) of answers to prompts (…): (…, G, D)."""
    rewards = self.rewards_QA[q[..., None], chosen]
    flat = group_advantages(rewards.reshape(-1), chosen.shape[-1], scale=scale)
    return flat.reshape(chosen.shape)[..., None] * self.scores_QAD[q[..., None], chosen]

  def truth(self, generations: int, *, scale: bool = False) -> tuple[float, float, float]:
    """Signal, noise and its part by sampling, of all that can be drawn."""
    prompts, answers = self.chances_QA.shape
    groups = np.array(list(itertools.product(range(answers), repeat=generations)))
    means, squares = [], []
    for q in range(prompts):
      chances = self.chances_QA[q][groups].prod(1)
      asked = np.full(len(groups), q)
      h = self.contributions(asked, groups, scale=scale).mean(1)
      means.append(chances @ h)
      squares.append(chances @ (h**2).sum(1))
    signal = (np.mean(means, 0) ** 2).sum()
    within = np.mean(squares) - np.mean([(mean**2).sum() for mean in means])
    return float(signal), float(np.mean(squares) - signal), float(within)

  def squares(
    self, generations: int, P: int, M: int, *, scale: bool = False, steps: int = 60_000
  ) -> np.ndarray:
    """Of the halves, the microbatches and the gradient of steps of P prompts in M: (3, steps)."""
    random = np.random.default_rng(0)
    q_SP = random.integers(0, len(self.chances_QA), (steps, P))
    u_SPG1 = random.random((steps, P, generations, 1))
    chosen_SPG = (u_SPG1 > self.chances_QA.cumsum(1)[q_SP][:, :, None]).sum(-1)
    c_SPGD = self.contributions(q_SP, chosen_SPG, scale=scale) / (P * generations)
    halves = c_SPGD.reshape(steps, M, P // M, 2, generations // 2, -1).sum((2, 4))
    parts = halves.sum(2)
    return np.stack([(x**2).reshape(steps, -1).sum(1) for x in (halves, parts, parts.sum(1))])

  def estimated(self, generations: int, *, scale: bool = False) -> tuple[float, float, float]:
    """As `truth`, of many steps of 4 prompts in 2 microbatches: linear in their squares."""
    squares = self.squares(generations, 4, 2, scale=scale).mean(1).tolist()
    found = prompt_moments(4, generations, 1 / 2, *squares)
    assert found is not None
    return found.whole.signal, found.whole.noise, found.within


@pytest.mark.parametrize("generations", [2, 4, 8])
def test_signal_noise_and_its_part_by_sampling_have_no_bias(generations):
  policy = Bandits.drawn(1)
  signal, noise, within = policy.truth(generations)
  np.testing.assert_allclose(policy.estimated(generations), (signal, noise, within), rtol=0.03)
  # A part that was all of the noise, or nothing, would show little.
  assert 0.1 * noise < within < 0.9 * noise


def test_where_rewards_are_scaled_the_part_by_sampling_comes_out_too_large():
  """With rewards of 0 and 1, in a policy of few answers, whose mean gradients are large: an upper bound."""
  policy = Bandits.drawn(2, answers=3)
  policy = dataclasses.replace(policy, rewards_QA=np.round(policy.rewards_QA))
  signal, noise, within = policy.truth(8, scale=True)
  found = policy.estimated(8, scale=True)
  np.testing.assert_allclose(found[:2], (signal, noise), rtol=0.03)
  assert 1.2 < found[2] / within < 1.5


def test_the_intervals_hold_the_truth_as_often_as_they_say():
  """Of windows of 32 steps that show a signal, of noise scale and share of sampling."""
  policy, windows, steps, P, G = Bandits.drawn(1), 300, 32, 16, 4
  signal, noise, within = policy.truth(G)
  each = [
    prompt_moments(P, G, 1 / 4, *found)
    for found in policy.squares(G, P, 4, steps=windows * steps).T.tolist()
  ]
  held = []
  for at in range(0, len(each), steps):
    tracker = NoiseTracker(steps)
    for found in filter(None, each[at : at + steps]):
      tracker.add({"total": found.whole, "sampling": Moments(found.whole.signal, found.within)})
    scale, share = tracker.estimate("total").scale, tracker.share("sampling", "total")
    if scale is not None and share is not None:
      held.append(
        (scale.low < noise / signal < scale.high, share.low < within / noise < share.high)
      )
  assert len(held) > 0.5 * windows
  assert (np.mean(held, 0) > 0.9).all(), np.mean(held, 0)


def test_one_microbatch_has_nothing_to_compare():
  assert prompt_moments(4, 4, 1.0, 1.0, 1.0, 1.0) is None


@pytest.mark.parametrize("others", [4, 12])
def test_sampling_falls_with_the_degrees_of_freedom_of_a_group(others):
  """Relative to the mean gradient, which a baseline of G rewards shortens by 1/G."""
  policy = Bandits.drawn(1, answers=2)

  def relative(generations: int) -> float:
    return policy.truth(generations)[2] / (1 - 1 / generations) ** 2

  assert relative(others) == pytest.approx(within_at(relative(8), 8, others), rel=0.03)
  assert relative(others) != pytest.approx(relative(8) * 8 / others, rel=0.03)


# --- what a step squares --------------------------------------------------------------------------


def split(tree: Any, first: int, count: int) -> Any:
  return jax.tree.map(lambda x: np.asarray(x)[first : first + count], tree)


PIPELINE = "pipeline_schedule=1f1b", "ici_pipeline_parallelism=2", "base_num_decoder_layers=2"
PIPELINE += "num_pipeline_microbatches=2", f"num_generations={G}"


@pytest.mark.parametrize("keys", [(), PIPELINE])
def test_a_step_squares_its_microbatches_and_the_halves_of_their_groups(keys):
  """Against the gradients of each half by itself; of two replicas each has microbatches of its own."""
  micro, replicas, num_devices = (16, 2, 4) if keys else (8, 2, 2)
  config = config_of(micro, "gns_from_microbatches=true", *keys)
  layout = topology(config.mesh, num_devices)
  plan = plan_batches(config.batch, config.run, layout)
  loss = dataclasses.replace(LOSS, halves=True)
  trainer = build_trainer(config, plan, jax.devices()[:num_devices], loss=loss)
  state = initial_state(trainer, random_parameters(trainer.model))
  completions, metrics = cut_completions(), None
  params, allowed_V = jax.device_get(state.parameters), np.frombuffer(LOSS.allowed, bool)
  halved, function = in_halves(G, trainer.mesh), None
  for first in range(0, B, micro):
    whole = jax.tree.map(lambda x: x[None], split(completions, first, micro))
    fed = halved(jax.device_put(whole, rows_shardings(whole, trainer.mesh)))
    expected = loss.batch_shapes(jax.tree.map(lambda x: x[None], split(completions, 0, micro).rows))
    assert jax.tree.map(jnp.shape, fed) == jax.tree.map(jnp.shape, expected)
    function = function or step_function(trainer, fed)
    state, metrics = function(state, fed, None, np.float32(1))
  assert metrics is not None

  @jax.jit
  def gradient(completions: Completions) -> tuple[Any, jax.Array]:
    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
      options = completions.rows, allowed_V, LOSS.temperature, completions.kept_BTW
      found = token_log_probs(trainer.model, params, *options)
      sums = grpo_sums(found, completions, LOSS.objective)
      return sums.loss, sums.weight

    return jax.grad(loss_of, has_aux=True)(params)

  of_halves = of_parts = of_weights = 0.0
  for first in range(0, B, micro // replicas):
    groups = np.arange(first, first + micro // replicas).reshape(-1, 2, G // 2)
    chosen = [groups[:, half].ravel() for half in (0, 1)]
    found = [
      gradient(jax.tree.map(lambda x, at=at: np.asarray(x)[at], completions)) for at in chosen
    ]
    both = jax.tree.map(jnp.add, found[0][0], found[1][0])
    of_halves += sum(float(optax.tree.norm(each)) ** 2 for each, _ in found)
    of_parts += float(optax.tree.norm(both)) ** 2
    of_weights += float(found[0][1] + found[1][1]) ** 2
  noise = metrics.noise
  assert noise is not None
  assert noise.squares is not None
  assert float(noise.squares.of_microbatches) == pytest.approx(of_halves, rel=1e-5)
  assert float(noise.squares.of_replicas) == pytest.approx(of_parts, rel=1e-5)
  assert float(noise.squares.replica_divisors) == pytest.approx(of_weights, rel=1e-6)
  assert float(noise.rows) == B
  if keys:
    return
  _, same, plain = step(micro, 1)
  assert float(metrics.loss) == pytest.approx(float(plain.loss), rel=1e-6)
  assert (
    max(relative_errors(jax.device_get(state.params), jax.device_get(same.params)).values()) < 1e-6
  )


@pytest.mark.parametrize(
  ("devices", "generations", "sizes"),
  [
    # One replica: any but all completions at once.
    ({"ici_fsdp_parallelism": 1}, 4, [4, 8, 16]),
    ({"ici_fsdp_parallelism": 4}, 4, [8, 16]),
    # A group on each of two replicas.
    ({"ici_data_parallelism": 2}, 4, [8, 16, 32]),
    ({"ici_fsdp_parallelism": 1}, 1 + 2, []),
  ],
)
def test_microbatches_that_can_be_compared(devices, generations, sizes):
  num_devices = math.prod(devices.values())
  mesh = load_config(["config=base", *(f"{key}={n}" for key, n in devices.items())]).mesh
  layout = RLTopology(topology(mesh, num_devices), generations)
  assert halving_micro_batch_sizes(8 * generations, layout) == sizes


# --- the meter and its line -----------------------------------------------------------------------


def test_steps_on_what_was_trained_on_already_are_not_measured():
  noise = load_config(["config=base", "gns_window_steps=16"]).noise
  meter = PromptNoiseMeter(noise, tiny_model(), 4, num_iterations=2)
  one = np.float32(1)
  random, record = np.random.default_rng(0), {}
  for number in range(20):
    halves, parts, whole = np.array([20.0, 30, 40]) + random.random(3)
    squares = Squares(np.float32(halves), one, np.float32(parts), np.float32(2))  # pyright: ignore
    sums = NoiseSums(np.float32(16), one, {}, squares)  # pyright: ignore
    found = StepMetrics(one, np.float32(whole**0.5 / 2), np.float32(2), {}, sums)  # pyright: ignore
    record = meter.observe(number, found)
    assert ("gns/total/noise" in record) == (number % 2 == 0)
  assert meter.total().steps == 10
  assert record["gns/total_low"] < record["gns/total"] < record["gns/total_high"]
  assert record["gns/total_completions"] == 4 * record["gns/total"]
  assert record["gns/sampling_low"] < record["gns/sampling"] < record["gns/sampling_high"]
  again = PromptNoiseMeter(noise, tiny_model(), 4, num_iterations=2)
  again.restore(json.loads(json.dumps(meter.as_dict())))
  assert again.line(16) == meter.line(16)


HEURISTIC = " — a heuristic (McCandlish et al. 2018)"
MEASURED = Estimate("total", "ok", 64, 64, 0.0, signal=1.0, noise=83.0, scale=Interval(83, 69, 97))
FOUND = "noise scale ≈ 83 prompts of 8 completions (95% 69–97 over 64 steps), "


def said(prompts: int, *sampling: float, found: Estimate = MEASURED) -> str:
  return prompt_advice(found, Interval(*sampling), prompts, 8)


def test_prompts_are_what_to_raise_where_they_differ():
  assert said(8, 0.4, 0.3, 0.5) == (
    FOUND + "40% of the noise by sampling (95% 30–50%); batch_size=8 is well below it: "
    "batch_size=16 would take about 46% fewer steps for 9% more completions, num_generations=16 19% fewer "
    "for 61% more, batch_size=16 num_generations=4 21% fewer for 21% fewer; raise batch_size, to 16"
    + HEURISTIC
  )


def test_generations_are_where_sampling_is_nearly_all():
  assert said(64, 0.985, 0.96, 1.02) == (
    FOUND + "98.5% of the noise by sampling (95% 96.0–100.0%); batch_size=64 is in the efficient "
    "range: batch_size=128 would take about 28% fewer steps for 44% more completions, num_generations=16 "
    "30% fewer for 41% more, batch_size=32 num_generations=16 3% fewer for 3% fewer; raise "
    "num_generations, to 16" + HEURISTIC
  )


def test_neither_is_raised_above_the_noise_scale():
  assert said(400, 0.9, 0.8, 1.0) == (
    FOUND
    + "90% of the noise by sampling (95% 80–100%); batch_size=400 is above it: batch_size=200 "
    "would take about 17% more steps for 41% fewer completions, num_generations=4 21% more for 40% fewer"
    + HEURISTIC
  )


def test_which_to_raise_is_known_before_the_noise_scale():
  unknown = dataclasses.replace(MEASURED, status="insufficient", scale=None, negative_share=0.2)
  assert said(16, 0.93, 0.9, 0.96, found=unknown) == (
    "noise scale not known: over 64 steps the gradient cannot be distinguished from its noise (|G|² is "
    "estimated below 0 in 20% of them); average over a longer window, for example 128 steps; 93.0% of "
    "the noise by sampling (95% 90.0–96.0%): raise batch_size, to 32, or num_generations, to 16"
  )
  none = Estimate("total", "unavailable", 64, 0)
  assert prompt_advice(none, None, 16, 8) == (
    "noise scale unavailable: none of the last 64 steps measured it"
  )
