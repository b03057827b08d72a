"""The loss that a model of N parameters has after D tokens, for the rules that ask for a loss."""


def expected_loss(parameters: float, tokens: float) -> float:
  """Nats per token: 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28.

  Hoffmann et al. 2022 (arXiv 2203.15556), equation 10, on MassiveText with its tokenizer. Another
  tokenizer or other data have another loss, so what follows from this one is indicative.
  """
  return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28
