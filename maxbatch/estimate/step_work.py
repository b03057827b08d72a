"""What one microbatch and one update ask of a device, counted from the model's keys: no program needed.

The counts are those of the step that this package compiles: which products a remat policy computes
again, how often a weight is gathered, in how many tiles the loss is formed. step_roofline.py turns
them into seconds, and `scripts/fit_step_rates.py` finds the rates for that.

M tokens of a microbatch that a data-parallel group's devices share, L layers, D width, F width of the
feed-forward layer, N query and K key/value heads of H, V vocabulary, T tokens of a row.
"""

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from maxbatch.config.keys.model import hidden_width, idle_parameters, mixture_share
from maxbatch.config.schema import (
  Config,
  ModelConfig,
  attention_matrices,
  attention_width,
  query_dim,
)
from maxbatch.core.topology import Topology
from maxbatch.estimate.attention_kernels import Heads, layer_seconds
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.flops import tokens_seen
from maxbatch.hugging_face.model_keys import layer_types
from maxbatch.precision.formats import FORMATS, compute_format

RematPolicy = Literal["none", "minimal", "full"]
Part = Literal["attention", "mlp", "norm", "head", "embedding", "other"]

_REGISTER = 1024
"""Elements of a TPU's vector register, 8 × 128: what one vector instruction works on."""
_LANES = 128
_SMALLEST_TILE = 64 * 2**20
"""Bytes of logits that a tile of the loss has at least, where there are so many (training/tiles.py)."""
_LARGEST_KEPT, _SMALLEST_ON_GPU, _LARGEST_ON_GPU = 512, 4096, 2**30
"""Tokens that it has at most where gradients are kept, and at least on GPUs; bytes that it has there at most."""


@dataclasses.dataclass(frozen=True)
class StepWork:
  """A model and how it is trained, as far as the work of a step depends on it."""

  model: ModelConfig
  length: int
  """Tokens of a row: max_target_length."""
  compute_bytes: int = 2
  """Bytes of a number in the computation: 2 in bfloat16."""
  weight_bytes: int = 4
  """Bytes of a stored weight."""
  optimizer_bytes: int = 8
  """Bytes of the optimizer's state for one parameter: 8 for Adam's two moments in float32."""
  quantization: str = "none"
  """Of the products of projections: none, fp8 or int8."""

  @property
  def layer_matrix(self) -> Mapping[str, tuple[tuple[float, float], ...]]:
    """The matrices of a layer that a token meets by part, each (in, out), its experts' side by side."""
    c = self.model
    D, F = c.base_emb_dim, hidden_width(c)
    up = 1 if c.mlp_activation == "gelu" else 2
    router = ((D, mixture_share(c) * c.num_experts),) if c.num_experts > 1 else ()
    return {
      "attention": attention_matrices(c),
      "mlp": (*router, *((D, F),) * up, (F, D)),
    }

  @property
  def layer_parameters(self) -> float:
    """Parameters of the matrices of one layer; where layers differ, on average."""
    met = sum(math.prod(one) for part in self.layer_matrix.values() for one in part)
    return met + idle_parameters(self.model)

  @property
  def table_parameters(self) -> int:
    """Parameters of the embedding, or of the output matrix."""
    return self.model.vocab_size * self.model.base_emb_dim

  @property
  def parameters(self) -> int:
    """All parameters, without norms and biases, which are some 10⁻⁴ of them."""
    c = self.model
    tables = 1 if c.logits_via_embedding else 2
    learned = c.max_position_embeddings if c.position_embedding == "learned" else 0
    positions = max(learned, 0) * c.base_emb_dim
    of_layers = round(c.base_num_decoder_layers * self.layer_parameters)
    return of_layers + tables * self.table_parameters + positions

  @property
  def windows(self) -> Mapping[int, int]:
    """Number of layers by their window in tokens; 0: no window."""
    c, L = self.model, self.model.base_num_decoder_layers
    kinds = layer_types(c.layer_types, L) or ("sliding_attention",) * L
    sliding = kinds.count("sliding_attention") if c.sliding_window_size else 0
    return {c.sliding_window_size: sliding, 0: L - sliding} if sliding else {0: L}

  @property
  def model_flops_per_token(self) -> float:
    """FLOPs as utilisations count them: forward and backward, nothing computed twice, the causal
    half."""
    c = self.model
    met = self.layer_parameters - idle_parameters(c)
    matrices = c.base_num_decoder_layers * met + self.table_parameters
    seen = sum(n * tokens_seen(window, self.length) for window, n in self.windows.items())
    return 6.0 * matrices + 12.0 * attention_width(c) * seen

  def keeps_gradients(self, tokens: float) -> bool:
    """Returns whether the gradient of the logits is kept and multiplied once, after the last tile."""
    return tokens * self.compute_bytes <= 4 * self.model.base_emb_dim

  def tiles(self, tokens: float, ways: int, *, is_gpu: bool) -> int:
    """Returns the number of tiles in which the loss is formed, of a microbatch's `tokens` on one group of
    devices, of which `ways` share the vocabulary."""
    if self.model.num_vocab_tiling:
      return self.model.num_vocab_tiling
    of_token, largest = (size / ways * 4 for size in (self.model.vocab_size, self.table_parameters))
    if self.keeps_gradients(tokens):
      largest = min(largest / 4, of_token * _LARGEST_KEPT)
    if is_gpu:
      largest = min(max(largest, of_token * _SMALLEST_ON_GPU), _LARGEST_ON_GPU)
    wanted = min(self.length, math.ceil(tokens * of_token / max(largest, _SMALLEST_TILE)))
    equal = next(n for n in range(wanted, self.length + 1) if self.length % n == 0)
    return equal if equal <= 2 * wanted else wanted


def step_work(config: Config) -> StepWork:
  """Returns the work that a configuration describes."""
  precision, optimizer = config.precision, config.optimizer
  first = FORMATS[optimizer.mu_dtype].bytes
  kept = {"sgd": first, "muon": first, "adafactor": 0}
  return StepWork(
    model=config.model,
    length=config.batch.max_target_length,
    compute_bytes=compute_format(precision).bytes,
    weight_bytes=FORMATS[precision.weight_dtype].bytes,
    optimizer_bytes=kept.get(optimizer.opt_type, first + 4),
    quantization=precision.quantization,
  )


def weight_shards(work: StepWork, mesh: Topology) -> tuple[int, int]:
  """Returns the devices along fsdp, expert and context, and along tensor, that divide the weights.

  A width that fsdp does not divide evenly is not divided at all: each device then has it whole.
  """
  groups, tensor = mesh.weight_groups, mesh.shape["tensor"]
  return groups if work.model.base_emb_dim % groups == 0 else 1, tensor


def residual_bytes(work: StepWork, chip: Chip, ways: int, remat: RematPolicy) -> float:
  """Returns bytes that are kept for each token in each layer until the backward pass, of `ways` devices that
  share a layer; `remat`: what is computed again instead."""
  c, size = work.model, work.compute_bytes
  queries, keys = (
    c.base_num_query_heads * query_dim(c) / ways,
    c.base_num_kv_heads * query_dim(c) / ways,
  )
  D = c.base_emb_dim
  if remat == "full":
    return D * size
  # What the layer is given, queries, keys, values, what its halves add, and the hidden layer.
  products = (3 * D + queries + 2 * keys) * size + hidden_residual_bytes(work, chip, ways, remat)
  if remat == "minimal":
    return products
  norms = 2 * c.use_pre_norm + c.use_post_attn_norm + c.use_post_ffw_norm
  # Three float32 numbers of each that is normalized, four with a mean; the kernel's output.
  normalized = norms * D + (queries + keys if c.use_qk_norm else 0)
  kept = (4 if c.normalization == "layernorm" else 3) * 4 * normalized
  # Of each of the two dropouts what was drawn, and what it keeps.
  drawn = 2 * 5 * D if c.dropout_rate else 0
  return products + kept + drawn + queries * size


def hidden_residual_bytes(work: StepWork, chip: Chip, ways: int, remat: RematPolicy) -> float:
  """Returns how much of `residual_bytes` the feed-forward's hidden layer has; with `none` also what
  its activation is made of: of GELU on GPUs, nothing more (models/forms.py)."""
  if remat == "full":
    return 0.0
  copies = (1, 4) if work.model.mlp_activation == "gelu" else (2, 5)
  if chip.is_gpu and work.model.mlp_activation in ("gelu", "geglu"):
    copies = (1, 2) if work.model.mlp_activation == "gelu" else (2, 4)
  return copies[remat == "none"] * hidden_width(work.model) / ways * work.compute_bytes


@dataclasses.dataclass(frozen=True)
class PartWork:
  """What one part of the model asks of a device in one microbatch."""

  products: float = 0.0
  """FLOPs of matrix products as the matrix unit does them: narrow dimensions fill it up. In eight bits as many
  as there are in bfloat16 in the same time."""
  kernels: float = 0.0
  """Of attention kernels, as many as fit in their time at the peak."""
  weights: float = 0.0
  """Bytes of weights that the products read, however few the tokens."""
  registers: dict[str, float] = dataclasses.field(default_factory=dict)
  """Vector registers of elementwise work and of changes of layout, by what they hold; of GPUs passes."""
  traffic: dict[str, float] = dataclasses.field(default_factory=dict)
  """Bytes that such work may move through main memory, likewise, each once."""


def microbatch_work(
  work: StepWork, chip: Chip, mesh: Topology, per_device: Fraction, remat: RematPolicy
) -> dict[Part, PartWork]:
  """Returns what each part of the model asks of one device in one microbatch of `per_device` samples.

  Args:
    chip: the device, for the width of its matrix unit.
    remat: what the backward pass computes again.
  """
  ways = mesh.shape["tensor"]
  layers = _LayersWork(work, chip, float(per_device * ways * work.length), ways, remat)
  parts: dict[Part, PartWork] = {
    "attention": layers.attention(),
    "mlp": layers.mlp(),
    "norm": layers.norm(),
    "head": _head(work, chip, layers.tokens, ways),
    "embedding": PartWork(traffic={"table": work.table_parameters / ways * 4}),
    "other": layers.other(casts_all=weight_shards(work, mesh)[0] == 1),
  }
  return {one[0]: _on_gpu(*one, layers) for one in parts.items()} if chip.is_gpu else parts


def _on_gpu(part: Part, one: PartWork, layers: "_LayersWork") -> PartWork:
  """Returns the work of a part without vector registers, as GPUs compute such work while it moves; but each
  kernel takes a while to start."""
  starts = {f"{part} of a layer": layers.passes} if part in ("attention", "mlp", "norm") else {}
  return dataclasses.replace(one, registers=starts)


@dataclasses.dataclass(frozen=True)
class _LayersWork:
  """The work of all layers by part, for M tokens that `ways` devices share."""

  work: StepWork
  chip: Chip
  tokens: float
  ways: int
  remat: RematPolicy

  def attention(self) -> PartWork:
    """Returns the work of attention, its matrices and kernels."""
    c, L, M = self.work.model, self.work.model.base_num_decoder_layers, self.tokens
    rotated = self._heads if c.position_embedding == "rope" else 0
    result = self._elementwise(
      ("heads", 2 * self._heads * self._fill), ("rope", rotated * self._fill)
    )
    # On TPUs halves of heads change places in a product with a constant matrix (models/forms.py).
    width = 0 if self.chip.is_gpu else self.chip.padded(query_dim(c))
    turns = (3 if self.remat == "full" else 2) * L * 2 * M * rotated * width
    products = turns * width / query_dim(c)
    kernels = _kernels(self.work, self.chip, M, self.ways, again=self.remat != "none")
    result = dataclasses.replace(result, products=products, kernels=kernels)
    return self._with_products("attention", result)

  def mlp(self) -> PartWork:
    """Returns the work of the feed-forward layers."""
    c, L, F = self.work.model, self.work.model.base_num_decoder_layers, self._hidden
    gate = 0 if c.mlp_activation == "gelu" else 1
    activation = "silu" if c.mlp_activation == "swiglu" else "gelu"
    result = self._elementwise(("hidden", gate * F), (activation, F))
    if kept := hidden_residual_bytes(self.work, self.chip, self.ways, self.remat):
      result.traffic["kept hidden"] = 2 * L * self.tokens * kept
    return self._with_products("mlp", result)

  def norm(self) -> PartWork:
    """Returns the work of the normalization layers."""
    c = self.work.model
    norms = 2 * c.use_pre_norm + c.use_post_attn_norm + c.use_post_ffw_norm
    kind = "layernorm" if c.normalization == "layernorm" else "rmsnorm"
    width = norms * c.base_emb_dim + (self._heads if c.use_qk_norm else 0)
    return self._elementwise((kind, width))

  def other(self, *, casts_all: bool) -> PartWork:
    """Returns the work of the residual stream, dropout, what is kept, and weights, of which a device
    casts all or its own part."""
    work, c, M, ways = self.work, self.work.model, self.tokens, self.ways
    L, D = c.base_num_decoder_layers, c.base_emb_dim
    result = self._elementwise(("residual", D), ("dropout", 2 * D if c.dropout_rate else 0))
    if self.remat != "full" and query_dim(c) % _LANES:
      # Heads narrower than a register change their layout where they are kept, and where they are computed
      # on with again.
      kept = (c.base_num_query_heads + 2 * c.base_num_kv_heads) * query_dim(c) / ways * self._fill
      times = 2 if self.remat == "minimal" else 1
      result.registers["kept heads"] = times * L * M * kept / _REGISTER
    # Written by the forward, read by the backward pass.
    hidden = hidden_residual_bytes(work, self.chip, ways, self.remat)
    result.traffic["residuals"] = (
      2 * L * M * (residual_bytes(work, self.chip, ways, self.remat) - hidden)
    )
    if casts_all:
      result.traffic["weights"] = 2 * L * work.layer_parameters / ways * work.compute_bytes
    return result

  @property
  def passes(self) -> float:
    """Passes over a layer, of all layers: forward, backward twice, and again."""
    return (3 if self.remat == "none" else 4) * float(self.work.model.base_num_decoder_layers)

  @property
  def _heads(self) -> float:
    c = self.work.model
    return (c.base_num_query_heads + c.base_num_kv_heads) * query_dim(c) / self.ways

  @property
  def _hidden(self) -> float:
    return hidden_width(self.work.model) / self.ways

  @property
  def _fill(self) -> float:
    """Registers that heads take, which are dims of their own, over those that their numbers would."""
    width = query_dim(self.work.model)
    return 1.0 if self.chip.is_gpu else -(-width // _LANES) * _LANES / width

  def _elementwise(self, *kinds: tuple[str, float]) -> PartWork:
    """Returns the work of so many numbers for each token in each layer and pass."""
    each = self.passes * self.tokens
    counts = {kind: each * width / _REGISTER for kind, width in kinds if width}
    moved = {kind: count * _REGISTER * self.work.compute_bytes for kind, count in counts.items()}
    return PartWork(registers=counts, traffic=moved)

  def _with_products(self, part: str, beside: PartWork) -> PartWork:
    """Returns the work with the products of a part's matrices."""
    work, L, pad = self.work, self.work.model.base_num_decoder_layers, self.chip.padded
    shapes = list(zip(_passes(work, part, self.remat), work.layer_matrix[part], strict=True))
    share, wide = 1.0, 0
    known = self.chip.eight_bits.get(work.quantization)
    if known and (part == "attention" or work.model.num_experts <= 1):
      rounded = sum(((t - 2) * a + b) * self.tokens + (t - 1) * a * b for t, (a, b) in shapes)
      beside.traffic["rounded"] = L * rounded / self.ways * (work.compute_bytes + 1)
      # In int8 the gradient of the weights stays in bfloat16.
      share, wide = known, int(work.quantization == "int8")
    padded = sum((wide + share * (t - wide)) * pad(a) * pad(b) for t, (a, b) in shapes)
    # Of the experts some token meets each.
    idle = 3 * idle_parameters(work.model) if part == "mlp" else 0
    read = (sum(times * a * b for times, (a, b) in shapes) + idle) * work.compute_bytes
    multiplied = beside.products + L * 2 * self.tokens * padded / self.ways
    return dataclasses.replace(beside, products=multiplied, weights=L * read / self.ways)


def _passes(work: StepWork, part: str, remat: RematPolicy) -> list[int]:
  """Returns how often each matrix of a part of a layer is multiplied: forward, backward by
  activations and by weights, and again. What a layer ends with is needed again only by a norm
  behind it."""
  each = [4 if remat == "full" else 3] * len(work.layer_matrix[part])
  if part == "mlp" and not work.model.use_post_ffw_norm:
    each[-1] = 3
  return each


def _head(work: StepWork, chip: Chip, M: float, ways: int) -> PartWork:
  """Returns the work of the output matrix and of the loss with its gradients, in tiles of tokens."""
  D, V = work.model.base_emb_dim, work.model.vocab_size
  return PartWork(
    products=3 * 2 * M * chip.padded(D) * chip.padded(V) / ways,
    registers={"logits": M * V / ways / _REGISTER},
    traffic={"logits": M * V / ways * 4, "tiles": _tile_bytes(work, chip, M, ways)},
  )


def _tile_bytes(work: StepWork, chip: Chip, M: float, ways: int) -> float:
  """Returns the bytes that the loss reads and writes because it is formed in tiles."""
  tiles = work.tiles(M, ways, is_gpu=chip.is_gpu)
  table = work.table_parameters / ways
  if tiles > 1 and work.keeps_gradients(M):
    # Each tile reads the matrix and writes its logits' gradient; in the end both are read, and the
    # gradient of the matrix is written.
    kept = M * work.model.vocab_size / ways * work.compute_bytes
    return (tiles + 1) * table * work.compute_bytes + 3 * kept + 4 * table
  # Each tile reads the matrix twice, and reads and writes the sum of its gradient in float32.
  return tiles * table * (2 * work.compute_bytes + 8)


def _kernels(work: StepWork, chip: Chip, M: float, ways: int, *, again: bool) -> float:
  """Returns FLOPs of the attention kernels of all layers, as many as fit in their time at the peak."""
  c, length = work.model, -(-work.length // 128) * 128
  samples = M / length
  heads = samples * c.base_num_query_heads / ways
  # One alone goes through them as two, each with half of the heads (models/splash.py).
  samples = samples if c.base_num_kv_heads / ways % 2 else max(samples, 2.0)
  of = Heads(query_dim(c), work.compute_bytes, heads, samples)
  seconds = (
    layers * layer_seconds(chip, length, window, of, again=again)
    for window, layers in work.windows.items()
  )
  return chip.peak_flops * sum(seconds)
