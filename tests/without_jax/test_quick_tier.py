"""What the quick tier leaves out is there to be left out, and what it runs is spread evenly."""

import re
from collections.abc import Iterator

import quick_tier


def written() -> Iterator[str]:
  """Yields the names of all files and test functions, as the list has them."""
  for file in quick_tier.TESTS.rglob("test_*.py"):
    yield file.name
    yield from (
      f"{file.name}::{name}" for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    )


def test_every_line_of_the_list_names_a_file_or_a_test():
  names = {*written()}
  assert not {line for line in quick_tier.left_out() if line.partition("::")[0] not in names}
  assert not quick_tier.left_out() - names, "renamed, or removed? Change tests/left_out.txt too."


def test_the_list_says_what_it_leaves_covered():
  assert int(quick_tier.coverage().removesuffix("%")) >= 90


def test_of_many_cases_the_first_one_stays():
  left = sorted(quick_tier.left_out())[-1]
  assert quick_tier.chosen(["a", *["b"] * 100, left, "c"]) == {0, 1, 102}
