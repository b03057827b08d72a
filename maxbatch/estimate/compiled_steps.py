"""What compiled steps took: read from compile reports, and kept in a table.

`compiled_steps.json` holds the steps from which the rates of step_rates.json are; `scripts/fit_step_rates.py
read` adds the reports of other runs. What a user compiles (compile_only=true for a slice) is kept in a
folder of the user's.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from maxbatch.command_line.screen import GIB
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.estimate.chips import ALL_CHIPS, Chip, chip_for, is_network_published
from maxbatch.estimate.step_work import RematPolicy, StepWork
from maxbatch.hugging_face.model_keys import digested
from maxbatch.run_folder.atomic import write_whole
from maxbatch.run_folder.paths import remembered_steps

FILE = pathlib.Path(__file__).with_name("compiled_steps.json")
_NO_REPORT = (
  "no compile report of a slice or of GPUs without a pipeline; for example what compile_only=true "
  "compile_topology=v5e-256 writes to compile_report.txt"
)
_CODE = ("models", "precision", "training", "hardware", "estimate")
_POLICIES: Sequence[RematPolicy] = ("none", "minimal", "full")
_TITLE = re.compile(
  r"Compile report: (?P<model>\S+), rows of (?P<length>[\d,]+) tokens, "
  rf"remat_policy (?P<remat>{'|'.join(_POLICIES)}), "
  r"on (?P<place>\S+)\n\s+[\d,]+ × (?P<kind>[^:]+): data (?P<data>\d+) × fsdp (?P<fsdp>\d+) × "
  r"(?:context (?P<context>\d+) × )?tensor (?P<tensor>\d+) × stage 1\b(?:\n\s+computes in (?P<dtype>\w+))?"
)
_TIME = re.compile(r"a step +\S+ s[^:]*: (?P<rest>\S+) s \+ [\d,]+ × (?P<each>\S+) s a microbatch")
_EXPLORED = re.compile(
  rf"^ *\d* +(?P<size>[\d./]+)(?: (?P<remat>{'|'.join(_POLICIES)}))? +(?P<count>[\d,]+) +(?P<peak>\S+) of "
  r"\S+ GiB +(?P<step>\S+) s ",
  re.M,
)
_SHAPE = re.compile(r"one microbatch of (?P<size>\S+) samples? per device")
_LINKS = re.compile(
  r"each microbatch +\d+ × (\S+) +\S+ GB in groups of \d+, (beside the work|work waits), (\S+) s on"
)
_Key = tuple[str, str, Topology, Fraction, str]
_STATE = ("parameters", "optimizer state", "gradient accumulators")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """One compiled step: on a slice, with a microbatch and a remat policy."""

  work: str
  """See `work_digest`."""
  model_name: str
  generation: str
  data: int
  fsdp: int
  tensor: int
  length: int
  compute_bytes: int
  remat: RematPolicy
  per_device: str
  """Samples of a microbatch on one device, as the configuration writes them."""
  microbatch_seconds: float
  rest_seconds: float
  waits: float
  """Seconds of a microbatch in which computing waits for collectives."""
  parts: Mapping[str, float]
  """Seconds of a microbatch by part, collectives included; empty where only the sum is known."""
  state_bytes: int
  peak_bytes: int
  keys: Sequence[str] = ()
  """Keys of the configuration that differ from the shipped one: `dropout_rate=0`."""
  context: int = 1
  chosen: bool = False
  """Compiled since its estimate was the fastest of all, and in no fit of the rates: what such steps take says
  by how much the best of many estimates errs in its favour."""

  @property
  def name(self) -> str:
    """The step in a few words."""
    axes = {"context": self.context, "tensor": self.tensor}
    shared = "".join(f", {axis} {size}" for axis, size in axes.items() if size > 1)
    keys = f" ({' '.join(self.keys)})" if self.keys else ""
    return (
      f"{self.model_name}{keys}, {self.num_chips} × {self.generation}{shared}, "
      f"{self.per_device} × {self.length:,} tokens, {self.remat}"
    )

  def at_factor(self, factor: float) -> "CompiledStep":
    """Returns the step with all times `factor` times as long."""
    return dataclasses.replace(
      self,
      microbatch_seconds=self.microbatch_seconds * factor,
      rest_seconds=self.rest_seconds * factor,
      waits=self.waits * factor,
      parts={part: seconds * factor for part, seconds in self.parts.items()},
    )

  @property
  def chip(self) -> Chip:
    """One device."""
    return ALL_CHIPS[self.generation]

  @property
  def num_chips(self) -> int:
    """Devices of the mesh."""
    return self.data * self.fsdp * self.context * self.tensor

  @property
  def mesh(self) -> Topology:
    """The mesh, of one slice."""
    sizes = {"data": self.data, "fsdp": self.fsdp, "context": self.context, "tensor": self.tensor}
    return Topology.of(**sizes)


@functools.lru_cache(maxsize=256)
def work_digest(work: StepWork) -> str:
  """Returns a hash of all keys that change what is computed, to know a step's work again."""
  model = dataclasses.asdict(work.model)
  keys = digested(model) | {
    "num_vocab_tiling": model["num_vocab_tiling"],
    "scan_layers": bool(model["scan_layers"]),
  }
  is_slow = work.model.attention == "dot_product"
  others = (work.length, work.compute_bytes, work.weight_bytes, work.optimizer_bytes, is_slow)
  eight_bits = [work.quantization] * (work.quantization != "none")
  plugins = map(repr, work.model.plugins)
  result = json.dumps([keys, others, work.model.lora_rank, *plugins, *eight_bits], sort_keys=True)
  return hashlib.sha256(result.encode()).hexdigest()[:16]


def compiled_step(
  work: StepWork, chip: Chip, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> CompiledStep | None:
  """Returns the compiled step of this work, so divided, if there is one; the user's own first."""
  is_far = chip.is_gpu and mesh.num_devices > chip.domain
  if mesh.num_slices > 1 or (is_far and not is_network_published(chip)):
    return None
  key = (work_digest(work), chip.generation, mesh, per_device, remat)
  if own := _remembered(str(remembered_steps())).get(key):
    return own
  known = _by_key().get(key)
  return known.at_factor(chip.calibration) if known else None


def _keyed(steps: Sequence[CompiledStep]) -> dict[_Key, CompiledStep]:
  return {
    (one.work, one.generation, one.mesh, Fraction(one.per_device), one.remat): one for one in steps
  }


@functools.cache
def compiled_steps() -> tuple[CompiledStep, ...]:
  """Returns the package's table."""
  return tuple(CompiledStep(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


@functools.cache
def most_compiled_tokens(on_gpus: bool) -> int:
  """Returns the most tokens that a microbatch had on one device, of the steps from which the rates are."""
  return max(
    int(step.length * Fraction(step.per_device))
    for step in compiled_steps()
    if not step.chosen and step.chip.is_gpu == on_gpus
  )


@functools.cache
def _by_key() -> Mapping[_Key, CompiledStep]:
  return _keyed(compiled_steps())


@functools.cache
def _remembered(folder: str) -> Mapping[_Key, CompiledStep]:
  """Returns the user's own, compiled by this very code; a file that cannot be read is as none."""
  results = []
  for file in sorted(pathlib.Path(folder).glob(f"*-{_code()}.json")):
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
      results += [CompiledStep(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
  return _keyed(results)


def remember(report: str, work: StepWork) -> None:
  """Keeps what a compile report says, so that estimates give it instead of their own.

  Args:
    report: the text; of a pipeline, or without a time, nothing is kept.
    work: of the step that it is about.
  """
  if not _TITLE.search(report) or not _TIME.search(report):
    return
  steps = [dataclasses.asdict(step) for step in read_report(report, work)]
  content = json.dumps(steps, indent=1)
  name = hashlib.sha256(content.encode()).hexdigest()[:16]
  # A user's folder that cannot be written is no reason to fail after minutes of compiling.
  with contextlib.suppress(OSError):
    write_whole(remembered_steps() / f"{name}-{_code()}.json", content + "\n")
  _remembered.cache_clear()


@functools.cache
def _code() -> str:
  """Returns a hash of the code that makes a step: another step takes another time."""
  package = pathlib.Path(__file__).parent.parent
  files = (file for part in _CODE for file in sorted((package / part).rglob("*.py")))
  result = hashlib.sha256(b"".join(file.read_bytes() for file in files))
  return result.hexdigest()[:8]


def named(report: str) -> tuple[str, int]:
  """Returns the model and the tokens of a row that a compile report is about.

  Raises:
    UserError: it is none of a slice or of GPUs without a pipeline.
  """
  title = _TITLE.search(report)
  if title is None:
    raise UserError(_NO_REPORT)
  return title["model"], int(title["length"].replace(",", ""))


def read_report(text: str, work: StepWork) -> list[CompiledStep]:
  """Reads the steps in a compile report, which may have several, and those in the table of
  micro_batch_size=explore that stands before it, of which only times and peaks are known.

  Args:
    work: of the steps that it is about, for their digest.

  Raises:
    UserError: it has none with a time on a slice or GPUs without a pipeline.
  """
  starts = [result.start() for result in _TITLE.finditer(text)]
  steps = [_step(text[a:b], work) for a, b in itertools.pairwise([*starts, len(text)])]
  if not steps:
    raise UserError(_NO_REPORT)
  return [*_explored(text[: starts[0]], steps[0]), *steps]


def _explored(table: str, step: CompiledStep) -> Iterator[CompiledStep]:
  """Yields the rows of a table of explore, of which `step` is one."""
  for row in _EXPLORED.finditer(table):
    remat = _remat(row["remat"]) if row["remat"] else step.remat
    if remat is None or (row["size"], remat) == (step.per_device, step.remat):
      continue
    seconds = (float(row["step"]) - step.rest_seconds) / int(row["count"].replace(",", ""))
    yield dataclasses.replace(
      step,
      per_device=row["size"],
      remat=remat,
      microbatch_seconds=seconds,
      parts={},
      peak_bytes=round(GIB * float(row["peak"])),
    )


def _step(text: str, work: StepWork) -> CompiledStep:
  title, time = _TITLE.match(text), _TIME.search(text)
  shape = _SHAPE.search(text)
  chip = chip_for(title["kind"]) if title else None
  remat = _remat(title["remat"]) if title else None
  if title is None or time is None or shape is None or chip is None or remat is None:
    raise UserError(f"this compile report has no time: {text[:100]}")
  links = _LINKS.findall(text)
  where = text.partition("Where a step's time goes (estimate)\n")[2].partition("\n\n")[0]
  result = re.findall(r"^ +(\w+) +(\S+) s +[\d.]+%", where, re.M)
  parts = {name: float(seconds) for name, seconds in result}
  # The report's parts are of the whole step; what is outside of the loop is the optimizer's and other's.
  rest = float(time["rest"])
  num_microbatches = _number(r"of which a step has (\S+)", text)
  parts["other"] = parts.get("other", 0.0) - max(0.0, rest - parts.pop("optimizer", 0.0))
  return CompiledStep(
    work=work_digest(work),
    model_name=title["model"],
    generation=chip.generation,
    data=int(title["data"]),
    fsdp=int(title["fsdp"]),
    context=int(title["context"] or 1),
    tensor=int(title["tensor"]),
    length=int(title["length"].replace(",", "")),
    compute_bytes=4 if title["dtype"] == "float32" else 2,
    remat=remat,
    per_device=shape["size"],
    microbatch_seconds=float(time["each"]),
    rest_seconds=rest,
    waits=sum(float(s) for _, how, s in links if how == "work waits"),
    parts={part: seconds / num_microbatches for part, seconds in parts.items()},
    state_bytes=round(GIB * sum(_gib(name, text) for name in _STATE)),
    peak_bytes=round(GIB * _gib("peak", text)),
  )


def _remat(name: str) -> RematPolicy | None:
  """Returns the policy, if it is one that estimates know."""
  return next((policy for policy in _POLICIES if policy == name), None)


def _gib(name: str, text: str) -> float:
  """Returns a size of the report, in GiB."""
  in_mib = re.search(rf"\n  {name} +\S+ MiB", text)
  return _number(rf"\n  {name} +(\S+) [GM]iB", text) / (1024 if in_mib else 1)


def _number(pattern: str, text: str) -> float:
  result = re.search(pattern, text)
  if result is None:
    raise UserError(f"this compile report has nothing like {pattern.strip()!r}: {text[:100]}")
  return float(result[1].replace(",", ""))
