"""What is published since 2025 without a batch that could be computed: for which optimizer, learning
rate's schedule and model it was found, what it says, and what speaks against it.

Their constants are not in what we could read, or there are none, so none of these moves the advised
batch. Not even the exponents could be read of the power laws of signSGD and Muon (arXiv 2603.15958), nor
the fits of B_min and B_opt under wsd (arXiv 2601.05034).
"""

import dataclasses

from maxbatch.batch_rules.rule import Fitted, Rule


@dataclasses.dataclass(frozen=True)
class Setting:
  """What decides whether a finding is about a run."""

  opt_type: str
  lr_schedule_type: str
  has_experts: bool


@dataclasses.dataclass(frozen=True)
class Finding(Rule):
  """A published finding, and the runs that it is about."""

  says: str
  """What it means for such a run, with the keys where there are some."""
  opt_types: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
  """Empty: any."""
  lr_schedule_types: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
  """Empty: any."""
  of_mixtures: bool = dataclasses.field(default=False, kw_only=True)
  """Whether it is about mixtures of experts alone."""

  def misfit(self, setting: Setting) -> str:
    """Returns why it is not about a run; empty: it is."""
    if self.opt_types and setting.opt_type not in self.opt_types:
      return f"for {' and '.join(self.opt_types)}"
    if self.lr_schedule_types and setting.lr_schedule_type not in self.lr_schedule_types:
      return f"for lr_schedule_type={' and '.join(self.lr_schedule_types)}"
    return "for mixtures of experts" if self.of_mixtures and not setting.has_experts else ""


WSD = Finding(
  "wsd-crossing",
  "Zhou 2026",
  "E = B₋₁ / (S − Smin) + B₀, then C · (S − Sopt)² + Emin, then A₁ · S + A₀; B_opt = Emin / Sopt takes the "
  "fewest tokens, below B_min the loss is not reached",
  "E tokens, S steps to a target loss",
  "arXiv 2601.05034, abstract; the formula in a review of it",
  "summary",
  "the fit has a form of its own for each model; we could not read its constants",
  "with this schedule the curves of different batches cross: at a low loss a larger batch may take less "
  "data, so x and (1 + 1/x) are wrong in kind there; maxbatch critical_batch measures, and the batch may "
  "grow as the loss falls",
  lr_schedule_types=("wsd", "constant"),
)

FINDINGS = (
  WSD,
  Finding(
    "seesaw",
    "Meterez 2025",
    "rate / √2 and batch · 2 where the rate would halve",
    "factors, at equal samples",
    "arXiv 2510.14717, abstract",
    "text or code",
    "begun at the critical batch of models at 20 tokens a parameter; beyond it equal loss is not promised",
    "batch_schedule_type=seesaw batch_size_start=START ends at the same loss in less serial time, 36% less "
    "with their cosine",
    fitted=(Fitted("parameters", 150e6, 600e6),),
    opt_types=("adamw", "sgd"),
    lr_schedule_types=("cosine", "linear", "wsd"),
  ),
  Finding(
    "fast-catch-up",
    "Wang 2026",
    "after a switch to a large batch the loss soon is that of the large batch held constant",
    "no constants",
    "arXiv 2602.14208, abstract",
    "text or code",
    "when to switch depends on the task's difficulty, for which there is no number before training; dense "
    "models and mixtures of up to 1.1B parameters, up to 1T tokens",
    "a hard task keeps the small batch for most of its tokens: move the last phase of batch_schedule late "
    "rather than early",
  ),
  Finding(
    "muon-efficiency",
    "Shah 2025",
    "Muon needs less data than AdamW the more, the larger the batch",
    "no constants",
    "arXiv 2505.02222, abstract",
    "text or code",
    "how much larger Muon's critical batch is, we could not read; models of up to 4B parameters",
    "the rules above were fitted under AdamW, and are low for Muon: a larger data_overhead costs less "
    "than it says",
    opt_types=("muon",),
  ),
  Finding(
    "muon-critical",
    "Sato 2026",
    "a lower bound of Muon's critical batch by variance, precision, momentum and weight decay",
    "the variance and the precision cannot be observed",
    "arXiv 2507.01598v5, abstract",
    "text or code",
    "by its own words it does not predict the critical batch",
    "it gives no batch: measure with gns=all or maxbatch critical_batch",
    opt_types=("muon",),
  ),
  Finding(
    "lmo-scaling",
    "Shulgin 2026",
    "rate, momentum and batch are powers of the steps or tokens",
    "exponents from convergence bounds, which we could not read",
    "arXiv 2603.15958, abstract",
    "text or code",
    "theory for signSGD, as an approximation of Adam, and Muon, with the model's size held fixed",
    "momentum and batch belong together, and several pairs do equally well: a momentum found at one batch "
    "need not be the best at another",
    opt_types=("adamw", "muon"),
  ),
  Finding(
    "muonh-rate",
    "Ren 2026",
    "η → η · κ^−0.32 at κ times the tokens",
    "κ a factor",
    "arXiv 2603.28743, abstract and section 3.4",
    "summary",
    "for matrices held to a sphere, where weight decay does nothing; how their critical batch grows with "
    "the tokens they leave open",
    "a rate found in a shorter run falls by this",
    opt_types=("muonh",),
  ),
  Finding(
    "mixture-power-laws",
    "Wang 2024",
    "optimal batch and rate of mixtures follow power laws of the compute as dense models' do",
    "C FLOPs",
    "arXiv 2410.05661, abstract",
    "text or code",
    "we could not read their coefficients",
    "the rules above are asked with the active parameters, and say the form right, the factor perhaps not",
    of_mixtures=True,
  ),
)
"""Newest rules without a number of their own."""
