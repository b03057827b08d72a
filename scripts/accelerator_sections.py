"""What scripts/accelerator_check.py measures, a section in a process: device memory is then its own.

    .venv/bin/python scripts/accelerator_sections.py SECTION SIZE [key=value ...]

The last line it prints is JSON: rows of what was checked, the figure, and whether a promise is kept
(null where nothing was promised).
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import benchmark
import check_explore
import gpu_calibration
import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.compile_step import report_or_refusal
from maxbatch.compile.measured_time import measure_step
from maxbatch.compile.program import gib, memory_suggestions
from maxbatch.compile.report import CompileReport
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.core.plan import Position
from maxbatch.data.registry import build_dataset
from maxbatch.errors import UserError
from maxbatch.estimate.chips import CALIBRATION, chip_for
from maxbatch.hardware.devices import Target, find_devices
from maxbatch.models import flash
from maxbatch.models.dot_product import dot_product_attention
from maxbatch.modes.run import run
from maxbatch.training import build
from maxbatch.tuning.candidates import Candidate, candidates
from maxbatch.tuning.microbatch_size import explore_sizes
from maxbatch.tuning.search import Prober, choose_largest

EXACT = 1e-6
"""Relative difference of gradients up to which they are the same in float32."""
EPSILON = float(jnp.finfo(jnp.bfloat16).eps)
"""The same of attention in bfloat16, whose inputs are rounded to half of it."""
COMMON = """dataset_type=synthetic packing=false generate_length=0 enable_checkpointing=false
eval_interval=-1 eval_samples=16 vocab_size=512 steps=100"""
SIZES = {
  "tiny": """base_num_decoder_layers=2 base_emb_dim=32 base_mlp_dim=64 base_num_query_heads=4
  base_num_kv_heads=4 head_dim=8 max_target_length=32""",
  "small": """base_num_decoder_layers=6 base_emb_dim=256 base_mlp_dim=1024 base_num_query_heads=8
  base_num_kv_heads=8 head_dim=32 max_target_length=256""",
  "medium": """base_num_decoder_layers=12 base_emb_dim=768 base_mlp_dim=2048 base_num_query_heads=12
  base_num_kv_heads=12 head_dim=64 max_target_length=1024 vocab_size=32768""",
}
"""Of the model that is timed; medium is as large as GPT-2."""
PER_DEVICE = {"tiny": 2, "small": 4, "medium": 16}
SECONDS = {"tiny": 0.3, "small": 6.0, "medium": 9.0}
"""That each microbatch size is timed for."""
ROUNDS = {"tiny": 1, "small": 3, "medium": 5}
LARGEST_BATCH = {"tiny": 4, "small": 32, "medium": 256}
"""Per device: of the run whose microbatch is chosen."""
GPU_PEAK_FLOPS = {
  "A100": 312e12,
  "H100": 989e12,
  "H200": 989e12,
  "L4": 121e12,
  "L40S": 362e12,
  "B200": 2250e12,
}
"""bfloat16 without sparsity, of NVIDIA's data sheets; H100 as SXM."""


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table."""

  name: str
  figure: str
  kept: bool | None = None
  """Whether a promise is kept; None where there is none."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """How large, and on what."""

  size: str
  keys: tuple[str, ...]

  def named(self, *keys: str, size: str = "") -> list[str]:
    """The model of this size, or of another, with keys on top, as a command takes them."""
    model = SIZES[size or self.size].split()
    merged: dict[str, str] = {}
    for one in (*COMMON.split(), *model, *self.keys, *keys):
      key, _, value = one.partition("=")
      merged[key] = value
    return ["config=base", *(f"{key}={value}" for key, value in merged.items())]

  def config(self, *keys: str, size: str = "") -> Config:
    """The same, loaded."""
    return load_config(self.named(*keys, size=size))

  @property
  def exact_size(self) -> str:
    """Of the model by which gradients are compared: every rounding counts, so none is large."""
    return "tiny" if self.size == "tiny" else "small"


def device(setting: Setting) -> list[Row]:
  """What there is."""
  result = find_devices(setting.config())
  first, count = result.devices[0], len(result.devices)
  peak = peak_flops(first.device_kind)
  limit = memory_stats().get("bytes_limit")
  return [
    Row("devices", f"{count} × {first.device_kind} ({first.platform})"),
    Row("jax", f"{jax.__version__}, Python {sys.version.split()[0]}"),
    Row("memory of a device", gib(limit) if limit else "not reported"),
    Row("peak, bfloat16", f"{peak / 1e12:,.0f} TFLOP/s" if peak else "not known"),
    Row("model that is timed", " ".join(SIZES[setting.size].split())),
  ]


def memory_stats() -> Mapping[str, int]:
  """Of the first device here; empty where it says nothing, as a CPU."""
  return jax.local_devices()[0].memory_stats() or {}


def peak_flops(kind: str) -> float | None:
  """bfloat16 FLOPs per second, where they are published here or with the chips of the estimates."""
  if chip := chip_for(kind):
    return chip.peak_flops
  words = kind.replace("-", " ").split()
  return next((GPU_PEAK_FLOPS[word] for word in words if word in GPU_PEAK_FLOPS), None)


def one_device(config: Config, target: Target) -> Target:
  """The first device alone."""
  return Target(target.devices[:1], topology(config.mesh, 1))


def after_a_step(config: Config, target: Target, *, reverse: bool = False) -> list[np.ndarray]:
  """The parameters after one step of gradient descent so long that nothing but the gradient is left.

  Args:
    reverse: the rows of each microbatch in reverse order: the same sum, in another order.
  """
  plan = plan_batches(config.batch, config.run, target.layout)
  trainer = build.build_trainer(config, plan, target.devices)
  dataset = build_dataset(config.data, config.batch.max_target_length)
  micro_batch = plan.micro_batch_to_train
  step = build.compiled_step(config, plan, trainer, dataset.train, micro_batch)
  microbatches = trainer.microbatches(plan.phases[0].num_microbatches)
  with build.train_rows(config, trainer, dataset)(plan, Position(0, 0)) as loader:
    rows = next(loader)
    if reverse:
      rows = jax.tree.map(lambda x: x[:, ::-1], rows)
    state, _ = step(trainer.init(0), rows, microbatches, np.float32(1e4))
  return [
    np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(trainer.by_layer(state.params)))
  ]


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
  """‖one − other‖ / ‖other‖ over all arrays together, in float64."""
  flat = [np.concatenate([x.ravel().astype(np.float64) for x in each]) for each in (one, other)]
  return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


GRADIENT = ("opt_type=sgd", "sgd_momentum=0", "gradient_clipping_threshold=0", "dropout_rate=0.1")


def splits(setting: Setting) -> list[Row]:
  """The same gradient whatever the split: microbatches, meshes, a pipeline."""
  count = len(find_devices(setting.config()).devices)
  batch = math.lcm(16, count)
  config = functools.partial(
    setting.config, *GRADIENT, f"batch_size={batch}", size=setting.exact_size
  )
  rows, target = [], find_devices(config())
  with jax.default_matmul_precision("highest"):
    whole = config("gradient_accumulation_steps=1")
    place = one_device(whole, target)
    reference = after_a_step(whole, place)
    order = difference(after_a_step(whole, place, reverse=True), reference)
    rows.append(Row("gradient of the same rows in reverse order", f"{order:.1e} off"))
    for name, keys in splits_of(config().model.base_num_query_heads, count, batch).items():
      split = config(*keys)
      place = one_device(split, target) if "one device" in name else find_devices(split)
      off = difference(after_a_step(split, place), reference)
      rows.append(Row(f"gradient of {name}", f"{off:.1e} off, at most {EXACT:g}", off <= EXACT))
  if count == 1:
    rows.append(Row("meshes, pipeline", "not tried: there is one device"))
  return rows


def splits_of(num_heads: int, count: int, batch: int) -> dict[str, tuple[str, ...]]:
  """Ways to divide a step of `batch` samples, by name: their keys."""
  whole = "gradient_accumulation_steps=1"
  results = {
    f"{k} microbatches on one device": (f"gradient_accumulation_steps={k}",) for k in (4, batch)
  }
  if count == 1:
    return results
  results |= {f"data {count}": (whole,), f"fsdp {count}": (whole, f"ici_fsdp_parallelism={count}")}
  if (tensor := math.gcd(num_heads, count)) > 1:
    tensors = f"ici_tensor_parallelism={tensor}"
    results |= {
      f"data {count // tensor}, tensor {tensor}": (tensors, "gradient_accumulation_steps=2")
    }
  if count % 2 == 0:
    stages = ("pipeline_schedule=1f1b", "ici_pipeline_parallelism=2", "num_pipeline_microbatches=2")
    results |= {f"data {count // 2}, 2 pipeline stages": (*stages, whole)}
  return results


def resume(setting: Setting) -> list[Row]:
  """A run that is stopped and resumed ends with the bits of one that is not."""

  def end(name: str, folder: str, steps: int) -> list[np.ndarray]:
    keys = (f"base_output_directory={folder}", f"run_name={name}", f"steps={steps}")
    fixed = ("lr_schedule_type=constant", "warmup_steps=0", "enable_checkpointing=true")
    size = {"size": setting.exact_size}
    with contextlib.redirect_stdout(io.StringIO()):
      state, _ = run(setting.config(*keys, *fixed, "write_report=false", **size), advise=False)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))]

  with tempfile.TemporaryDirectory() as folder:
    whole, again = (end(name, folder, 4) for name in ("whole", "again"))
    end("stopped", folder, 2)
    resumed = end("stopped", folder, 4)
  # A device whose sums depend on the order of its threads does not repeat itself either.
  repeats = difference(again, whole)
  off = difference(resumed, whole)
  return [
    Row("an uninterrupted run, twice", f"{repeats:.1e} apart"),
    Row("stopped after 2 of 4 steps, resumed", f"{off:.1e} off", off <= repeats),
  ]


def attention(setting: Setting) -> list[Row]:
  """The fused kernel against matrix products in float32; their own error in bfloat16 beside it."""
  config = setting.config()
  model, length = config.model, config.batch.max_target_length
  first = find_devices(config).devices[0]
  shape = (2, length, model.base_num_query_heads, model.head_dim)
  if first.platform == "cpu":
    name, kernel = (
      "stand-in for it on a CPU",
      functools.partial(flash.gpu_attention, implementation="xla"),
    )
  else:
    name, kernel = f"kernel of {first.device_kind}", flash.KERNELS[first.platform]
  keys = jax.random.split(jax.random.key(0), 4)
  wide = [jax.random.normal(key, shape).astype(jnp.bfloat16) for key in keys]
  places = jnp.arange(length)
  segments = (places >= length // 3).astype(jnp.int32)[None].repeat(2, 0)
  begins = jnp.where(places >= length // 3, length // 3, 0)[None]
  rows = []
  for words, ids, window in (
    ("causal", None, 0),
    ("segments", segments, 0),
    (f"window of {length // 4}", None, length // 4),
  ):
    see = begins if ids is not None else jnp.zeros_like(begins)
    see = jnp.maximum(see, places[None] - window + 1) if window else see

    def fused(
      q: jax.Array, k: jax.Array, v: jax.Array, ids: Any = ids, window: int = window
    ) -> Any:
      return kernel(q, k, v, ids, window)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, see: jax.Array = see) -> jax.Array:
      return dot_product_attention(q, k, v, see)

    with jax.default_matmul_precision("highest"):
      exact = outputs(plain, [x.astype(jnp.float32) for x in wide])
    off, own = (difference(outputs(way, wide), exact) for way in (fused, plain))
    figure = f"{off:.1e} off, at most {EPSILON:.1e}; matrix products in bfloat16 {own:.1e}"
    rows.append(Row(f"attention, {words}: {name}", figure, off <= EPSILON))
  return rows


def outputs(attend: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> list[np.ndarray]:
  """What attention gives for q, k, v, and the gradients of its product with a fourth array."""
  *qkv, weights = arrays

  def product(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = attend(*qkv)
    return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

  gradients, out = jax.jit(jax.grad(product, argnums=(0, 1, 2), has_aux=True))(*qkv)
  return [np.asarray(x, np.float32) for x in (out, *gradients)]


def timed(setting: Setting, *keys: str) -> CompileReport:
  """The step at the size's own microbatch, compiled and measured."""
  config = setting.config(f"per_device_batch_size={PER_DEVICE[setting.size]}", *keys)
  target = find_devices(config)
  return report_or_refusal(config, target.devices, target.layout)


def speed(setting: Setting) -> list[Row]:
  """Tokens per second and utilisation."""
  rows = []
  for words in ("float32", "bfloat16", "bfloat16 remat_policy=full"):
    precision, *more = words.split()
    report = timed(setting, f"precision={precision}", *more)
    seconds = report.step_seconds
    assert seconds is not None
    speed = report.step_tokens / seconds
    figure = f"{speed:,.0f} tokens/s, {1000 * seconds:,.1f} ms a step"
    count, first = report.plan.topology.num_devices, jax.devices()[0]
    if peak := peak_flops(first.device_kind):
      share = speed * report.model_flops_per_token / (peak * count)
      figure += f", {share:.1%} of the bfloat16 peak"
    rows.append(Row(f"step, {words.replace('remat_policy=', 'remat ')}", figure))
  return rows


def calibrate(setting: Setting) -> list[Row]:
  """Steps of GPUs beside their estimates, which are then scaled to them."""
  devices = jax.devices()
  chip = chip_for(devices[0].device_kind)
  if chip is None or not chip.is_gpu:
    return [Row("estimates for GPUs", "not calibrated: this is no GPU of a known generation")]
  topology, records, rows = f"{chip.generation}-{len(devices)}", [], []
  versions = {"jax": jax.__version__, "device_kind": devices[0].device_kind}
  for form in gpu_calibration.FORMS:
    keys = (
      "precision=bfloat16",
      f"per_device_batch_size={PER_DEVICE[setting.size]}",
      *form.split(),
    )
    seconds = timed(setting, *keys).step_seconds
    assert seconds is not None
    with tempfile.TemporaryDirectory() as out:
      named = setting.named(*keys)
      estimated = gpu_calibration.estimated_seconds(named, topology, pathlib.Path(out))
    name = f"{topology} {' '.join(keys)}"
    records.append(gpu_calibration.record(chip.generation, name, estimated, seconds, versions))
    rows.append(Row(f"step, {name}", f"{seconds:.4g} s, estimated {estimated:.4g} s"))
  factor = gpu_calibration.keep(records, CALIBRATION)
  where = f"{factor:.3g} times the estimates, in {CALIBRATION}"
  return [*rows, Row(f"estimates for {chip.generation}", where)]


def memory(setting: Setting) -> list[Row]:
  """What the compiler said that a step needs, and what the device had in use at most."""
  report = timed(setting, "precision=bfloat16")
  used = memory_stats().get("peak_bytes_in_use")
  if used is None:
    return [Row("memory of a step", f"{gib(report.peak)} predicted; the device reports none")]
  ratio = used / report.peak
  figure = f"{gib(report.peak)} predicted, {gib(used)} used: {ratio:.2f}"
  return [Row("memory of a step", figure)]


def choose(setting: Setting) -> list[Row]:
  """What micro_batch_size=auto and explore take, against trying every size for longer."""
  each = LARGEST_BATCH[setting.size]
  count = len(find_devices(setting.config()).devices)
  batch = f"batch_size={count * each}"
  keys = (batch, "micro_batch_size=explore", "compile_only=true", "precision=bfloat16")
  config = setting.config(*keys)
  target = find_devices(config)
  prober = Prober(config, target.devices, target.layout)
  with contextlib.redirect_stdout(io.StringIO()):
    _, result = explore_sizes(config, target, prober)
  recommended = result.ranked[0].candidate
  sizes = candidates(config.batch, config.run, target.layout)
  auto = choose_largest(sizes, prober, memory_suggestions(config)).chosen.candidate
  speeds = check_explore.speeds(config, prober, SECONDS[setting.size])
  best = max(speeds, key=speeds.__getitem__)
  tried = ", ".join(f"{text(size.per_device)}: {speed:,.1f}" for size, speed in speeds.items())
  rows = [Row("samples/s by microbatch per device", tried)]
  for name, size in (("explore", recommended), ("auto", auto)):
    share = speeds[size] / speeds[best]
    rows.append(Row(f"{name} takes {text(size.per_device)}", f"{share:.1%} of the best speed"))
  return [*rows, *_too_large(config, target, prober, sizes)]


def _too_large(
  config: Config, target: Target, prober: Prober, sizes: Sequence[Candidate]
) -> list[Row]:
  """Whether the smallest size that was said not to fit does run out of memory."""
  refused = [size for size in sizes if size not in prober.reports]
  if not refused or target.devices[0].platform == "cpu":
    return [Row("sizes that do not fit", "none was found" if not refused else "not tried on a CPU")]
  size = refused[0].applied_to(config)
  plan = plan_batches(size.batch, size.run, target.layout)
  trainer = build.build_trainer(size, plan, target.devices)
  source = build_dataset(size.data, size.batch.max_target_length).train
  micro_batch = plan.micro_batch_to_train
  name = f"{text(refused[0].per_device)} per device, said not to fit"
  try:
    step = build.compiled_step(size, plan, trainer, source, micro_batch)
    rows = build.step_rows(plan, trainer, source, micro_batch)
    measure_step(trainer, step, rows, streamed=False, num_microbatches=1, seconds=0.1)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return [Row(name, "runs out of memory")]
  return [Row(name, "runs all the same")]


def loop(setting: Setting) -> list[Row]:
  """The training loop against its step, and that against plain JAX."""
  rows = []
  for precision in ("float32", "bfloat16"):
    keys = (f"per_device_batch_size={PER_DEVICE[setting.size]}", f"precision={precision}")
    bench = benchmark.Bench.configured(setting.config(*keys, "remat_policy=none"))
    bare, plain = (
      benchmark.bare_runner(bench, 1),
      benchmark.plain_runner(bench, precision),
    )
    through = benchmark.loop_runner(bench)
    results: dict[str, list[float]] = {"loop / bare step": [], "bare step / plain JAX": []}
    for number in range(ROUNDS[setting.size] + 1):
      own, other = benchmark.seconds_per_step(bare, 4), benchmark.seconds_per_step(plain, 4)
      whole = through(5)
      own = (own + benchmark.seconds_per_step(bare, 4)) / 2
      if number:  # the first round warms up
        results["loop / bare step"].append(whole / own)
        results["bare step / plain JAX"].append(own / other)
    rows += [
      Row(f"{name}, {precision}, in time", benchmark.spread(each)) for name, each in results.items()
    ]
  return rows


def noise(setting: Setting) -> list[Row]:
  """What measuring the noise scale costs."""
  size = f"per_device_batch_size={PER_DEVICE[setting.size]}"

  def bench(mode: str) -> benchmark.Bench:
    return benchmark.Bench.configured(setting.config(size, "precision=bfloat16", f"gns={mode}"))

  result = benchmark.noise_ratios(bench, ROUNDS[setting.size])
  return [Row(f"step with gns={name}", benchmark.spread(each)) for name, each in result.items()]


SECTIONS: Mapping[str, Callable[[Setting], list[Row]]] = {
  each.__name__: each
  for each in (device, splits, resume, attention, speed, calibrate, memory, choose, loop, noise)
}


def main(arguments: Sequence[str]) -> int:
  """Measures one section; prints its rows."""
  name, size, *keys = arguments
  try:
    platform = find_devices(load_config(["config=base", *keys])).devices[0].platform
    if size == "auto":
      size = "small" if platform == "cpu" else "medium"
    rows = SECTIONS[name](Setting(size, tuple(keys)))
  except UserError as error:
    print(error, file=sys.stderr)
    return 2
  print(json.dumps([dataclasses.asdict(row) for row in rows]))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
