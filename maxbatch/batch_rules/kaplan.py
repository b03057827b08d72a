"""Kaplan et al. 2020: the critical batch from the loss."""

from maxbatch.batch_rules.rule import BatchRule, Fitted


def batch_tokens(loss: float) -> float:
  """Bcrit = 2e8 / L^(1/0.21) tokens."""
  return 2e8 / loss ** (1 / 0.21)


RULE = BatchRule(
  "kaplan",
  "Kaplan 2020",
  "Bcrit = 2e8 · L^(−1/0.21)",
  "L nats per token; tokens of a step",
  "arXiv 2001.08361, equation 1.4 (its figure 10 has 2.1e8 · L^−4.8)",
  "summary",
  "L is bound to WebText2 and its tokenizer, and is guessed here unless final_loss= is given",
  means="critical",
  batch_tokens=lambda training: batch_tokens(training.loss),
  fitted=(Fitted("parameters", 3e6, 85e6),),
)
