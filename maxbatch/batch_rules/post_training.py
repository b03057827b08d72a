"""Published choices of prompts and completions in reinforcement learning, and what they say of them."""

import dataclasses

from maxbatch.batch_rules.rule import Rule


@dataclasses.dataclass(frozen=True)
class Choice(Rule):
  """What was trained with; 0: not said."""

  says: str
  prompts: int = dataclasses.field(default=0, kw_only=True)
  generations: int = dataclasses.field(default=0, kw_only=True)
  completions: int = dataclasses.field(default=0, kw_only=True)


_UNITS = "B prompts, K completions of each, N completions of a step"

CHOICES = (
  Choice(
    "dapo",
    "DAPO 2025",
    "B = 512, K = 16",
    _UNITS,
    "arXiv 2503.14476",
    "text or code",
    "chosen for one model of 32B parameters, not compared with others",
    "steps on mini-batches of 512 completions",
    prompts=512,
    generations=16,
    completions=8192,
  ),
  Choice(
    "magistral",
    "Magistral 2025",
    "N = 8192, then 4096, then 2048",
    _UNITS,
    "arXiv 2506.10910",
    "summary",
    "falls as answers grow longer, so it may follow memory and time, not what a batch is worth",
    "8k completions, then 4k, then 2k as answers grow; at most 2 steps behind",
    completions=8192,
  ),
  Choice(
    "scale-rl",
    "ScaleRL 2025",
    "B = 48, K = 16; at one N, K of 8 to 32 are equal",
    _UNITS,
    "arXiv 2510.13786",
    "summary",
    "one recipe; larger batches win late, so short runs mislead",
    "of as many completions 8 to 32 completions are equal; larger batches win late",
    prompts=48,
    generations=16,
    completions=768,
  ),
  Choice(
    "iso-compute",
    "IsoCompute 2026",
    "C = K · B · M; the best K grows with C, and saturates",
    f"{_UNITS}; M steps, C completions in all",
    "arXiv 2603.12151, abstract, and its page",
    "text or code",
    "where K saturates depends on how hard the problems are; its constants we have not read",
    "with little compute more prompts, with much more completions",
  ),
  Choice(
    "policy-critical",
    "policy optimization 2026",
    "noise = between prompts / B + within prompts / (B · K)",
    _UNITS,
    "HiLD at ICML 2026, openreview.net/forum?id=uK4kMpNx0W, abstract",
    "text or code",
    "GRPO with verified rewards; reused completions add drift to the noise within prompts, by a model that we "
    "have not read",
    "noise is mostly within prompts, so the completions in all, prompts × completions of each, are the "
    "batch; reusing completions raises the critical one (HiLD at ICML 2026, abstract)",
  ),
  Choice(
    "two-rollouts",
    "2-GRPO 2026",
    "K = 2",
    _UNITS,
    "arXiv 2510.00977v3, abstract",
    "text or code",
    "contradicts IsoCompute, by which more compute wants more completions",
    "2 completions of a prompt keep 97.6% of what 16 reach, with an eighth of the completions and 21% of "
    "the time (arXiv 2510.00977v3, abstract)",
    generations=2,
  ),
)
EQUAL_GENERATIONS = (8, 32)
"""Group sizes that did equally well with as many completions, by ScaleRL."""
