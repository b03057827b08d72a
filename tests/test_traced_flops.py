"""FLOPs of models and of traced steps, counted again by hand.

B rows of a pass, T tokens of a row, L layers, D width, N query heads, K key/value heads, H width of a
head, M width inside the feed-forward, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT2, TINY, config
from support import mesh as simulated

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.traced_flops import StepFlops, model_flops_per_token, step_flops
from maxbatch.config.load import load_config
from maxbatch.data.registry import build_dataset
from maxbatch.hardware.devices import topology_devices
from maxbatch.models import flash, group_kernels
from maxbatch.models.registry import build_model
from maxbatch.training.build import build_trainer, step_rows, traced_step

T, L, D, N, K, H, M, V = 16, 2, 32, 4, 2, 8, 64, 264
B = 16
PROJECTIONS = D * N * H + 2 * D * K * H + N * H * D
GATED, PLAIN = 3 * D * M, 2 * D * M


# --- what a model asks for ------------------------------------------------------------------------


def of_model(**keys: object) -> float:
  return model_flops_per_token(build_model(config(**keys).model, T), T)


def test_the_sizes_here_are_the_models():
  assert (
    TINY["max_target_length"],
    TINY["base_num_decoder_layers"],
    TINY["base_emb_dim"],
    TINY["base_num_query_heads"],
    TINY["base_num_kv_heads"],
    TINY["head_dim"],
    TINY["base_mlp_dim"],
    TINY["vocab_size"],
  ) == (T, L, D, N, K, H, M, V)


# On average a token sees half of the row: 2 products of 2 · N · H for each token seen, times 3.
ATTENTION = 12 * L * N * H * T / 2


def test_a_llama_with_grouped_queries():
  assert of_model() == 6 * (L * (PROJECTIONS + GATED) + D * V) + ATTENTION


def test_without_grouping_there_are_more_key_and_value_weights():
  more = of_model(base_num_kv_heads=N) - of_model()
  assert more == 6 * L * 2 * D * (N - K) * H


def test_a_gpt2_counts_its_shared_table_once_and_no_bias_and_no_position():
  matrices = L * (4 * D * N * H + PLAIN) + D * V
  assert of_model(**GPT2) == 6 * matrices + ATTENTION
  assert of_model(**GPT2 | {"logits_via_embedding": "false"}) == of_model(**GPT2)


@pytest.mark.parametrize("window", [1, 5, T - 1, T, 3 * T])
def test_a_sliding_window_by_counting(window):
  seen = np.mean([min(token + 1, window) for token in range(T)]) - 0.5
  matrices = L * (PROJECTIONS + GATED) + D * V
  expected = 6 * matrices + 12 * L * N * H * seen
  assert of_model(sliding_window_size=window) == pytest.approx(expected)


def test_layers_without_a_window_see_all():
  kinds = "[sliding_attention, full_attention]"
  both = of_model(sliding_window_size=5) + of_model()
  assert of_model(sliding_window_size=5, layer_types=kinds) == pytest.approx(both / 2)
  assert of_model(layer_types=kinds) == of_model()


def test_norms_and_rotation_are_not_counted():
  assert of_model(use_qk_norm="true") == of_model()
  assert of_model(use_qk_norm="true", qk_norm_across_heads="true") == of_model()
  assert of_model(normalization="layernorm") == of_model()


def test_gpt2_small_as_published():
  """124 million parameters, of which the table of positions and the biases are in no product."""
  small = build_model(load_config(["config=base", "model_name=gpt2-small"]).model, 1024)
  matrices = 12 * 12 * 768**2 + 50257 * 768
  assert model_flops_per_token(small, 1024) == 6 * matrices + 12 * 12 * 768 * 512


# --- what a traced step does ----------------------------------------------------------------------


def of_step(**keys: object) -> StepFlops:
  """Of the step as 8 simulated devices would run it, B rows in a pass."""
  given = {"dataset_type": "synthetic", "per_device_batch_size": B // 8} | keys
  of = config(**given)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  assert plan.micro_batch_to_train == B
  return traced(of, plan, jax.devices())


def traced(of, plan, devices) -> StepFlops:
  trainer = build_trainer(of, plan, devices)
  source = build_dataset(of.data, of.batch.max_target_length).train
  rows = step_rows(plan, trainer, source, plan.micro_batch_to_train)
  return step_flops(traced_step(trainer, rows).jaxpr)


# Plain attention forms T × T logits and mixes the values, and goes back with five such products.
PRODUCT = 2 * N * H * T
FORWARD_LAYER = 2 * (PROJECTIONS + GATED) + 2 * PRODUCT
PASS = B * T * (L * (6 * (PROJECTIONS + GATED) + 7 * PRODUCT) + 6 * D * V)


def test_a_pass_by_hand():
  assert of_step() == StepFlops(per_microbatch=PASS, rest=0)


def test_every_rows_squared_gradient_takes_no_product_more():
  assert of_step(gns="all") == of_step()


def test_more_passes_are_trips_of_the_same_pass():
  assert of_step(gradient_accumulation_steps=20) == of_step()


def test_a_streamed_step_is_one_pass_wherever_it_stands():
  flops = of_step(gradient_accumulation_steps=2, accumulation="streamed")
  assert flops.total == PASS


def test_a_tick_of_a_pipeline_by_its_works():
  """One layer forward, one forward and back, and the loss of a microbatch, on all devices."""
  layers = {"base_num_decoder_layers": 4, "num_pipeline_repeats": 2}
  flops = of_step(
    **layers, ici_pipeline_parallelism=2, pipeline_schedule="interleaved_1f1b",
    num_pipeline_microbatches=2,
  )  # fmt: skip
  tokens = 2 * (B // 2) * T  # Both stages compute, each on a microbatch of its own.
  works = {
    "forward": tokens * FORWARD_LAYER,
    "loss": B // 2 * T * 6 * D * V,
    # The last product of the forward that is formed again is read by no other layer: compilers drop it.
    "backward": tokens * (6 * (PROJECTIONS + GATED) + 7 * PRODUCT - 2 * D * M),
  }
  assert flops == StepFlops(sum(works.values()), 0, works)
  assert flops.divided(4).by_tick_work["loss"] == works["loss"] / 4


def test_what_is_conditional_belongs_to_the_innermost_work():
  x = jax.ShapeDtypeStruct((2, 2), np.float32)

  def branch(name, x, within):
    with jax.named_scope(name):
      return jax.lax.cond(x[0, 0] > 0, lambda: within(x), lambda: x)

  def trip(_, x):
    x = branch("no_work", x, lambda x: x @ x)
    return branch("tick_forward", x, lambda x: branch("tick_loss", x @ x, lambda x: x @ x @ x))

  traced = jax.make_jaxpr(lambda n, x: jax.lax.fori_loop(0, n, trip, x))(3, x)
  assert step_flops(traced) == StepFlops(4 * 16, 0, {"forward": 16, "loss": 2 * 16})


@pytest.mark.parametrize(("layers", "products"), [(1, 2 + 1 + 4), (3, 3 * (2 + 2 + 4))])
def test_what_nothing_reads_is_not_counted(layers, products):
  # As in the tick of a pipeline whose stage has one layer: its forward is formed again for its backward pass,
  # which does not read the last product; with more layers the next layer reads it.
  def stage(x, weights):
    def layer(x, pair):
      return jnp.tanh(x @ pair[0]) @ pair[1], None

    return jax.lax.scan(layer, x, weights)[0]

  def tick(x, weights):
    y = stage(x, weights)
    return y, jax.vjp(stage, x, weights)[1](x)

  x = jax.ShapeDtypeStruct((2, 2), np.float32)
  weights = jax.ShapeDtypeStruct((layers, 2, 2, 2), np.float32)
  assert step_flops(jax.make_jaxpr(tick)(x, weights)).total == products * 16


def test_unrolled_layers_are_those_of_the_scan():
  assert of_step(scan_layers="false") == of_step()


def test_tiles_of_the_vocabulary_are_the_whole():
  assert of_step(num_vocab_tiling=4) == of_step()


@pytest.mark.parametrize("scan", ["true", "false"])
def test_full_remat_computes_the_layers_once_more(scan):
  # All but the last product of a layer: nothing but the next layer's input needs that.
  again = FORWARD_LAYER - 2 * M * D
  assert of_step(remat_policy="full", scan_layers=scan).per_microbatch == PASS + B * T * L * again


def test_minimal_remat_keeps_products_with_weights():
  assert PASS <= of_step(remat_policy="minimal").per_microbatch <= PASS + B * T * L * 2 * PRODUCT


MESHES = [
  {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 8},
  {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
  {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
  {"ici_data_parallelism": 4, "ici_tensor_parallelism": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.values())))
@pytest.mark.parametrize("keys", [{}, {"num_vocab_tiling": 4}], ids=["whole", "tiles"])
def test_every_mesh_does_the_same_work(mesh, keys):
  assert of_step(**mesh, **keys) == StepFlops(per_microbatch=PASS, rest=0)


def test_an_optimizer_that_multiplies_is_the_rest_of_a_step():
  def newton_schulz(rows: int, columns: int) -> int:
    """Five times: the Gram matrix, its square, and its product with the matrix."""
    m, n = sorted((rows, columns))
    return 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)

  kernels = [(D, N * H), (D, K * H), (D, K * H), (N * H, D), (D, M), (D, M), (M, D)]
  rest = L * sum(newton_schulz(*shape) for shape in kernels)
  assert of_step(opt_type="muon") == StepFlops(per_microbatch=PASS, rest=rest)


# --- flash attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 64, 256])
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_flash_kernels_are_counted_on_every_device(layout, width):
  rows, length, heads = 4, 256, 4
  kernel = functools.partial(flash.tpu_attention, interpret=True)
  shape = jax.ShapeDtypeStruct((rows, length, heads, width), np.float32)
  place = simulated(**layout)

  def total(q, k, v):
    with jax.sharding.use_abstract_mesh(place.abstract_mesh):
      return flash.flash_attention(q, k, v, None, 0, kernel).sum()

  jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(shape, shape, shape)
  # 2 products forward, 3 for the queries' gradient and 4 for the keys' and values'; half of each.
  # Beside them each token's result is multiplied with its gradient.
  each = 2 * rows * heads * length**2 * width / 2
  assert step_flops(jaxpr).total == 9 * each + 2 * rows * heads * length * width


@pytest.mark.parametrize("noise", ["off", "all"])
@pytest.mark.parametrize("mesh", [{}, {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 1}])
def test_a_step_for_a_tpu_is_traced_with_its_kernel(mesh, noise):
  pytest.importorskip("libtpu")
  length = 256
  of = config(
    dataset_type="synthetic",
    compile_topology="v5e-4",
    per_device_batch_size=2,
    max_target_length=length,
    gns=noise,
    **mesh,
  )
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 4))
  flops = traced(of, plan, topology_devices("v5e-4"))
  # Rotations too are products there: of queries and keys, forward and backward.
  products = 9 * 2 * N * H * length / 2 + 2 * N * H + 2 * 2 * (N + K) * H**2
  per_token = L * (6 * (PROJECTIONS + GATED) + products) + 6 * D * V
  assert flops == StepFlops(per_microbatch=8 * length * per_token, rest=0)


# --- products by group, and loops -----------------------------------------------------------------


def test_a_grouped_product_multiplies_each_row_with_one_matrix_in_both_passes():
  rows, width, out, groups = 48, 8, 16, 4
  x, w = jnp.ones((rows, width)), jnp.ones((groups, width, out))
  sizes = jnp.full(groups, rows // groups)

  def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.square(jax.lax.ragged_dot(x, w, sizes)).sum()

  both = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
  assert step_flops(both) == StepFlops(0, 3 * 2 * rows * width * out)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_kernel_by_groups_counts_the_rows_expected_in_any(share):
  x, w = jnp.ones((48, 8)), jnp.ones((4, 8, 16))
  sizes = jnp.full(4, int(share * 12))

  def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    y: Any = group_kernels.grouped(x, w, sizes, False, share, True)
    return y.sum()

  both = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)
  assert step_flops(both) == StepFlops(0, 3 * 2 * share * 48 * 8 * 16)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_loop_counts_what_its_results_need_after_any_number_of_iterations(is_read):
  """The second product reaches the result one iteration later, by way of another carry."""
  x = jnp.ones((8, 8))

  def body(carry):
    number, one, other = carry
    _, doubled = jax.lax.scan(lambda c, _: (c, number + 1), other @ x, length=2)
    return doubled[0], other * 2, one @ x

  def run(x):
    number, one, _ = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, x))
    return (number, one) if is_read else number

  counted = step_flops(jax.make_jaxpr(run)(x)).per_microbatch
  assert counted == is_read * 2 * 8**3
