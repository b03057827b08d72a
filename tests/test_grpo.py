"""GRPO's loss and advantages: against the formula, split any way, and each hazard seen elsewhere.

B completions, G generations, P places of prompts, N of completions, T tokens, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_metrics import metric_values
from support import mesh, relative_errors
from tiny_model import VOCABULARY, loud_parameters, tiny_model

from maxbatch.config.load import load_config
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import Model
from maxbatch.rl.advantages import group_advantages, live_groups
from maxbatch.rl.completions import Completions, Rollout, make_completions
from maxbatch.rl.evaluation import pass_at_k
from maxbatch.rl.grpo import GrpoSums, Objective, grpo_sums, objective
from maxbatch.rl.log_probs import LogProbs, token_log_probs
from maxbatch.sampling.choice import packed

B, G, P, N, T = 16, 4, 5, 7, 12
V = VOCABULARY
PAD, BOS = 0, 1
ALLOWED_V = ~np.isin(np.arange(V), [PAD, BOS])
PLAIN = Objective("dapo", 0.0, 0.2, 0.2, 0.0, N)
TYPES = ["dapo", "grpo", "dr_grpo"]


def rollout(count: int = B, seed: int = 0) -> Rollout:
  """Random completions of very different lengths, whose padding looks like tokens."""
  random = np.random.default_rng(seed)
  return Rollout(
    prompts_BP=random.integers(2, V, (count, P)).astype(np.int32),
    prompt_lengths_B=random.integers(1, P + 1, count).astype(np.int32),
    completions_BN=random.integers(2, V, (count, N)).astype(np.int32),
    lengths_B=np.resize([N, 1, 2, 5, 3, 1, N, 4], count).astype(np.int32),
    log_probs_BN=-random.random((count, N)).astype(np.float32) * 3,
  )


def advantages(count: int = B) -> np.ndarray:
  rewards = np.random.default_rng(3).random(count)
  return group_advantages(rewards, G, scale=True)


def bigram(weights_VV: Any, completions: Completions) -> LogProbs:
  """The smallest policy: a token follows from the one before it."""
  log_probs_BTV = jax.nn.log_softmax(weights_VV[completions.rows.inputs])
  chosen = jnp.take_along_axis(log_probs_BTV, jnp.asarray(completions.rows.targets)[..., None], -1)
  return LogProbs(chosen[..., 0], -(jnp.exp(log_probs_BTV) * log_probs_BTV).sum(-1))


def completions_of(count: int = B, **fields: bool) -> Completions:
  """Completions with what a reference and a proximal policy say of them."""
  completions, random = (
    make_completions(rollout(count), advantages(count), 0, T),
    np.random.default_rng(4),
  )
  for name in ("proximal_BT", "reference_BT"):
    if fields.get(name, True):
      noise = random.normal(size=completions.behaviour_BT.shape).astype(np.float32) * 0.3
      completions = completions._replace(**{name: completions.behaviour_BT + noise})
  return completions


WEIGHTS_VV = np.random.default_rng(5).normal(size=(V, V)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=2)
def _summed(weights_VV: Any, completions: Completions, goal: Objective) -> tuple[Any, GrpoSums]:
  def loss(weights_VV):
    sums = grpo_sums(bigram(weights_VV, completions), completions, goal)
    return sums.loss, sums

  return jax.grad(loss, has_aux=True)(weights_VV)


def summed(
  completions: Completions, goal: Objective, micro: int = B
) -> tuple[np.ndarray, GrpoSums]:
  """Gradient and sums of a step in microbatches, added up; the gradient is divided once."""
  gradients, sums = np.zeros((V, V)), None
  for first in range(0, completions.advantages_B.shape[0], micro):
    part = jax.tree.map(lambda x: x[first : first + micro], completions)  # noqa: B023
    gradient, result = _summed(WEIGHTS_VV, part, goal)
    gradients = gradients + np.asarray(gradient, np.float64)
    sums = result if sums is None else sums.add(result)
  assert sums is not None
  return gradients / float(sums.weight), sums


def by_the_formula(completions: Completions, goal: Objective) -> float:
  """The loss of a step, token by token in float64."""
  with np.errstate(over="ignore"):
    logits = WEIGHTS_VV.astype(np.float64)
    log_probs_VV = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses: list[list[float]] = []
    for completion, advantage in enumerate(np.asarray(completions.advantages_B, np.float64)):
      of_completion = []
      for place in np.flatnonzero(completions.rows.weights[completion]):
        now = log_probs_VV[
          completions.rows.inputs[completion, place], completions.rows.targets[completion, place]
        ]
        behaviour, old, weight = float(completions.behaviour_BT[completion, place]), 0.0, 1.0
        old = behaviour
        if goal.importance_sampling_cap:
          old = (
            now
            if completions.proximal_BT is None
            else float(completions.proximal_BT[completion, place])
          )
          weight = min(math.exp(old - behaviour), goal.importance_sampling_cap)
        ratio = math.exp(now - old)
        clipped = min(max(ratio, 1 - goal.epsilon), 1 + goal.epsilon_high)
        loss = -weight * min(ratio * advantage, clipped * advantage)
        if completions.reference_BT is not None:
          further = float(completions.reference_BT[completion, place]) - now
          loss += goal.beta * (math.exp(further) - further - 1)
        of_completion.append(loss)
      losses.append(of_completion)
  if goal.loss_type == "grpo":
    return float(np.mean([np.mean(each) for each in losses]))
  total = sum(map(sum, losses))
  tokens = sum(map(len, losses))
  return total / (tokens if goal.loss_type == "dapo" else len(losses) * goal.max_completion_length)


OBJECTIVES = [
  *(dataclasses.replace(PLAIN, loss_type=kind) for kind in TYPES),
  dataclasses.replace(PLAIN, epsilon_high=0.28, beta=0.1),
  dataclasses.replace(PLAIN, importance_sampling_cap=1.1, beta=0.1),
]


@pytest.mark.parametrize("goal", OBJECTIVES, ids=str)
def test_the_loss_is_the_formula_s(goal: Objective):
  _, sums = summed(completions_of(), goal)
  np.testing.assert_allclose(
    float(sums.loss) / float(sums.weight), by_the_formula(completions_of(), goal), rtol=2e-6
  )


@pytest.mark.parametrize("kind", TYPES)
def test_no_loss_is_normalized_per_microbatch(kind: Any):
  """Any micro_batch_size gives the same gradient; the mean of microbatches' means is another one."""
  goal = dataclasses.replace(PLAIN, loss_type=kind, beta=0.1, importance_sampling_cap=1.5)
  completions = completions_of()
  whole, sums = summed(completions, goal)
  for micro in (4, 8):
    split, parts = summed(completions, goal, micro)
    assert np.linalg.norm(split - whole) <= 1e-6 * np.linalg.norm(whole)
    np.testing.assert_allclose(np.asarray(parts), np.asarray(sums), rtol=1e-5)
  halves = [jax.tree.map(lambda x: x[first::2], completions) for first in (0, 1)]  # noqa: B023
  of_halves = np.mean([summed(half, goal, B // 2)[0] for half in halves], 0)
  if kind == "dapo":
    assert np.linalg.norm(of_halves - whole) > 1e-2 * np.linalg.norm(whole)


def test_a_policy_that_has_not_moved_has_the_plain_policy_gradient():
  """On the first step on a batch the ratio is 1, whatever the sampler's rounding was."""
  completions = completions_of(proximal_BT=False, reference_BT=False)
  goal = dataclasses.replace(PLAIN, importance_sampling_cap=1e9)
  gradient, sums = summed(completions, goal)

  def plain(weights_VV):
    now_BT = bigram(weights_VV, completions).targets_BT
    weight_BT = jnp.exp(jax.lax.stop_gradient(now_BT) - completions.behaviour_BT)
    loss_BT = -now_BT * weight_BT * completions.advantages_B[:, None] * completions.rows.weights
    return loss_BT.sum() / completions.rows.weights.sum()

  np.testing.assert_allclose(gradient, jax.grad(plain)(jnp.asarray(WEIGHTS_VV)), atol=1e-7)
  assert float(sums.clipped_low) == float(sums.clipped_high) == 0


def test_swapping_the_reference_changes_the_gradient():
  """Hazard: k1 as a KL loss, whose gradient knows nothing of the reference."""
  goal, completions = dataclasses.replace(PLAIN, beta=1.0), completions_of()
  other = completions._replace(reference_BT=np.asarray(completions.reference_BT) - 1.0)
  one, two = summed(completions, goal)[0], summed(other, goal)[0]
  assert np.linalg.norm(one - two) > 0.1 * np.linalg.norm(one)


def test_without_beta_the_reference_is_a_metric_alone():
  with_one, sums = summed(completions_of(), PLAIN)
  without, none = summed(completions_of(reference_BT=False), PLAIN)
  np.testing.assert_array_equal(with_one, without)
  assert float(sums.kl) > 0 == float(none.kl)


def test_which_tokens_count_follows_from_lengths_and_not_from_an_id():
  """Hazard: a mask inferred from the pad id, which may be sampled, or be the id of the end."""
  plain, zero = rollout(), rollout()
  zero.completions_BN[:, 1] = PAD
  zero.prompts_BP[:, -1] = PAD
  for sampled in (plain, zero):
    completions = make_completions(sampled, advantages(), 40, T)
    np.testing.assert_array_equal(completions.rows.weights.sum(1), sampled.lengths_B)
    np.testing.assert_array_equal(completions.rows.sample_ids, np.arange(40, 40 + B))
    for completion in range(B):
      prompt, own = sampled.prompt_lengths_B[completion], sampled.lengths_B[completion]
      ids = [
        *sampled.prompts_BP[completion, P - prompt :],
        *sampled.completions_BN[completion, :own],
      ]
      ids += [0] * (T + 1 - len(ids))
      np.testing.assert_array_equal(completions.rows.inputs[completion], ids[:-1])
      np.testing.assert_array_equal(completions.rows.targets[completion], ids[1:])
      counts = slice(prompt - 1, prompt - 1 + own)
      assert completions.rows.weights[completion, counts].all()
      np.testing.assert_array_equal(
        completions.behaviour_BT[completion, counts], sampled.log_probs_BN[completion, :own]
      )
      assert completions.behaviour_BT[completion].sum() == pytest.approx(
        sampled.log_probs_BN[completion, :own].sum()
      )


def test_what_is_padding_has_no_part_in_loss_or_gradient():
  completions = completions_of()
  hidden = ~(np.asarray(completions.rows.weights) > 0)
  wild = jax.tree.map(np.array, completions)
  for x in (wild.behaviour_BT, wild.proximal_BT, wild.reference_BT):
    x[hidden] = np.nan
  goal = dataclasses.replace(PLAIN, beta=0.1, importance_sampling_cap=1.5)
  for clean, dirty in zip(summed(completions, goal), summed(wild, goal), strict=True):
    np.testing.assert_array_equal(np.asarray(clean), np.asarray(dirty))


def test_tokens_of_a_lagging_policy_are_weighted_and_the_weight_is_bounded():
  """Hazard: stale completions trained on as if they were this policy's, with which training collapses."""
  completions = completions_of(reference_BT=False)
  corrected = dataclasses.replace(PLAIN, importance_sampling_cap=2.0)
  late = completions._replace(behaviour_BT=np.asarray(completions.proximal_BT) - 5.0)
  _, sums = summed(late, corrected)
  assert float(sums.importance) == pytest.approx(2.0 * float(sums.tokens))
  agreeing = completions._replace(behaviour_BT=completions.proximal_BT)
  one, two = summed(agreeing, corrected)[0], summed(late, corrected)[0]
  np.testing.assert_allclose(2 * one, two, atol=1e-7)


@pytest.mark.parametrize(
  ("move", "advantage", "low", "high"), [(0.25, 1, 0, 0), (0.3, 1, 0, 1), (-0.25, -1, 1, 0)]
)
def test_clipping_is_asymmetric_where_it_is_asked_for(move, advantage, low, high):
  """DAPO's clip higher: a ratio of 1.28 still has a gradient, one of 1.3 has none."""
  completions = completions_of(reference_BT=False)
  now_BT = bigram(WEIGHTS_VV, completions).targets_BT
  completions = completions._replace(
    behaviour_BT=now_BT - math.log1p(move), advantages_B=np.full(B, advantage, np.float32)
  )
  gradient, sums = summed(completions, dataclasses.replace(PLAIN, epsilon_high=0.28))
  assert float(sums.clipped_low) == low * float(sums.tokens)
  assert float(sums.clipped_high) == high * float(sums.tokens)
  assert (np.abs(gradient).max() > 0) == (low == high == 0)


def test_a_group_that_splits_over_microbatches_would_have_other_advantages():
  """Hazard: groups split, each part compared with itself alone."""
  rewards = np.random.default_rng(3).random(B)
  whole = group_advantages(rewards, G, scale=True)
  by_group = np.concatenate(
    [group_advantages(rewards[at : at + G], G, scale=True) for at in range(0, B, G)]
  )
  np.testing.assert_array_equal(whole, by_group)
  assert np.abs(group_advantages(rewards, G // 2, scale=True) - whole).max() > 0.1


def test_advantages_are_those_of_the_paper():
  rewards = [1.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0]
  np.testing.assert_allclose(
    group_advantages(np.array(rewards), 4, scale=False),
    [0.5, -0.5, -0.5, 0.5, 1.5, -0.5, -0.5, -0.5],
  )
  scaled = group_advantages(np.array(rewards), 4, scale=True)
  np.testing.assert_allclose(scaled[:4], np.array([1, -1, -1, 1]) * 0.5 / (math.sqrt(1 / 3) + 1e-4))
  np.testing.assert_allclose(scaled[4:], np.array([3, -1, -1, -1]) * 0.5 / (1 + 1e-4), rtol=1e-6)


@pytest.mark.parametrize("scale", [True, False])
def test_a_group_of_equal_rewards_has_exactly_no_gradient(scale):
  """0.1 three times has a mean that is not 0.1."""
  rewards = np.array([0.1, 0.1, 0.1, 0.0, 0.1, 0.0])
  assert rewards[:3].mean() != 0.1
  result = group_advantages(rewards, 3, scale=scale)
  assert list(result[:3]) == [0, 0, 0]
  assert live_groups(rewards, 3).tolist() == [False, True]
  completions = completions_of(reference_BT=False)._replace(advantages_B=np.zeros(B, np.float32))
  assert not summed(completions, PLAIN)[0].any()


def test_metrics_are_means_over_the_step():
  completions = completions_of()
  values = metric_values(summed(completions, PLAIN, 4)[1])
  counts = np.asarray(completions.rows.weights) > 0
  result = bigram(WEIGHTS_VV, completions)
  gap_BT = np.abs(np.asarray(result.targets_BT) - completions.behaviour_BT)
  assert values["rl/entropy"] == pytest.approx(
    np.asarray(result.entropy_BT)[counts].mean(), rel=1e-5
  )
  assert values["rl/log_prob_gap"] == pytest.approx(gap_BT[counts].mean(), rel=1e-5)
  assert values["rl/largest_log_prob_gap"] == pytest.approx(gap_BT[counts].max(), rel=1e-5)
  assert values["rl/completion_length"] == pytest.approx(counts.sum() / B)


def test_keys_become_the_objective():
  rl = load_config(["config=base", "grpo_epsilon_high=0.28", "loss_type=dr_grpo"]).rl
  assert objective(rl, 12) == Objective("dr_grpo", 0.0, 0.2, 0.28, 2.0, 12)
  assert objective(load_config(["config=base"]).rl, 12).epsilon_high == 0.2


# --- the log-probabilities of a real model -------------------------------------------------------


def test_log_probs_are_those_of_what_may_be_sampled():
  """Also where each token was chosen from some of those alone."""
  model = tiny_model("final_logits_soft_cap=2", "num_vocab_tiling=5")
  params, completions = loud_parameters(model), make_completions(rollout(4), advantages(4), 0, T)
  targets_BT1 = np.asarray(completions.rows.targets)[..., None]
  kept_BTV = np.random.default_rng(0).random((4, T, V)) < 0.3
  np.put_along_axis(kept_BTV, targets_BT1, True, -1)
  bits_BTW = packed(jnp.asarray(kept_BTV).reshape(-1, V)).reshape(4, T, -1)

  @jax.jit
  def compute(params: Any) -> tuple[Any, list[LogProbs]]:
    bound = model.bind(params)
    logits_BTV = hidden_of(bound(completions.rows, None)) @ bound.output_matrix()
    return logits_BTV, [
      token_log_probs(model, params, completions.rows, ALLOWED_V, 0.7, kept)
      for kept in (None, bits_BTW)
    ]

  logits_BTV, (of_all, of_some) = compute(params)
  scaled_BTV = 2 * np.tanh(np.asarray(logits_BTV, np.float64) / 2) / 0.7
  counts_BT = np.asarray(completions.rows.weights) > 0
  for result, left_BTV in ((of_all, ALLOWED_V[None, None]), (of_some, kept_BTV & ALLOWED_V)):
    weight_BTV = np.where(left_BTV, np.exp(scaled_BTV), 0)
    share_BTV = weight_BTV / weight_BTV.sum(-1, keepdims=True)
    log_BTV = np.log(np.where(share_BTV > 0, share_BTV, 1))
    expected_BT = np.take_along_axis(log_BTV, targets_BT1, -1)[..., 0] * counts_BT
    np.testing.assert_allclose(result.targets_BT, expected_BT, atol=2e-5)
    entropy_BT = -(share_BTV * log_BTV).sum(-1) * counts_BT
    np.testing.assert_allclose(result.entropy_BT, entropy_BT, atol=2e-5)


def test_a_model_s_gradient_depends_neither_on_split_nor_mesh_nor_tiles():
  whole_model, tiled_model = tiny_model(), tiny_model("num_vocab_tiling=3")
  params, completions = loud_parameters(whole_model), completions_of(8)
  goal = dataclasses.replace(PLAIN, loss_type="grpo", beta=0.1)

  @functools.partial(jax.jit, static_argnums=0)
  def gradient(model: Model, params: Any, completions: Completions) -> Any:
    def loss(params: Any) -> tuple[Any, Any]:
      sums = grpo_sums(
        token_log_probs(model, params, completions.rows, ALLOWED_V), completions, goal
      )
      return sums.loss, sums.weight

    return jax.grad(loss, has_aux=True)(params)

  whole, weight = gradient(whole_model, params, completions)
  with jax.set_mesh(mesh(fsdp=2)):
    parts = [
      gradient(tiled_model, params, jax.tree.map(lambda x: x[at : at + 4], completions))  # noqa: B023
      for at in (0, 4)
    ]
  assert sum(part[1] for part in parts) == weight
  split = jax.tree.map(jnp.add, parts[0][0], parts[1][0])
  assert max(relative_errors(split, whole).values()) < 2e-6


# --- pass@k --------------------------------------------------------------------------------------


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
  """Hazard: pass@k that reads the last completion alone, or the first k."""
  random = np.random.default_rng(0)
  right = random.random((5, 6)) < 0.3
  for k in range(1, 7):
    chosen = [
      right[:, [i for i in range(6) if mask >> i & 1]].any(1)
      for mask in range(64)
      if bin(mask).count("1") == k
    ]
    assert pass_at_k(right.sum(1).tolist(), 6, k) == pytest.approx(np.mean(chosen), abs=1e-12)


@pytest.mark.parametrize(("correct", "n", "k"), [([1], 4, 5), ([1], 4, 0), ([], 4, 1)])
def test_pass_at_k_needs_as_many_completions(correct, n, k):
  with pytest.raises(ValueError, match="pass@"):
    pass_at_k(correct, n, k)
