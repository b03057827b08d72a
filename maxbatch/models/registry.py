"""Models by name (`decoder_block`), and a model as a pure function of its parameters.

To add a model: write a class with the methods of `LanguageModel`, and register it in MODELS, or name
it as `decoder_block=module:Class` (docs/extending.md). For the noise scale its modules offer probes
(models/probes.py) as attributes, whether or not anything is measured: `build_model` keeps those that
are asked for and sets the others to None.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh

from maxbatch.config.registry import registered
from maxbatch.config.schema import ModelConfig
from maxbatch.core.terms import Stats, Terms
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes, sharding
from maxbatch.models import transformer
from maxbatch.models.cache import Cache, Decode
from maxbatch.models.float8 import AMAX, with_weights
from maxbatch.models.layers import Buffer, Norm, Outputs, Parameter, Projection, outputs_of
from maxbatch.models.lora import ADAPTER, Path, add_adapters, frozen_paths
from maxbatch.models.probes import Probe, TiedProbe, exponent_probe, probe_of
from maxbatch.precision.policy import PLAIN, Policy

Parameters = dict[str, Any]
"""Nested dicts of arrays, by module and parameter name."""
Probes = Literal["off", "norm", "all", "exponents"]
"""The probes of a model that are kept: none, those of its layers.Norm modules, all; or others, of the
exponents of what its modules give (models/probes.py)."""


class LanguageModel(Protocol):
  """What a model offers."""

  def __call__(self, rows: Rows, keys_B: jax.Array | None) -> jax.Array | Outputs:
    """Returns hidden states (B, T, D), and terms and statistics if it has any.

    keys_B, one random key per row, are there only in training.
    """
    ...

  def output_matrix(self) -> jax.Array:
    """Returns the matrix (D, V) from hidden states to logits, in the hidden states' format."""
    ...


@runtime_checkable
class MeasuredModel(LanguageModel, Protocol):
  """What a model offers in addition for its output matrix to be measured for the noise scale."""

  def output_probe(self) -> jax.Array | TiedProbe | None:
    """Returns that matrix's probe (B, S), once the model was called; None: it is not measured."""
    ...


@runtime_checkable
class LayeredModel(LanguageModel, Protocol):
  """What a model offers whose layers a pipeline can divide: its call in three parts."""

  def embed(self, rows: Rows, keys_B: jax.Array | None) -> jax.Array:
    """Embeds: returns the input of the first layer, (B, T, D)."""
    ...

  def apply_layers(
    self, x_BTD: jax.Array, rows: Rows, keys_B: jax.Array | None, first: jax.Array | int
  ) -> jax.Array | Outputs:
    """Applies the layers bound, the first of which is layer `first` of the model."""
    ...

  def normalize(self, x_BTD: jax.Array) -> jax.Array:
    """Normalizes: returns what the output matrix is applied to, (B, T, D)."""
    ...


@runtime_checkable
class UnevenModel(LayeredModel, Protocol):
  """What a layered model offers in addition if its first layers have other parameters than the rest."""

  def first_layers(self, x_BTD: jax.Array, rows: Rows, keys_B: jax.Array | None) -> jax.Array:
    """Applies these; the stages of a pipeline do where they embed. Their parameters are in `DENSE_LAYERS`."""
    ...


@runtime_checkable
class CachedModel(LanguageModel, Protocol):
  """What a model offers in addition for its texts to be written with a pass over one token each."""

  offers_cache: bool
  """In the class itself: what a subclass adds may need more than its base keeps."""

  def prefill(self, rows: Rows, places: int) -> tuple[jax.Array, Cache]:
    """Returns hidden states (B, T, D) as a call does, and a cache of so many places with these
    tokens in the first."""
    ...

  def decoder(self) -> Decode:
    """Returns a pass over one more token of each row, to be called in a loop over tokens."""
    ...


DENSE_LAYERS = "dense_layers"
"""In parameters: layers, stacked, that come before those that are alike."""
MODELS: Mapping[str, Callable[[nnx.Rngs, ModelConfig, int], Any]] = {
  "transformer": transformer.Transformer,
}
"""By name, what makes a `LanguageModel` of (rngs, config, max_target_length)."""


def offers_cache(model: LanguageModel) -> TypeGuard[CachedModel]:
  """Returns whether a model, as `bind` returns it, keeps what its tokens see of those before."""
  return isinstance(model, CachedModel) and vars(type(model)).get("offers_cache", False)


def takes_any_order(model: LanguageModel) -> bool:
  """Returns whether a model, as `bind` returns it, takes rows whose tokens stand in another order, with
  `Rows.places`; as `offers_cache`, in the class itself."""
  return vars(type(model)).get("takes_any_order", False)


def by_path(
  function: Callable[[tuple[str, ...], jax.Array], Any], parameters: Parameters
) -> Parameters:
  """Returns the tree of `function(path, leaf)` of each leaf."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: function(tuple(entry.key for entry in path), leaf), parameters
  )


@dataclasses.dataclass(frozen=True)
class Probed:
  """A probe of a model: where it is, and which parameters it measures."""

  path: tuple[str, ...]
  num_layers: int
  """Layers it stands for, stacked; 0 for a module that is there once."""
  parameters: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A model split into its structure and its parameters' shapes; holds no arrays."""

  config: ModelConfig
  create: Callable[[jax.Array], tuple[nnx.GraphDef, nnx.State, nnx.State]]
  """Structure, parameters and probes, from a random key: traced once, for its shapes and its values."""
  graph: nnx.GraphDef
  abstract: nnx.State
  abstract_probes: nnx.State
  max_target_length: int
  trainable: tuple[str, ...] = ()
  """The patterns of the parameters that train."""
  policy: Policy = PLAIN
  probes_kept: Probes = "off"

  @functools.cached_property
  def frozen(self) -> frozenset[Path]:
    """The parameters that do not train."""
    return frozen_paths(list(_flat(self.abstract)), self.trainable, self.config)

  @functools.cached_property
  def buffers(self) -> frozenset[Path]:
    """Those that a step writes instead of the optimizer."""
    flat = _flat(self.abstract).items()
    return frozenset(path for path, variable in flat if isinstance(variable, Buffer))

  @functools.cached_property
  def amax_buffers(self) -> frozenset[Path]:
    """Those of them for products in float8."""
    return frozenset(path for path in self.buffers if path[-1] == AMAX)

  def split(self, parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Divides parameters, or trees like them, into those that train and the frozen ones."""
    if not self.frozen:
      return parameters, {}
    flat = flatten_dict(parameters)
    frozen = {path: leaf for path, leaf in flat.items() if path in self.frozen}
    trained = {path: leaf for path, leaf in flat.items() if path not in frozen}
    return unflatten_dict(trained), unflatten_dict(frozen)

  @property
  def has_probes(self) -> bool:
    """Whether anything is measured in it."""
    return bool(jax.tree.leaves(self.abstract_probes))

  def init(self, key: jax.Array) -> Parameters:
    """Makes fresh parameters; run it under jit with shardings, so that no device holds them all."""
    return nnx.to_pure_dict(self.create(key)[1])

  def bind(self, parameters: Parameters, probes: Parameters | None = None) -> LanguageModel:
    """Returns the model with these parameters, to be called; probes to differentiate by them."""
    state = jax.tree.map(lambda leaf: leaf, self.abstract)
    nnx.replace_by_pure_dict(state, with_weights(parameters, self.amax_buffers))
    measured = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_probes)
    if probes is not None:
      nnx.replace_by_pure_dict(measured, probes)
    return nnx.merge(self.graph, state, measured)

  def probes(self, rows: int, shards: int) -> Parameters:
    """Returns zeros for every probe: (B, S), with a leading L in stacked layers."""
    abstract = nnx.to_pure_dict(self.abstract_probes)
    return jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, rows, shards)), abstract)

  def probed(self) -> tuple[Probed, ...]:
    """Returns every probe, in the order of the leaves of `probes`."""
    there = self.axes()
    return tuple(
      Probed(path, sum(variable.shape), _measured(path, variable, there))
      for path, variable in sorted(_flat(self.abstract_probes).items())
    )

  def shapes(self) -> Parameters:
    """Returns shape and dtype of every parameter."""
    return nnx.to_pure_dict(self.abstract)

  @functools.cached_property
  def own_sums(self) -> tuple[Terms, Stats]:
    """Shapes of the terms and statistics that it returns beside hidden states, if it has any."""
    row = jax.ShapeDtypeStruct((1, self.max_target_length), np.int32)
    weights = jax.ShapeDtypeStruct(row.shape, np.float32)
    rows = Rows(row, row, weights, jax.ShapeDtypeStruct((1,), np.int32))  # pyright: ignore[reportArgumentType]

    def handed_out(parameters: Parameters, rows: Rows) -> tuple[Terms, Stats]:
      return outputs_of(self.bind(parameters)(rows, None))[1:]

    # One row, which no mesh around this divides.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
      return jax.eval_shape(handed_out, self.shapes(), rows)

  def axes(self) -> dict[tuple[str, ...], LogicalAxes]:
    """Returns every parameter's logical axes by its path; stacked layers have `layers` in front."""
    return {path: _axes(variable) for path, variable in _flat(self.abstract).items()}


def placed(model: Model, mesh: Mesh) -> Parameters:
  """Returns shape and dtype of every parameter, with its place on a mesh."""
  axes = model.axes()

  def place(path: tuple[str, ...], leaf: jax.Array) -> jax.ShapeDtypeStruct:
    where = sharding(axes[path], leaf.shape, mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return by_path(place, model.shapes())


def joined(parameters: Parameters, others: Parameters) -> Parameters:
  """Inverts `Model.split`."""
  if not others:
    return parameters
  return unflatten_dict(flatten_dict(parameters) | flatten_dict(others))


def active_share(config: ModelConfig, axes: LogicalAxes) -> float:
  """Returns the part of a parameter that a token meets: of the experts' matrices those of its own."""
  is_of_experts = "expert" in axes[:-1]
  return config.num_experts_per_tok / config.num_experts if is_of_experts else 1


def num_parameters(model: Model) -> int:
  """Counts the parameters of a model, without what scales of float8 follow from."""
  return sum(one.size for path, one in _flat(model.abstract).items() if path[-1] != AMAX)


def parameter_counts(model: Model) -> str:
  """Says how many parameters there are, and how many of them a token meets, and how many train."""
  trained, _ = model.split(model.shapes())
  counted, axes = f"{num_parameters(model):,} parameters", model.axes()
  if model.config.num_experts > 1:
    shapes = cast(dict[Path, Any], flatten_dict(model.shapes()))
    met = sum(active_share(model.config, axes[path]) * leaf.size for path, leaf in shapes.items())
    counted += f", {round(met):,} of them active for a token"
  if not model.frozen:
    return counted
  return f"{counted}, of which {sum(leaf.size for leaf in jax.tree.leaves(trained)):,} train"


def _flat(state: nnx.State) -> dict[tuple[str, ...], nnx.Variable]:
  return {tuple(str(part) for part in path): leaf for path, leaf in nnx.to_flat_state(state)}


def _measured(
  path: tuple[str, ...], variable: nnx.Variable, there: Container[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
  """Returns the parameters beside a probe that it names, of those that the module has."""
  named = [(*path[:-1], name) for name in variable.get_metadata()["of"]]
  return tuple(each for each in named if each in there)


def _axes(variable: nnx.Variable) -> LogicalAxes:
  axes: LogicalAxes = variable.get_metadata()["axes"]
  return ("layers",) * (variable.ndim - len(axes)) + axes


def model_named(config: ModelConfig) -> Callable[[nnx.Rngs, ModelConfig, int], Any]:
  """Returns what makes the modules that `decoder_block` names. Raises UserError for an unknown name."""
  return registered("decoder_block", config.decoder_block, MODELS, config.plugins)


def build_model(
  config: ModelConfig,
  max_target_length: int,
  probes: Probes = "off",
  trainable: Sequence[str] = (),
  policy: Policy = PLAIN,
) -> Model:
  """Builds the model that `decoder_block` names.

  Args:
    probes: which of its probes are kept, if what they measure trains; others cost nothing.
    trainable: patterns of the parameters that train; none: all, or the adapters.
    policy: in which formats it keeps and computes.

  Raises:
    UserError: for an unknown name, or keys that contradict each other.
  """
  if probes == "all" and config.num_experts > 1:
    raise UserError(
      f"gns=all squares the gradient of each row by every matrix, and by those of num_experts="
      f"{config.num_experts} experts it cannot; for example gns=off gns_from_microbatches=true"
    )
  chosen = model_named(config)
  model = _built(chosen, config, max_target_length, probes, tuple(trainable), policy)
  if probes == "norm" and model.frozen and not model.has_probes:
    raise UserError(
      "gns=norm measures the gradients of the normalization layers, and all of them are frozen by "
      f"trainable={list(trainable)} lora_rank={config.lora_rank}; for example gns=all"
    )
  return model


@functools.lru_cache(8)
def _built(
  chosen: Callable[[nnx.Rngs, ModelConfig, int], Any],
  config: ModelConfig,
  max_target_length: int,
  probes: Probes,
  trainable: tuple[str, ...],
  policy: Policy,
) -> Model:
  @jax.jit
  def create(key: jax.Array) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    rngs = nnx.Rngs(params=key)
    module = chosen(rngs, config, max_target_length)
    add_adapters(module, config, rngs)
    _set_policy(module, policy)
    paths = frozenset(_flat(nnx.state(module, Parameter)))
    frozen = frozen_paths(paths, trainable, config)
    _drop_probes(module, probes, paths - frozen, frozen)
    if probes == "exponents":
      _add_exponent_probes(module)
    structure, parameters, measured = nnx.split(module, Parameter, Probe)
    return structure, parameters, measured

  graph, abstract, measured = jax.eval_shape(create, jax.random.key(0))
  given = max_target_length, trainable, policy, probes
  return Model(config, create, graph, abstract, measured, *given)


def _set_policy(model: nnx.Module, policy: Policy) -> None:
  """Tells all modules with a `policy`, and gives parameters but adapters and buffers their stored dtype."""
  for path, node in nnx.iter_graph(model):
    is_kept = isinstance(node, Parameter) and not isinstance(node, Buffer)
    if is_kept and path[-1] not in ADAPTER:
      node.set_value(node[...].astype(policy.parameters.carrier))
    elif isinstance(node, nnx.Module) and hasattr(type(node), "policy"):
      node.policy = policy  # pyright: ignore[reportAttributeAccessIssue]
      if isinstance(node, Projection):
        node.quantize()


def _add_exponent_probes(model: nnx.Module) -> None:
  """Gives every module that has parameters and an attribute for it a probe of its exponents."""
  for _, module in nnx.iter_modules(model):
    own = [value for value in vars(module).values() if isinstance(value, Parameter)]
    if own and hasattr(type(module), "exponents"):
      layers = own[0].shape[: own[0].ndim - len(own[0].axes)]
      module.exponents = exponent_probe(layers)  # pyright: ignore[reportAttributeAccessIssue]


def _drop_probes(
  model: nnx.Module, kept: Probes, trained: Container[Path], frozen: Container[Path]
) -> None:
  """Replaces the probes that are not kept, or have nothing to measure, by None."""
  for path, module in nnx.iter_modules(model):
    keeps = kept == "all" or (kept == "norm" and isinstance(module, Norm))
    for name, value in [each for each in vars(module).items() if isinstance(each[1], Probe)]:
      of = {each: (*map(str, path), each) for each in value.get_metadata()["of"]}
      measured = [each for each in of if of[each] in trained]
      still = [each for each in of if of[each] in frozen]
      if still or not keeps:
        setattr(module, name, probe_of(value, measured, still) if keeps and measured else None)
