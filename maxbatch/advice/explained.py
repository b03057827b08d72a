"""Rules and findings with their sources, and what speaks against them: `advise --explain`."""

from collections.abc import Iterator

from maxbatch.advice.words import short, times, wrapped
from maxbatch.batch_rules.findings import FINDINGS
from maxbatch.batch_rules.post_training import CHOICES
from maxbatch.batch_rules.published import RULES
from maxbatch.batch_rules.rule import BatchRule, Fitted, RateRule, Rule, Training

_READ = {
  "text or code": "read in the paper or its code",
  "summary": "read in a summary by others",
  "memory": "from memory, not checked",
}
_QUANTITIES = {
  "parameters": "parameters",
  "tokens": "tokens",
  "flops": "FLOPs",
  "tokens_per_parameter": "tokens a parameter",
}


def explained(training: Training | None) -> str:
  """Returns all rules, each in a paragraph, with what they say of this training; None: of reinforcement
  learning, which they give no numbers of."""
  rules = (*RULES.values(), *FINDINGS) if training else CHOICES
  return "\n".join(["Rules", *("\n".join(_paragraph(rule, training)) for rule in rules)])


def _paragraph(rule: Rule, training: Training | None) -> Iterator[str]:
  yield from wrapped(f"{rule.name}: {rule.formula}")
  yield from wrapped(f"{rule.units}. {rule.title}, {rule.source}; {_READ[rule.read]}.", "    ")
  if training:
    yield from _here(rule, training)
  yield from wrapped(f"But: {rule.caveat}.", "    ")


def _here(rule: Rule, training: Training) -> Iterator[str]:
  if isinstance(rule, BatchRule):
    heard = "" if rule.speaks_of(training) else " It does not speak of such a training."
    yield from wrapped(f"Here: {short(rule.batch_tokens(training))} tokens a step.{heard}", "    ")
  if isinstance(rule, RateRule):
    at = short(rule.batch_tokens(training))
    yield f"    Here: {rule.learning_rate(training):.2g} at {at} tokens a step."
  if rule.fitted:
    yield from wrapped(
      "Fitted for "
      + " and ".join(f"{_range(one)}{_outside(one, training)}" for one in rule.fitted)
      + ".",
      "    ",
    )


def _range(one: Fitted) -> str:
  return f"{short(one.low)} to {short(one.high)} {_QUANTITIES[one.quantity]}"


def _outside(one: Fitted, training: Training) -> str:
  beyond = one.beyond(training)
  return "" if beyond == 1 else f" (this is outside by {times(beyond)})"
