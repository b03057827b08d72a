"""Text of others, such as a model's, shown without what would move a cursor or hide words."""


def printable(text: str) -> str:
  """The text with escapes for all that would move a terminal's cursor, but line breaks and tabs."""
  escaped = (
    character
    if character.isprintable() or character in "\n\t"
    else character.encode("unicode_escape").decode()
    for character in text
  )
  return "".join(escaped)
