"""Published choices of prompts and completions in reinforcement learning, and what they say of them."""

import dataclasses

from maxbatch.batch_rules.rule import Read


@dataclasses.dataclass(frozen=True)
class Choice:
  """What was trained with; 0: not said."""

  name: str
  title: str
  prompts: int
  generations: int
  completions: int
  says: str
  read: Read


CHOICES = (
  Choice(
    "dapo", "DAPO 2025", 512, 16, 8192, "steps on mini-batches of 512 completions", "text or code"
  ),
  Choice(
    "magistral",
    "Magistral 2025",
    0,
    0,
    8192,
    "8k completions, then 4k, then 2k as answers grow; at most 2 steps behind",
    "summary",
  ),
  Choice(
    "scale-rl",
    "ScaleRL 2025",
    48,
    16,
    768,
    "of as many completions 8 to 32 completions are equal; larger batches win late",
    "summary",
  ),
  Choice(
    "iso-compute",
    "IsoCompute 2026",
    0,
    0,
    0,
    "with little compute more prompts, with much more completions",
    "text or code",
  ),
  Choice(
    "policy-critical",
    "policy optimization 2026",
    0,
    0,
    0,
    "noise is mostly within prompts, so the completions in all, prompts × completions of each, are the "
    "batch; reusing completions raises the critical one (HiLD at ICML 2026, abstract)",
    "text or code",
  ),
  Choice(
    "two-rollouts",
    "2-GRPO 2026",
    0,
    2,
    0,
    "2 completions of a prompt keep 97.6% of what 16 reach, with an eighth of the completions and 21% of "
    "the time (arXiv 2510.00977v3, abstract)",
    "text or code",
  ),
)
EQUAL_GENERATIONS = (8, 32)
"""Group sizes that did equally well with as many completions, by ScaleRL."""
