"""What a YAML syntax error means, in words for people who do not know YAML's grammar."""

import yaml

_MEANINGS = {
  "unknown escape character": "a \\ in double quotes begins an escape; use single quotes instead.",
  "quoted scalar": "a quote is opened and never closed.",
  "flow sequence": "a list is opened with [ and not closed; write [1, 2, 3].",
  "flow mapping": "a mapping is opened with { and not closed; write {name: 1}.",
  "mapping values are not allowed": "a second `: ` in one line; put the value in quotes.",
  "could not find expected ':'": "expected `key: value`, with a space after the colon.",
  r"character '\t'": "a tab stands where YAML wants spaces.",
  "<block end>": "text follows the end of a value; put the whole value in one pair of quotes.",
  "single document": "a second `---` document; a configuration is one document.",
  "special characters": "a control character; remove it.",
  "alias": "a value that starts with * must be in quotes.",
  "anchor": "a value that starts with & must be in quotes.",
  "cannot start any token": "a value that starts with @, `, % or a comma must be in quotes.",
  "nested too deeply": "brackets are nested too deeply.",
}
# What PyYAML says of an indented line depends on the line above it; the remedy is the same.
_INDENTATION = ("mapping values are not allowed", "<block end>")


def plain_words(error: yaml.YAMLError, line: str = "") -> str:
  """The cause and the remedy of `error`, noticed in `line` of the file."""
  text = str(error)
  if isinstance(error, yaml.MarkedYAMLError):
    # Not str(error): that quotes the file, whose words could be taken for the cause.
    text = f"{error.context} {error.problem}"
  if line.startswith(" ") and any(part in text for part in _INDENTATION):
    return "not valid YAML: this line is indented; start every key in the first column."
  if "mapping values are not allowed" in text and line.count(": ") == 1:
    return "not valid YAML: the line above is not `key: value`; it needs a colon and a space."
  for found, meaning in _MEANINGS.items():
    if found in text:
      return f"not valid YAML: {meaning}"
  return "not valid YAML: expected lines of `key: value`, such as `steps: 400`."
