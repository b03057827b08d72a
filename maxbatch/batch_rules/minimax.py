"""MiniMax-01 2025: the losses at which it doubled its batch."""

from maxbatch.batch_rules.rule import BatchRule, Fitted

DOUBLED_AT = ((2.22, 16e6), (1.98, 32e6), (1.77, 64e6), (1.58, 128e6))
"""(loss, tokens of a step) as published."""


def batch_tokens(loss: float) -> float:
  """2.10e9 · L^−6.12 tokens, fitted to DOUBLED_AT."""
  return 2.10e9 * loss**-6.12


RULE = BatchRule(
  "minimax",
  "MiniMax-01 2025",
  "Bcrit = 2.10e9 · L^−6.12",
  "L nats per token; tokens of a step",
  "arXiv 2501.08313, section 4; the formula is our fit to its four points",
  "text or code",
  "L is on its own scale, and is guessed here unless final_loss= is given",
  means="critical",
  batch_tokens=lambda training: batch_tokens(training.loss),
  fitted=(Fitted("parameters", 50e6, 600e6),),
)
