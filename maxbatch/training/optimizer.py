"""The optimizer: a registered update rule inside the core's optax.MultiSteps (core/train_step.py).

Update rules are built with learning rate 1 and scaled afterwards by the rate of the step, which is
a function of the position in the run and comes in as an argument. Add a rule by writing a function
and registering it in OPTIMIZERS.

Where the optimizer's state lies: divided over the devices as the parameters it belongs to are.

A leaf of the state belongs to the parameter whose path stands in its own, and each of its dims of
a size that the parameter has too is divided as that dim of the parameter is: moments of the
parameter's shape, Adafactor's rows and columns, which lack a dim, Shampoo's square matrices.
"""

import dataclasses
import difflib
import fnmatch
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from maxbatch.config.registry import registered
from maxbatch.config.schema import OptimizerConfig
from maxbatch.core.train_step import StepOptimizer, step_optimizer
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes, sharding, with_data
from maxbatch.precision.policy import Policy, stochastically_updated

Path = tuple[str, ...]

_LARGEST_SHARE = 0.01
"""Share of its parameter's bytes that a leaf may have and still be whole on every device."""
_ALWAYS_ALLOWED_BYTES = 2**16
"""Bytes of counters, coefficients and small models."""


def parameter_of(path: Sequence[Any], parameters: Collection[Path]) -> Path | None:
  """Returns the path of the parameter that a leaf of the state belongs to; None if there is none.

  Args:
    path: jax's path of the leaf, whose keys of dictionaries count.
  """
  names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
  for length in range(len(names), 0, -1):
    for start in range(len(names) - length + 1):
      if names[start : start + length] in parameters:
        return names[start : start + length]
  return None


def shared_axes(shape: Sequence[int], of: Sequence[int], axes: LogicalAxes) -> LogicalAxes:
  """Returns the logical axes of a leaf's dims: those of the parameter's dims of the same sizes.

  Args:
    shape: of the leaf.
    of: the parameter's shape.
    axes: the parameter's logical axes; each names one dim at most, in the parameter's order.
  """
  left, last, names = list(range(len(of))), -1, []
  for size in shape:
    same = [dim for dim in left if of[dim] == size]
    if not same:
      names.append(None)
      continue
    last = next((dim for dim in same if dim > last), same[0])
    left.remove(last)
    names.append(axes[last])
  return tuple(names)


def place_optimizer_state(
  state: Any,
  params: Any,
  axes: Mapping[Path, LogicalAxes],
  mesh: Mesh,
  *,
  over_data: bool = False,
) -> Any:
  """Returns shape, dtype and sharding of every leaf of the optimizer's state.

  Args:
    state: shapes of the state.
    params: shapes of the parameters that train.
    axes: logical axes of every parameter by its path.
    over_data: whether its leaves are divided over the replicas too, where these divide them evenly.

  Raises:
    UserError: the parameters are divided, but a large leaf has no dim by which it could be.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  shapes = {tuple(entry.key for entry in path): leaf for path, leaf in leaves}
  divided = {
    path: leaf
    for path, leaf in shapes.items()
    if not sharding(axes[path], leaf.shape, mesh).is_fully_replicated
  }

  def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    owner, names = parameter_of(path, shapes), (None,) * leaf.ndim
    if owner:
      names = shared_axes(leaf.shape, shapes[owner].shape, axes[owner])
    where = sharding(names, leaf.shape, mesh)
    if where.is_fully_replicated:
      _check_size(path, leaf, owner, divided)
    if over_data and owner and is_matrix(axes[owner]):
      where = with_data(where, leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return jax.tree_util.tree_map_with_path(place, state)


def is_matrix(axes: LogicalAxes) -> bool:
  """Returns whether a parameter has more than a vector for each layer: what replicas divide, as a message of
  its own for every norm's scale takes longer than all of them save."""
  return sum(axis != "layers" for axis in axes) > 1


def _check_size(
  path: Sequence[Any], leaf: Any, owner: Path | None, divided: Mapping[Path, Any]
) -> None:
  """Refuses a leaf that every device would hold whole, unless it is small beside its parameter, or
  that one is whole on every device too."""
  owners = [shape for name, shape in divided.items() if owner in (name, None)]
  size, largest = _bytes(leaf), _LARGEST_SHARE * sum(map(_bytes, owners))
  if not owners or size <= max(largest, _ALWAYS_ALLOWED_BYTES):
    return
  reason = (
    f"of the dims of {'/'.join(owner)}, {owners[0].shape}, that the mesh divides it has none"
    if owner
    else "its path does not end with a parameter's"
  )
  raise UserError(
    f"optimizer state {jax.tree_util.keystr(tuple(path), simple=True, separator='/')} of shape "
    f"{leaf.shape}: {reason}, so every device would hold all of its {size / 2**20:,.1f} MiB. State of "
    f"more than {_LARGEST_SHARE:.0%} of its parameter must be divided as the parameter is: keep it in a "
    "tree like the parameters', with dims of theirs, or use ici_fsdp_parallelism=1 "
    "ici_tensor_parallelism=1"
  )


def _bytes(leaf: Any) -> int:
  return leaf.size * leaf.dtype.itemsize


Axes = Mapping[tuple[str, ...], LogicalAxes]

_UNDECAYED = ("scale", "bias", "logit_bias", "sink")
_BATCH_AXES = ("layers", "expert")
"""Leading logical axes of a stack of kernels."""
_MUON_RMS = 0.2
"""Root mean square of Muon's update that lets it share AdamW's learning rates (Liu et al. 2025)."""


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
  """Multiplies updates by the extra argument `learning_rate`."""

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    del params
    return jax.tree.map(lambda u: u * extra["learning_rate"], updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def adamw(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Returns AdamW (Loshchilov & Hutter 2019)."""
  del axes
  return optax.adamw(
    1.0,
    b1=config.adam_b1,
    b2=config.adam_b2,
    eps=config.adam_eps,
    weight_decay=config.adam_weight_decay,
    mask=_decayed,
    mu_dtype=config.mu_dtype,
  )


def sgd(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Returns gradient descent with momentum."""
  del axes
  return optax.sgd(1.0, config.sgd_momentum or None, accumulator_dtype=config.mu_dtype)


def adafactor(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Returns Adafactor (Shazeer & Stern 2018): a row and a column of second moments per matrix."""
  del axes, config
  return optax.adafactor(1.0)


def muon(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Returns Muon (Jordan et al. 2024) for the layers' matrices, AdamW for everything else.

  Masks rather than optax.contrib.muon, whose other half is NAdam without weight decay, and
  whose state lies under other paths than the parameters, by which both are laid on the devices.
  LoRA's matrices are no kernels: what Muon would be for the factors of a product is not settled.

  Raises:
    UserError: no kernel trains.
  """
  dims = {path: _matrix_dims(path, names) for path, names in axes.items()}
  if not any(dims.values()):
    raise UserError(
      "opt_type=muon orthogonalizes the updates of the layers' matrices, and none of them trains with "
      "these lora_rank and trainable: adapters and all else would be trained by AdamW; for example "
      "opt_type=adamw"
    )

  def of_each(params: Any) -> Any:
    return _map_by_path(lambda path: dims[path], params)

  def in_kernels(params: Any) -> Any:
    return _map_by_path(lambda path: dims[path] is not None, params)

  def elsewhere(params: Any) -> Any:
    return _map_by_path(lambda path: dims[path] is None, params)

  kernels = optax.chain(
    optax.contrib.scale_by_muon(
      weight_dimension_numbers=of_each, mu_dtype=jnp.dtype(config.mu_dtype)
    ),
    _scale_to_rms(of_each),
    optax.add_decayed_weights(config.adam_weight_decay),
    optax.scale(-1.0),
  )
  others = optax.masked(adamw(config, axes), elsewhere)
  return optax.chain(optax.masked(kernels, in_kernels), others)


def _scale_to_rms(dims_of_each: Callable[[Any], Any]) -> optax.GradientTransformation:
  """Scales orthogonal matrices to a root mean square of _MUON_RMS, whatever their shape."""

  def scale(update: jax.Array, dims: Any) -> jax.Array:
    longer = max(math.prod(update.shape[dim] for dim in side) for side in dims)
    return update * (_MUON_RMS * math.sqrt(longer))

  return optax.stateless(lambda updates, _: jax.tree.map(scale, updates, dims_of_each(updates)))


def _matrix_dims(
  path: tuple[str, ...], axes: LogicalAxes
) -> optax.contrib.MuonDimensionNumbers | None:
  """Returns the dims of a kernel's input and of its output; None for what is not a matrix.

  The dims before them are a batch of matrices, each with an update of its own.
  """
  first = len(list(itertools.takewhile(lambda axis: axis in _BATCH_AXES, axes)))
  dims = tuple(range(first, len(axes)))
  if path[-1] != "kernel" or len(dims) < 2:
    return None
  cut = 1 if axes[first] == "embed" else len(dims) - 1
  return optax.contrib.MuonDimensionNumbers(dims[:cut], dims[cut:])


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Axes], optax.GradientTransformation]] = {
  "adamw": adamw,
  "sgd": sgd,
  "adafactor": adafactor,
  "muon": muon,
}


def _decayed(params: Any) -> Any:
  """Returns True for matrices and tables, False for scales and biases, which decay would harm."""
  return _map_by_path(lambda path: path[-1] not in _UNDECAYED, params)


def _map_by_path(function: Callable[[tuple[str, ...]], Any], params: Any) -> Any:
  """Returns the tree of `function` of each parameter's path."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: function(tuple(entry.key for entry in path)), params
  )


_RATE = {
  field.name: field.default
  for field in dataclasses.fields(OptimizerConfig)
  if field.name.startswith(("learning_rate", "lr_schedule", "warmup_steps", "wsd_decay"))
}
"""Keys of the learning rate, which is an input of the compiled step, and their defaults."""


def without_rate(config: OptimizerConfig) -> OptimizerConfig:
  """Returns what optimizers depend on: those of plug-ins on all keys, the others not on the rate's."""
  is_built_in = config.opt_type in OPTIMIZERS and not config.plugins
  return dataclasses.replace(config, **_RATE) if is_built_in else config


def make_optimizer(
  config: OptimizerConfig, axes: Axes, dispatches: int | optax.Schedule
) -> StepOptimizer:
  """Makes the optimizer of a run, whose updates take the extra argument of `scale_by_given_rate`.

  Args:
    axes: logical axes of every parameter that trains, by its path.
    dispatches: dispatches in a step, each of which hands over one sum of gradients; a number, or a
      function of the number of updates made.

  Raises:
    UserError: for an unknown opt_type, or one without effect on these parameters.
  """
  rule = registered("opt_type", config.opt_type, OPTIMIZERS, config.plugins)
  return step_optimizer(
    _on_float32(rule(config, axes)),
    scale_by_given_rate(),
    clip_norm=config.gradient_clipping_threshold,
    dispatches=dispatches,
    groups=_groups(config, axes) if config.batch_by_group else None,
  )


def _groups(config: OptimizerConfig, axes: Axes) -> tuple[Callable[[Any], Any], Collection[int]]:
  """Returns over how many steps each parameter's gradients accumulate, and all such numbers.

  Raises:
    UserError: a pattern matches no parameter that trains, or one group of several steps is all there
      is.
  """
  names, steps = {"/".join(path): path for path in axes}, dict.fromkeys(axes, 1)
  for pattern, number in config.batch_by_group:
    matching = [path for name, path in names.items() if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
      near = difflib.get_close_matches(pattern, sorted({*names}), 3, 0.0)
      raise UserError(
        f"batch_by_group: {pattern!r} matches no parameter that trains; nearest: {', '.join(near)}. A "
        "pattern is matched against the whole path, and * stands for any letters"
      )
    steps |= dict.fromkeys(matching, number)
  counts = {*steps.values()}
  if counts == {max(counts)} and max(counts) > 1:
    raise UserError(
      f"batch_by_group={[list(one) for one in config.batch_by_group]}: all parameters that train have "
      f"{max(counts)} steps, which is a batch {max(counts)} times as large; for example "
      f"batch_by_group=[] and {max(counts)} times the batch_size"
    )
  return lambda tree: _map_by_path(lambda path: steps[path], tree), sorted(counts)


def _on_float32(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Shows `rule` float32 parameters: some (Adafactor) keep moments in the parameters' dtype."""
  rule = optax.with_extra_args_support(rule)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    return rule.update(updates, state, optax.tree.cast(params, jnp.float32), **extra)

  return optax.GradientTransformationExtraArgs(rule.init, update)


def apply_updates(
  policy: Policy, key: jax.Array, step: jax.typing.ArrayLike, params: Any, updates: Any
) -> Any:
  """Returns the parameters after the updates, rounded to the format that they are kept in.

  Args:
    policy: of the model.
    key: of the run's random numbers.
    step: updates before this one.
    params: the parameters.
    updates: float32.
  """
  if policy.weight_rounding != "stochastic":
    return optax.apply_updates(params, updates)
  # A key that no sample has, and of it one for each update.
  key = jax.random.fold_in(key, np.uint32(2**32 - 1))
  return stochastically_updated(params, updates, jax.random.fold_in(key, step))
