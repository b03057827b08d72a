"""Writes tests/left_out.txt: which tests the quick tier leaves out, by what they cover and cost.

    .venv/bin/pip install pytest-cov
    scripts/test.sh --all --cov=maxbatch --cov-context=test --junitxml=all.xml
    .venv/bin/python scripts/choose_quick_tests.py .coverage all.xml SECONDS

A test here is a function with its first case, as the quick tier runs it. Taken are first those that
KEEP names, then those that run the most new lines per second until TARGET of all lines that any test
runs are covered, then the cheapest, each of which is a promise more, until the seconds are spent. Tests
that need no jax are all taken, and cost nothing here.
"""

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "left_out.txt"
TARGET = 0.93
LEAST_SECONDS = 0.02
"""What any test costs, for the order of those that take nearly nothing."""
KEEP = re.compile(
  r"""
    test_(accumulate|core|check_split|step|sharding|pipelined_step)\.py::
  | test_train\.py::test_(killed_and_interrupted_runs_go_on_exactly|resumed_on_another_mesh)
  | test_dropout\.py::test_microbatches_add_up_to_the_whole
  | test_grpo\.py::test_a_model_s_gradient_depends_neither_on_split
  | test_noise_step\.py::test_any_split_measures_the_same
  """,
  re.VERBOSE,
)
"""A step is the same however it is split, sharded, pipelined or resumed."""
NEVER = re.compile(
  r"""
    test_(conversion|fine_tuning|sample)_transformers | test_families
  | test_report_in_a_browser | test_docs_site | test_object_store | test_distribution
  | test_same_training | test_faults | test_interrupted | test_lost_listener | test_agreement
  | test_loading_processes | test_full_disk | test_rendezvous | test_soak | test_partition
  | test_joining | test_connections | test_second_job | test_environment | test_local_cluster | test_templates
  | test_tpu_topology | test_metrics_writers\.py::test_(wandb|mlflow) | test_data_formats\.py::test_a_dataset_
  """,
  re.VERBOSE,
)
"""What needs packages of the extra test-all, or starts several processes in every test."""

Line = tuple[str, int]


def function(test: str) -> str:
  """Returns `file::name` of `folder/file::name[case]`."""
  return Path(test.partition("::")[0]).name + "::" + re.split(r"::", test.partition("[")[0])[-1]


def lines_by_test(data_file: str) -> tuple[dict[str, set[Line]], set[Line]]:
  """Returns the lines that each test's first case runs, and those that any test runs.

  Args:
    data_file: coverage's, with a context per test.
  """
  data = coverage.CoverageData(data_file)
  data.read()
  of_context = collections.defaultdict[str, set[Line]](set)
  for file in data.measured_files():
    for line, contexts in data.contexts_by_lineno(file).items():
      for context in contexts:
        of_context[context.partition("|")[0]].add((file, line))
  imported = of_context.pop("", set())
  first: dict[str, set[Line]] = {}
  for test, lines in of_context.items():
    first[function(test)] = first.get(function(test), set()) | lines - imported
  return first, set().union(*of_context.values()) - imported


def seconds_by_test(junit: str) -> dict[str, float]:
  """Returns what the first case of each test with jax takes, of pytest's --junitxml."""
  seconds: dict[str, float] = {}
  for case in ElementTree.parse(junit).iter("testcase"):
    file = case.attrib["classname"].rpartition(".")[2]
    name = f"{file}.py::{case.attrib['name'].partition('[')[0]}"
    if (LIST.parent / f"{file}.py").exists():
      seconds.setdefault(name, float(case.attrib["time"]))
  return seconds


def choose(
  lines: Mapping[str, set[Line]], seconds: Mapping[str, float], every: set[Line], budget: float
) -> list[str]:
  """Returns the tests that run, best first."""
  chosen = [test for test in seconds if KEEP.match(test)]
  free = [lines[test] for test in lines.keys() - seconds.keys()]
  covered = set[Line]().union(*free, *(lines.get(test, set()) for test in chosen))
  spent = sum(seconds[test] for test in chosen)
  others = {test for test in {*seconds} - {*chosen} if not NEVER.match(test)}

  def worth(test: str) -> float:
    return len(lines.get(test, set()) - covered) / max(seconds[test], LEAST_SECONDS)

  while others and len(covered) < TARGET * len(every) and spent < budget:
    best = max(sorted(others), key=worth)
    if not worth(best):
      break
    others.remove(best)
    chosen.append(best)
    covered |= lines[best]
    spent += seconds[best]
  for test in sorted(others, key=lambda test: (seconds[test], test)):
    spent += seconds[test]
    if spent > budget:
      break
    chosen.append(test)
  return chosen


def left_out(chosen: Iterable[str], every: Iterable[str]) -> list[str]:
  """Returns the lines of the list: whole files, where none of a file's tests is chosen."""
  stay = {*chosen}
  files = {test.partition("::")[0] for test in stay}
  named = {test.partition("::")[0] for test in every}
  never = {file.name for file in LIST.parent.glob("test_*.py") if NEVER.match(file.name)}
  whole = never | (named - files)
  return sorted({*whole, *(t for t in {*every} - stay if t.partition("::")[0] in files)})


def main(data_file: str, junit: str, budget: str) -> None:
  lines, every = lines_by_test(data_file)
  seconds = seconds_by_test(junit)
  chosen = choose(lines, seconds, every, float(budget))
  free = lines.keys() - seconds.keys()
  covered = set[Line]().union(*(lines.get(test, set()) for test in {*free, *chosen}))
  share = f"{100 * len(covered) // len(every)}%"
  spent = sum(seconds[test] for test in chosen)
  LIST.write_text(
    f"# {share} of the lines that any test runs are run without these; what runs took {spent:.0f} of\n"
    f"# {sum(seconds.values()):.0f} seconds. Written by scripts/choose_quick_tests.py.\n"
    + "".join(f"{each}\n" for each in left_out(chosen, seconds))
  )
  print(LIST.read_text().splitlines()[0], f"{len(chosen)} of {len(seconds)} tests")


if __name__ == "__main__":
  main(*sys.argv[1:])
