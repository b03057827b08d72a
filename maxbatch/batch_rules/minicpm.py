"""MiniCPM 2024: the batch that reaches a loss with the fewest tokens."""

from maxbatch.batch_rules.rule import BatchRule, Fitted


def batch_tokens(loss: float) -> float:
  """1.21e9 / L^6.24 tokens."""
  return 1.21e9 / loss**6.24


RULE = BatchRule(
  "minicpm",
  "MiniCPM 2024",
  "Bopt = 1.21e9 · L^−6.24",
  "L nats per token; tokens of a step",
  "arXiv 2404.06395, section 3.2",
  "summary",
  "the fewest tokens, not the least time; L is that of C4 with its tokenizer, and is guessed here "
  "unless final_loss= is given",
  means="optimal",
  batch_tokens=lambda training: batch_tokens(training.loss),
  fitted=(Fitted("parameters", 9e6, 170e6),),
)
