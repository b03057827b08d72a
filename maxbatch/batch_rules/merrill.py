"""Merrill et al. 2025: where branches of OLMo stopped losing nothing."""

from maxbatch.batch_rules.rule import BatchRule, Fitted

RULE = BatchRule(
  "merrill",
  "Merrill 2025",
  "B* about 4096 · 4096 tokens, late in training",
  "tokens of a step",
  "arXiv 2505.23971",
  "text or code",
  "a plateau read off figures, within 0.01 nats of smaller batches; early in training it is near 0. "
  "python -m maxbatch.critical_batch measures it for your run",
  means="tolerance",
  batch_tokens=lambda _: 4096.0 * 4096.0,
  fitted=(Fitted("parameters", 1e9, 7e9),),
)
