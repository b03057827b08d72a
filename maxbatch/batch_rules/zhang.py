"""Zhang et al. 2024: the batch that takes a fifth more than linear scaling from a small one."""

from maxbatch.batch_rules.rule import BatchRule, Fitted, GrowthRule

_SEQUENCE_TOKENS = 512
_MILLION = 1e6
_SOURCE = "arXiv 2410.21676; code hlzhang109/critical-batch-size"
_PARAMETERS = Fitted("parameters", 85e6, 1.2e9)
_EXPONENT = 0.47


def by_tokens(tokens: float) -> float:
  """22.91 · (D in millions)^0.47 sequences of 512 tokens."""
  return 22.91 * (tokens / _MILLION) ** _EXPONENT * _SEQUENCE_TOKENS


def by_parameters(parameters: float) -> float:
  """93.20 · (N in millions)^0.47 sequences of 512 tokens, with about 20 tokens a parameter."""
  return 93.20 * (parameters / _MILLION) ** 0.47 * _SEQUENCE_TOKENS


def by_parameters_at_equal_tokens(parameters: float) -> float:
  """621.341 · (N in millions)^0.087 sequences of 512 tokens, after 3.07B tokens."""
  return 621.341 * (parameters / _MILLION) ** 0.087 * _SEQUENCE_TOKENS


BY_TOKENS = BatchRule(
  "zhang",
  "Zhang 2024, by data",
  "B* = 22.91 · D^0.47",
  "D millions of tokens; sequences of 512 tokens",
  _SOURCE,
  "summary",
  "20% more steps than linear scaling from a batch of 256; that D is in millions, we infer",
  means="overhead",
  batch_tokens=lambda training: by_tokens(training.tokens),
  data_overhead=0.2,
  fitted=(_PARAMETERS,),
)
BY_PARAMETERS = BatchRule(
  "zhang-parameters",
  "Zhang 2024, by size",
  "B* = 93.20 · N^0.47",
  "N millions of parameters; sequences of 512 tokens",
  _SOURCE,
  "summary",
  "holds where data and model grow together, about 20 tokens a parameter; elsewhere by data",
  means="overhead",
  batch_tokens=lambda training: by_parameters(training.parameters),
  data_overhead=0.2,
  fitted=(_PARAMETERS,),
  only=(Fitted("tokens_per_parameter", 10, 40),),
)
AT_EQUAL_TOKENS = BatchRule(
  "zhang-equal-tokens",
  "Zhang 2024, 3B tokens",
  "B* = 621.341 · N^0.087",
  "N millions of parameters; sequences of 512 tokens",
  _SOURCE,
  "summary",
  "after 3.07B tokens, whatever the size: that the model hardly matters is what it shows",
  means="overhead",
  batch_tokens=lambda training: by_parameters_at_equal_tokens(training.parameters),
  data_overhead=0.2,
  fitted=(_PARAMETERS,),
  only=(Fitted("tokens", 1.5e9, 6e9),),
)
GROWTH = GrowthRule(
  "zhang-growth",
  "Zhang 2024",
  "B ∝ D^0.47",
  "D tokens so far",
  _SOURCE,
  "summary",
  "its D are whole runs; taken here for the tokens that a run has seen, which is cautious, since "
  "the batch at a run's end is worth more than over its whole length",
  exponent=_EXPONENT,
  fitted=(_PARAMETERS,),
)
