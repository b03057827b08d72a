"""The layer of experts: what it computes, beside every expert at every token, and what it refuses."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import config, error, mesh, model_config, uneven_rows

import maxbatch as mb
from maxbatch.compile.traced_flops import model_flops_per_token, step_flops
from maxbatch.config.keys.model import idle_parameters
from maxbatch.config.load import load_config, without_effect
from maxbatch.config.schema import attention_width
from maxbatch.data.rows import Routes
from maxbatch.errors import UserError
from maxbatch.estimate.step_work import step_work
from maxbatch.models import forms, group_kernels, grouped
from maxbatch.models.attention import AttentionContext
from maxbatch.models.experts import BALANCE, FLIPS, TOKENS, Experts, Routed, route
from maxbatch.models.grouped import block_size, num_slots, slots_of
from maxbatch.models.layers import Buffer, Outputs
from maxbatch.models.lora import add_adapters, merged, scale
from maxbatch.models.registry import build_model
from maxbatch.precision.formats import BFLOAT16

B, T, D, E, K = 3, 16, 32, 6, 2
EXPERTS = {"num_experts": E, "num_experts_per_tok": K, "base_moe_mlp_dim": 24}
FORMS = {
  "Mixtral's": {},
  "OLMoE's": {"norm_topk_prob": "false"},
  "DeepSeek's": {
    **{"routed_score_func": "sigmoid", "routed_bias": "true", "routed_scaling_factor": 2.5},
    **{"n_routing_groups": 3, "topk_routing_group": 2, "shared_experts": 2},
  },
  "not gated": {"mlp_activation": "gelu"},
  "gpt-oss's": {
    **{"mlp_activation": "clamped_swiglu", "mlp_activations_limit": 0.5, "swiglu_alpha": 2},
    **{"mlp_bias": "true", "router_logit_bias": "true"},
  },
  "adapted": {"lora_rank": 3, "lora_alpha": 6, "lora_targets": "[gate,up,down,router]"},
}
AT = AttentionContext(jnp.zeros((1, T), jnp.int32), None, None, None)


def layer(**keys):
  settings = model_config(**EXPERTS | keys)

  # One program: each operation by itself is one of its own.
  @nnx.jit
  def made():
    experts = Experts(nnx.Rngs(0), settings, 1.0)
    if experts.router.bias is not None:
      experts.router.bias.set_value(jnp.linspace(-0.3, 0.3, E))
    add_adapters(experts, settings, nnx.Rngs(1))
    for seed, (path, leaf) in enumerate(nnx.to_flat_state(nnx.state(experts))):
      if path[-1] in ("bias", "logit_bias", "lora_b") and not isinstance(leaf, Buffer):
        leaf.set_value(0.3 * jax.random.normal(jax.random.key(seed), leaf.shape))
    return experts

  return settings, *nnx.split(made())


def whole(matrix, settings, of_router=False):
  """A matrix with its adapter, and its bias."""
  kernel = matrix.kernel[...]
  if matrix.lora_a is not None:
    kernel = kernel + scale(settings) * matrix.lora_a[...] @ matrix.lora_b[...]
  bias = matrix.logit_bias if of_router else matrix.bias
  return kernel, 0.0 if bias is None else bias[...]


def every_expert_at_every_token(settings, experts, x_BTD):
  """The same in the plainest way; of what route chose."""
  bias, (kernel, logit_bias) = experts.router.bias, whole(experts.router, settings, of_router=True)
  others = {"router_logit_bias": jnp.broadcast_to(logit_bias, (E,))}
  others |= {} if bias is None else {"router_bias": bias[...]}
  routed = route(settings, x_BTD, kernel, others)
  feeds = experts.experts

  def product(form, x, matrix):
    kernel, bias = whole(matrix, settings)
    y = jnp.einsum(form, x, kernel)
    return y + jnp.broadcast_to(bias, y.shape)

  up = product("btd,edf->btef", x_BTD, feeds.up)
  if feeds.gate is None:
    h = jax.nn.gelu(up)
  else:
    gate = product("btd,edf->btef", x_BTD, feeds.gate)
    h = jax.nn.silu(gate) * up
    if settings.mlp_activation == "clamped_swiglu":
      gate = jnp.where(gate > 0.5, 0.5, gate)
      h = gate / (1 + jnp.exp(-2 * gate)) * (jnp.clip(up, -0.5, 0.5) + 1)
  y = product("btef,efd->bted", h, feeds.down)
  weight = (jax.nn.one_hot(routed.chosen, E) * routed.weight[..., None]).sum(2)
  y_BTD = (y * weight[..., None]).sum(2)
  return y_BTD if experts.shared is None else y_BTD + experts.shared(x_BTD)


@pytest.mark.parametrize("is_for_tpu", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_see_their_experts_and_no_token_is_dropped(form, is_for_tpu, monkeypatch):
  """As they are multiplied on CPUs, and as on TPUs."""
  for module in (forms, grouped):
    monkeypatch.setattr(module, "is_for_tpu", lambda: is_for_tpu)
  interpreted = functools.partial(group_kernels.grouped, interpret=True)
  monkeypatch.setattr(group_kernels, "grouped", interpreted)
  assert_tokens_see_their_experts(form)


@pytest.mark.parametrize("form", ["Mixtral's", "gpt-oss's"])
def test_on_tpus_parts_of_the_experts_add_up_to_all(form, monkeypatch):
  """Gradients too, though a kernel writes nothing where a slot holds no token of its experts."""
  interpreted = functools.partial(group_kernels.grouped, interpret=True)
  monkeypatch.setattr(group_kernels, "grouped", interpreted)
  _, graph, state = layer(**FORMS[form])
  experts = nnx.merge(graph, state)
  x_BTD, d_BTD = jax.random.normal(jax.random.key(1), (2, B, T, D))
  chosen_TK = jax.random.randint(jax.random.key(2), (B * T, K), 0, E).at[:, 1].set(E - 1)

  def of_parts(state, x_BTD, parts):
    parameters = {
      name: x
      for name, (x, _) in nnx.merge(graph, state)._parameters().items()
      if "router" not in name
    }
    held = [{name: x[part] for name, x in parameters.items()} for part in parts]
    y = [experts.of_tokens(each, x_BTD.reshape(-1, D), chosen_TK, weight_TK) for each in held]
    return (jnp.stack(y).sum(0).reshape(d_BTD.shape) * d_BTD).sum()

  weight_TK = jnp.linspace(0.1, 1, B * T * K).reshape(-1, K)

  def differentiated(parts):
    divided = functools.partial(of_parts, parts=parts)
    return jax.jit(jax.value_and_grad(divided, argnums=(0, 1)))(state, x_BTD)

  expected = differentiated([slice(0, E)])
  for module in (forms, grouped):
    monkeypatch.setattr(module, "is_for_tpu", lambda: True)
  found = differentiated([slice(0, 2), slice(2, E)])
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(jnp.abs(b).max()))


@functools.cache
def layer_and_gradients(form):
  """A layer, what it is given, and what the plainest way gives for it."""
  settings, graph, state = layer(**FORMS[form])
  x_BTD, d_BTD = jax.random.normal(jax.random.key(1), (2, B, T, D))

  def plain(state, x_BTD):
    return (every_expert_at_every_token(settings, nnx.merge(graph, state), x_BTD) * d_BTD).sum()

  expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(state, x_BTD)
  return graph, state, x_BTD, d_BTD, expected


def assert_tokens_see_their_experts(form):
  graph, state, x_BTD, d_BTD, expected = layer_and_gradients(form)

  def ours(state, x_BTD):
    return (nnx.merge(graph, state)(x_BTD, AT).hidden_BTD * d_BTD).sum()

  found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(state, x_BTD)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
  """The form for GPUs, on CPU, with so few slots that some tokens have none, in blocks of eight."""
  monkeypatch.setattr(grouped, "is_for_gpu", lambda: True)
  monkeypatch.setattr(grouped, "SPARE", T * B)
  monkeypatch.setattr(grouped, "BEYOND_BLOCK", 8)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("form", FORMS)
def test_on_gpus_tokens_beyond_an_expert_s_slots_are_multiplied_too(form):
  graph, state, x_BTD, _, _ = layer_and_gradients(form)
  stats: Any = jax.jit(lambda state: nnx.merge(graph, state)(x_BTD, AT).stats)(state)
  tokens_E = stats[TOKENS].total.sum(0)
  assert tokens_E.max() > grouped.even_slots(B * T * K, E) == B * T * K // E
  assert_tokens_see_their_experts(form)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("crowd", [0, 1])
def test_on_gpus_parts_of_the_experts_add_up_to_all(crowd, monkeypatch):
  """Also where one expert has all tokens: then most have no slot, and other experts nothing."""
  _, graph, state = layer(num_experts=4)
  experts = nnx.merge(graph, state)
  parameters = {name: x for name, (x, _) in experts._parameters().items()}
  random = np.random.default_rng(0)
  chosen_TK = jnp.asarray(random.permuted(np.tile(np.arange(4), (40, 1)), axis=1)[:, :K])
  chosen_TK = jnp.where(crowd, jnp.array([[3, 0]]), chosen_TK)
  x_TD, weight_TK = jax.random.normal(jax.random.key(2), (40, D)), jnp.full((40, K), 0.5)

  def of(held):
    part = {name: x[held] if len(x) == 4 else x for name, x in parameters.items()}
    return jax.jit(lambda *given: experts.of_tokens(*given))(part, x_TD, chosen_TK, weight_TK)

  y_TD = of(slice(0, 2)) + of(slice(2, 4))
  np.testing.assert_allclose(y_TD, of(slice(0, 4)), rtol=1e-4, atol=1e-5)
  grouped.is_for_gpu = lambda: False
  np.testing.assert_allclose(y_TD, of(slice(0, 4)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_gpus")
def test_on_gpus_matrices_that_fsdp_divides_give_the_same():
  _, graph, state = layer(**FORMS["gpt-oss's"])
  x_BTD, d_BTD = jax.random.normal(jax.random.key(3), (2, 4, T, D))

  def total(state, x_BTD):
    return (nnx.merge(graph, state)(x_BTD, AT).hidden_BTD * d_BTD).sum()

  differentiated = jax.value_and_grad(total, argnums=(0, 1))
  expected = jax.jit(differentiated)(state, x_BTD)
  with jax.set_mesh(mesh(fsdp=2)):
    found = jax.jit(differentiated)(state, x_BTD)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(jnp.abs(b).max()))


def test_adapters_of_experts_are_merged_as_they_compute():
  settings, graph, state = layer(**FORMS["adapted"])
  kernels, experts = merged(nnx.to_pure_dict(state), settings), nnx.merge(graph, state)
  for found, matrix in (
    (kernels["router"], experts.router),
    (kernels["experts"]["up"], experts.experts.up),
    (kernels["experts"]["down"], experts.experts.down),
  ):
    expected = whole(matrix, settings, of_router=matrix is experts.router)[0]
    np.testing.assert_allclose(found["kernel"], expected, rtol=1e-5, atol=1e-6)


routes_of = jax.jit(route, static_argnums=0)


def test_scores_by_hand():
  kernel = np.eye(E, dtype=np.float32)
  x = np.log(np.array([[1.0, 2, 3, 4, 5, 6]], np.float32))
  of = {**EXPERTS, "routed_scaling_factor": 2}
  routed = routes_of(model_config(**of), x, kernel, {})
  assert routed.chosen.tolist() == [[5, 4]]
  np.testing.assert_allclose(routed.weight, [[2 * 6 / 11, 2 * 5 / 11]], rtol=1e-6)
  np.testing.assert_allclose(routed.share, [[n / 21 for n in range(1, 7)]], rtol=1e-6)
  np.testing.assert_allclose(routed.log_z, [np.log(21)], rtol=1e-6)
  np.testing.assert_allclose(routed.margin, [(5 - 4) / 21], rtol=1e-5)
  routed = routes_of(model_config(**of, norm_topk_prob="false"), x, kernel, {})
  np.testing.assert_allclose(routed.weight, [[2 * 6 / 21, 2 * 5 / 21]], rtol=1e-6)
  sigmoid = model_config(**of, routed_score_func="sigmoid", routed_bias="true")
  routed = routes_of(
    sigmoid, x, kernel, {"router_bias": np.array([9.0, 0, 0, 0, 0, 0], np.float32)}
  )
  assert routed.chosen.tolist() == [[0, 5]]
  odds = np.array([1 / 2, 6 / 7])  # The bias chooses and does not weight.
  np.testing.assert_allclose(routed.weight, [2 * odds / odds.sum()], rtol=1e-6)
  groups = model_config(**of, n_routing_groups=3, topk_routing_group=1)
  # 8 is the highest score, 6 and 7 the best two of a group.
  x = np.log(np.array([[8.0, 1, 2, 3, 6, 7]], np.float32))
  routed = routes_of(groups, x, kernel, {})
  assert routed.chosen.tolist() == [[5, 4]]
  np.testing.assert_allclose(routed.margin, [(6 + 7 - 8 - 1) / 27], rtol=1e-5)


def test_replayed_routes_decide_where_tokens_go_and_nothing_else():
  """A bias for the choice alone sends tokens elsewhere too: with what it chose, and without it, a layer is
  the same in all that has a gradient."""
  settings, graph, state = layer(**FORMS["DeepSeek's"])
  x_BTD = jax.random.normal(jax.random.key(2), (B, T, D))
  experts = nnx.merge(graph, state)
  chosen_BTK = routes_of(settings, x_BTD, experts.router.kernel[...], _bias_of(experts)).chosen

  def outputs(state, routes=None, forgets_bias=False):
    experts = nnx.merge(graph, state)
    assert experts.router.bias is not None
    if forgets_bias:
      experts.router.bias.set_value(jnp.zeros(E))
    return experts(x_BTD, AT._replace(routes=routes))

  def loss(state, *arguments):
    found = outputs(state, *arguments)
    return jnp.square(found.hidden_BTD).sum(), found.stats

  grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
  outputs_of = jax.jit(outputs, static_argnums=2)
  expected, counted = grad(state)
  routes = Routes(chosen_BTK.astype(jnp.int16), is_replayed=True)
  replayed, stats = grad(state, routes, True)
  assert error(replayed, expected) < 1e-7
  np.testing.assert_array_equal(stats[TOKENS].total, counted[TOKENS].total)
  # By its own choice a layer without the bias differs, which is what is compared if nothing is replayed.
  own = nnx.merge(graph, state)
  own = routes_of(settings, x_BTD, own.router.kernel[...], {}).chosen
  flips = np.mean((np.sort(own) != np.sort(chosen_BTK)).any(-1))
  assert 0 < flips < 1
  for replays in (True, False):
    seen = outputs_of(state, dataclasses.replace(routes, is_replayed=replays), True)
    assert seen.stats
    assert float(seen.stats[FLIPS].value()) == pytest.approx(flips)
  np.testing.assert_array_equal(seen.hidden_BTD, outputs_of(state, None, True).hidden_BTD)
  # A token whose experts nobody knows goes where the router sends it, and is no flip.
  unknown = Routes(jnp.full_like(routes.experts, -1), is_replayed=True)
  seen = outputs_of(state, unknown, True)
  np.testing.assert_array_equal(seen.hidden_BTD, outputs_of(state, None, True).hidden_BTD)
  assert seen.stats
  assert float(seen.stats[FLIPS].value()) == 0


def _bias_of(experts):
  return {"router_bias": experts.router.bias[...]}


def test_near_ties_are_those_that_the_format_s_rounding_may_flip():
  _, graph, state = layer()
  experts = nnx.merge(graph, state)
  eps = jnp.finfo(jnp.float32).eps
  zeros = jnp.zeros((1, 4, E))
  margin_BT = jnp.array([[0, 15 * eps, 17 * eps, 0]])
  routed = Routed(jnp.zeros((1, 4, K), int), zeros, zeros, zeros[..., 0], margin_BT)
  counts_BT = jnp.array([[True, True, True, False]])
  assert experts._row_sums(routed, counts_BT)["near"].tolist() == [2]
  # Also where float32 arrays hold its values.
  emulated = dataclasses.replace(BFLOAT16, carrier="float32")
  experts.policy = dataclasses.replace(experts.policy, compute=emulated)
  assert experts._row_sums(routed, counts_BT)["near"].tolist() == [3]


def test_every_assignment_has_a_slot_of_its_expert():
  random = np.random.default_rng(0)
  for chosen in (
    random.integers(0, 3, (50, 2)),
    np.full((50, 2), 2),
    random.integers(0, 5, (1, 2)),
  ):
    slots = jax.device_get(jax.jit(slots_of, static_argnums=1)(chosen, 5))
    M = block_size(chosen.size, 5)
    assert len(set(slots.slot_TK.ravel().tolist())) == chosen.size == slots.is_used_S.sum()
    np.testing.assert_array_equal(slots.expert_of_block[slots.slot_TK // M], chosen)
    np.testing.assert_array_equal(slots.tokens_E, np.bincount(chosen.ravel(), minlength=5))
    np.testing.assert_array_equal(slots.assignment_S[slots.slot_TK.ravel()], np.arange(chosen.size))


@pytest.mark.parametrize("experts", [4, 8, 64])
def test_empty_slots_are_few(experts):
  assignments = 1024 * experts // 8
  assert num_slots(assignments, experts, block_size(assignments, experts)) < 1.25 * assignments


def test_a_layer_costs_what_its_tokens_experts_do():
  _, graph, state = layer(num_experts=16, base_moe_mlp_dim=64)
  x_BTD = jnp.zeros((16, 64, D))
  at = AT._replace(first_BT=jnp.zeros((1, 64), jnp.int32))

  def square(state, x_BTD):
    return (nnx.merge(graph, state)(x_BTD, at).hidden_BTD ** 2).sum()

  counted = step_flops(jax.make_jaxpr(jax.grad(square, argnums=(0, 1)))(state, x_BTD)).total
  active = 6 * 16 * 64 * (K * 3 * D * 64 + D * 16)
  assert active < counted < 1.25 * active


def test_active_and_total_parameters():
  dense, mixture = (
    build_model(model_config(**keys), T) for keys in ({"base_mlp_dim": 24}, {**EXPERTS})
  )
  matrices, layers = 3 * D * 24, 2
  more = model_flops_per_token(mixture, T) - model_flops_per_token(dense, T)
  assert more == 6 * layers * ((K - 1) * matrices + D * E)
  sizes = [sum(x.size for x in jax.tree.leaves(model.shapes())) for model in (dense, mixture)]
  assert sizes[1] - sizes[0] == layers * ((E - 1) * matrices + D * E)


@pytest.mark.parametrize(
  ("name", "total", "active"),
  [
    ("mixtral-8x7b", 46.70e9, 12.88e9),
    ("deepseek2-16b", 15.71e9, 2.66e9),
    ("deepseek3-671b", 671.03e9, 37.55e9),
    ("gpt-oss-20b", 20.91e9, 3.61e9 + 201_088 * 2880),
    ("olmoe-1b-7b", 6.92e9, 1.28e9),
    ("qwen3-30b-a3b", 30.53e9, 3.35e9),
  ],
)
def test_estimates_count_what_publishers_say(name, total, active):
  # Without windows, which make the products of attention fewer.
  whole = ["sliding_window_size=0", "layer_types=[]"]
  work = step_work(load_config(["config=base", f"model_name={name}", *whole]))
  idle = work.model.base_num_decoder_layers * idle_parameters(work.model)
  assert work.parameters == pytest.approx(total, rel=1e-3)
  assert work.parameters - idle == pytest.approx(active, rel=3e-3)
  tables = work.table_parameters  # The embedding is looked up.
  attention = 12 * attention_width(work.model) * work.length / 2
  rest = work.model_flops_per_token - 6 * (work.parameters - idle - tables)
  assert rest == pytest.approx(attention * work.model.base_num_decoder_layers, rel=1e-3)


# --- what is counted ------------------------------------------------------------------------------


def test_padding_counts_nowhere():
  model = build_model(model_config(**EXPERTS, load_balance_loss_weight=0.1), T)
  params = model.init(jax.random.key(0))
  rows = uneven_rows(12, T)  # Rows 8 to 11 have no token.

  @jax.jit
  def sums(rows):
    outputs = model.bind(params)(rows, None)
    assert isinstance(outputs, Outputs)
    return outputs.terms, outputs.stats

  terms, stats = sums(rows)
  of_tokens = rows.weights != 0
  assert stats[TOKENS].total.sum() == 2 * K * of_tokens.sum()
  assert terms[BALANCE].denominator == 2 * of_tokens.any(1).sum()
  # Causal: what a token is sent to does not depend on the padding behind it.
  garbage = rows._replace(inputs=np.where(of_tokens, rows.inputs, 7).astype(np.int32))
  others = sums(garbage)
  for a, b in zip(jax.tree.leaves((terms, stats)), jax.tree.leaves(others), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_loss_of_a_row_is_one_if_it_is_spread_evenly():
  _, graph, state = layer()
  even = {"tokens": jnp.full((1, E), 4), "share": jnp.full((1, E), 2.0)}
  collapsed = {"tokens": jnp.array([[12, 12, 0, 0, 0, 0]]), "share": jnp.eye(1, E) * 12}
  experts = nnx.merge(graph, state)
  assert experts._row_balance(even, jnp.array([12.0])) == pytest.approx(1)
  assert experts._row_balance(collapsed, jnp.array([12.0])) == pytest.approx(E / K)


def test_no_split_changes_a_term_or_a_statistic():
  _, graph, state = layer(load_balance_loss_weight=0.1, router_z_loss_weight=0.01)

  def loss(params, rows, keys):
    at = AT._replace(counts_BT=rows["counts"])
    y_BTD, terms, stats = nnx.merge(graph, params)(rows["x"], at)
    tokens = rows["counts"].sum().astype(jnp.float32)
    square = mb.Ratio((y_BTD**2 * rows["counts"][..., None]).sum(), tokens)
    assert terms is not None
    assert stats is not None
    return {"square": square, **terms}, stats

  rows = {"x": jax.random.normal(jax.random.key(1), (8, T, D)), "counts": jnp.ones((8, T), bool)}
  report = mb.check_split(loss, state, rows)
  assert report.ok, str(report)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("keys", "sentence"),
  [
    (
      {"num_experts_per_tok": 7},
      "num_experts_per_tok=7 must be at most num_experts=6; for example",
    ),
    (
      {"first_num_dense_layers": 2},
      "first_num_dense_layers=2 must be less than base_num_decoder_layers=2, so that a layer has",
    ),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true: the weight"),
    ({"n_routing_groups": 4}, "num_experts=6 must be a multiple of n_routing_groups=4, and groups"),
    (
      {"n_routing_groups": 3, "topk_routing_group": 4},
      "topk_routing_group=4 must be at most n_routing_groups=3; for example topk_routing_group=3",
    ),
    (
      {"n_routing_groups": 3, "num_experts_per_tok": 4},
      "num_experts_per_tok=4 must be at most the 2 experts of topk_routing_group=1 of "
      "n_routing_groups=3 groups; for example topk_routing_group=2",
    ),
  ],
)
def test_keys_that_contradict_each_other(keys, sentence):
  with pytest.raises(UserError, match=re.escape(sentence)):
    build_model(model_config(**EXPERTS | keys), T)


def test_keys_of_experts_without_experts_are_refused():
  with pytest.raises(UserError, match="num_experts_per_tok=3 has no effect with num_experts=1"):
    without_effect(config(num_experts_per_tok=3))


def test_a_capacity_of_experts_is_refused():
  with pytest.raises(UserError, match="no key 'capacity_factor': experts have no capacity, since"):
    config(num_experts=4, capacity_factor=1.0)


def test_devices_of_a_ring_have_whole_experts_and_all_of_its_rows(monkeypatch):
  """Half of the experts each, and beside them a half of the width; no product for the others'."""
  _, graph, state = layer(num_experts=4)
  seen = []

  def of_tokens(self, parameters, x_TD, *routed):
    seen.append((x_TD.shape[0], parameters["up"].shape))
    return _of_tokens(self, parameters, x_TD, *routed)

  _of_tokens = Experts.of_tokens
  monkeypatch.setattr(Experts, "of_tokens", of_tokens)
  with jax.sharding.use_abstract_mesh(mesh(fsdp=2, expert=2, tensor=2).abstract_mesh):
    y = jax.eval_shape(
      jax.jit(lambda state, x_BTD: nnx.merge(graph, state)(x_BTD, AT).hidden_BTD),
      state,
      jnp.zeros((8, T, D)),
    )
  assert seen == [(8 // 2 * T, (2, D, 12))]
  assert y.shape == (8, T, D)


def test_squares_of_each_row_by_all_matrices_are_refused_with_what_works_instead():
  settings = model_config(**EXPERTS)
  with pytest.raises(
    UserError, match=r"gns=all .* num_experts=6 experts it cannot; .*microbatches"
  ):
    build_model(settings, T, "all")
  build_model(settings, T, "norm")
