"""Checks and measures maxbatch on this machine's accelerator, and writes a table to paste.

    python scripts/accelerator_check.py [size=auto] [sections=all] [out=accelerator_check]
      [wheels=FOLDER] [key=value ...]

First the promises, on the device: the same gradient whatever the split (microbatches, meshes, a
pipeline where there are several devices), a resumed run bit for bit, the fused attention kernel
against matrix products. Then tokens per second and utilisation; memory predicted against used;
on a GPU, steps beside their estimates, which are then scaled to them (scripts/gpu_calibration.py);
micro_batch_size=auto and explore against trying every size; the training loop against its bare step,
and that against plain JAX; what the noise scale costs. Without an accelerator the same runs on the
CPU, in smaller sizes: a rehearsal.

Each section is a process of its own and its rows are kept in `out`, so an interrupted command, or
one with a time limit, continues where it was; sections=splits,resume runs these alone. More keys go
to every run, for example num_simulated_devices=4. The exit code is 1 if a promise is broken or a
section fails.

It needs what pyproject.toml lists. Where only some of that is installed, and nothing can be fetched,
it says which wheels to bring; wheels=FOLDER unpacks those that are missing or older here into a
folder of `out`.
This file itself needs Python alone.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECTIONS = (
  "device",
  "splits",
  "resume",
  "attention",
  "speed",
  "calibrate",
  "memory",
  "choose",
  "loop",
  "noise",
)
REPEATABLE = ("splits", "resume")
"""Sections for which a GPU is told to sum in a fixed order."""
IN_ORDER = "--xla_gpu_deterministic_ops=true"
OWN = {"size": "auto", "sections": "all", "out": "accelerator_check", "wheels": ""}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_OLDEST = re.compile(r">=\s*([0-9.]+)")


def missing_packages() -> list[str]:
  """What pyproject.toml lists, or one of those that are there needs, and is not installed or too old."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  waiting, seen, missing = list(project["dependencies"]), set(), []
  while waiting:
    requirement = waiting.pop(0)
    name = _NAME.match(requirement)
    # What comes with an extra or on another system is not needed here.
    if name is None or ";" in requirement or canonical(name[0]) in seen:
      continue
    seen.add(canonical(name[0]))
    try:
      waiting += importlib.metadata.requires(name[0]) or []
    except importlib.metadata.PackageNotFoundError:
      missing.append(requirement)
      continue
    oldest = _OLDEST.search(requirement)
    if oldest and release(importlib.metadata.version(name[0])) < release(oldest[1]):
      missing.append(requirement)
  return missing


def release(version: str) -> tuple[int, ...]:
  """The numbers of a version, without what follows them and zeros at their end: (1, 20) of 1.20.0rc1."""
  numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
  while numbers and not numbers[-1]:
    numbers.pop()
  return tuple(numbers)


def canonical(name: str) -> str:
  """A package's name as indexes compare it."""
  return re.sub(r"[-_.]+", "-", name).lower()


def unpack(wheels: pathlib.Path, folder: pathlib.Path) -> None:
  """Installs those of the wheels that are newer than what is here, into a folder that is searched first."""
  there = {
    canonical(result.metadata["Name"]): release(result.version)
    for result in importlib.metadata.distributions()
  }
  needed = []
  for wheel in sorted(wheels.glob("*.whl")):
    name, version = wheel.name.split("-")[:2]
    if there.get(canonical(name), ()) < release(version):
      needed.append(str(wheel))
  if needed:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), *needed], check=True)
  sys.path.insert(0, str(folder))


def how_to_bring(missing: Sequence[str]) -> str:
  """The command that fetches the wheels, on a machine that can."""
  version = ".".join(platform.python_version_tuple()[:2])
  machine = platform.machine()
  platforms = " ".join(f"--platform manylinux_2_{n}_{machine}" for n in (17, 27, 28))
  quoted = " ".join(f"'{each}'" for each in missing)
  return (
    f"Missing or too old: {', '.join(missing)}.\nWhere there is a network: pip install {quoted}\n"
    "Where there is none, fetch wheels elsewhere, and give them with wheels=wheels:\n"
    f"  pip download -d wheels --only-binary=:all: --python-version {version} {platforms} "
    f"--platform manylinux2014_{machine} {quoted}"
  )


def measured(name: str, given: Mapping[str, str], keys: Sequence[str]) -> dict[str, Any]:
  """The rows of a section, and its seconds; run if they are not kept. `error` if it failed."""
  out = pathlib.Path(given["out"])
  kept, log = out / f"{name}.json", out / f"{name}.log"
  if kept.exists():
    return json.loads(kept.read_text())
  began = time.perf_counter()
  command = [sys.executable, str(ROOT / "scripts" / "accelerator_sections.py")]
  with log.open("w") as errors:
    done = subprocess.run(
      [*command, name, given["size"], *keys],
      env=environment(name, out),
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      check=False,
    )
  seconds = time.perf_counter() - began
  if done.returncode:
    last = log.read_text().strip().splitlines()[-1:]
    return {"error": f"exit code {done.returncode}: {' '.join(last)} ({log})", "seconds": seconds}
  results = {"rows": json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}
  kept.write_text(json.dumps(results, indent=2) + "\n")
  return results


def environment(name: str, out: pathlib.Path) -> dict[str, str]:
  """Of a section's process."""
  paths = [str(ROOT), str((out / "packages").resolve()), os.environ.get("PYTHONPATH", "")]
  changed = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
  if name in REPEATABLE:
    changed["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {IN_ORDER}".strip()
  return {**os.environ, **changed}


def lines(name: str, results: Mapping[str, Any]) -> Iterator[str]:
  """A section as lines of the table."""
  if "error" in results:
    yield f"| **{name}** | {results['error']} | **failed** |"
    return
  words = {True: "kept", False: "**broken**", None: ""}
  for row in results["rows"]:
    yield f"| {row['name']} | {row['figure']} | {words[row['kept']]} |"


def main(arguments: Sequence[str]) -> int:
  """Checks the packages, runs the sections, writes the table."""
  pairs = [argument.partition("=") for argument in arguments]
  given = OWN | {key: value for key, _, value in pairs if key in OWN}
  keys = [f"{key}={value}" for key, _, value in pairs if key not in OWN]
  names = SECTIONS if given["sections"] == "all" else tuple(given["sections"].split(","))
  if unknown := [name for name in names if name not in SECTIONS]:
    print(f"sections={','.join(unknown)}: there are {', '.join(SECTIONS)}", file=sys.stderr)
    return 2
  out = pathlib.Path(given["out"])
  out.mkdir(parents=True, exist_ok=True)
  if given["wheels"]:
    unpack(pathlib.Path(given["wheels"]), out / "packages")
  if missing := missing_packages():
    print(how_to_bring(missing), file=sys.stderr)
    return 2
  head = ["| | measured | promise |", "|---|---|---|"]
  print("\n".join(head), flush=True)
  table, well = head, True
  for name in names:
    result = measured(name, given, keys)
    rows = list(lines(name, result))
    print("\n".join(rows), flush=True)
    table += rows
    well &= "error" not in result and all(row["kept"] is not False for row in result["rows"])
  (out / "accelerator_check.md").write_text("\n".join(table) + "\n")
  print(f"\nWritten: {out}/accelerator_check.md")
  return 0 if well else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
