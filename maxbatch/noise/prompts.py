"""The noise of the policy gradient, per prompt: between prompts, and by sampling their completions.

A step takes P prompts, independent of each other, and G completions of each. Its gradient is the mean
of h_p = Σ c_i / G, where c_i is the gradient of a completion's loss. Over prompts and completions

    tr Cov(h) = between + within        of the mean of h given its prompt; around that mean

and P prompts divide both; G completions divide `within`. The completions of a prompt are compared with
each other, so that the c_i are not independent, and the h of half as many is not half of h. But their
order says nothing. With A and B the sums over the two halves of a group, and C = E[c_i·c_j] of two
completions of one prompt,

    E|A + B|² / G² = E|h|²        E|A − B|² / G² = E|h|² − C

With rewards less their group's mean, c_i = (r_i − r̄)·s_i, and scores of mean 0 (E[s_i] = 0: what is
sampled is not trained on yet) C = (1 + 1/(G − 1)²) · E|E[h | p]|²: a term from the product of two means,
and one because each reward is in the other's baseline. Thus `within` is estimated without bias. Where
rewards are divided by their group's standard deviation, or losses by the lengths of completions, C has
other terms as well, and `within` comes out larger: by 1% to 20% in simulations whose completions differ
as much as right ones do from wrong ones, by a third where they hardly do (tests/test_prompt_noise.py).

From G to G' completions `within`, relative to the mean gradient, falls nearly as (G − 1) / (G' − 1): the
degrees of freedom that a group has once its mean is taken off.
"""

import dataclasses

from maxbatch.core.noise_scale import Moments, moments


@dataclasses.dataclass(frozen=True)
class PromptMoments:
  """Unbiased estimates from one step."""

  whole: Moments
  """Its noise is tr Cov(h), of one prompt with its completions."""
  within: float
  """The part of that noise that is by sampling; may be negative, as all estimates of one step."""


def prompt_moments(
  prompts: int, generations: int, share: float, halves: float, small: float, big: float
) -> PromptMoments | None:
  """Returns the estimates from squared norms of a step's mean gradient and of its parts.

  None with fewer than two microbatches, or a gradient that is not finite.

  Args:
    prompts: P.
    generations: G, even.
    share: Σ (weight of a microbatch / weight of the step)², as in `moments`.
    halves: Σ |part of half of each prompt's completions|², over both halves of all microbatches.
    small: Σ |part of a microbatch|², each of whole groups.
    big: |the whole|².
  """
  whole = moments(prompts, share, small, big)
  if whole is None:
    return None
  squared = whole.signal + whole.noise
  # |A − B|² = 2|A|² + 2|B|² − |A + B|²: of a microbatch the sum over its prompts, since the mean of
  # A − B is 0.
  differing = prompts * (2 * halves - small)
  of_means = (squared - differing) / (1 + 1 / (generations - 1) ** 2)
  return PromptMoments(whole, squared - of_means)


def within_at(within: float, generations: int, others: int) -> float:
  """Returns the part by sampling with `others` completions of a prompt, of what it is with
  `generations`."""
  return within * (generations - 1) / (others - 1)
