"""How many examples a property test tries: all of them, or the quick tier's share."""

share = 1.0


def examples(count: int) -> int:
  """Returns how many of `count` examples to try, at least 5."""
  return max(5, round(share * count))
