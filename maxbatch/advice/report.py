"""The advice as it is printed: the answer first, then where each number is from."""

import math
from collections.abc import Iterator, Sequence

from maxbatch.advice.advice import Advice, Planned, mixture_of
from maxbatch.advice.batch_size import Measured, Said
from maxbatch.advice.limits import limits
from maxbatch.advice.prices import step_cost
from maxbatch.advice.slices import Point, about, eight_bits, on_gpus, used, without_stages
from maxbatch.advice.words import DAY, money, percent, short, span, times, wrapped
from maxbatch.batch.from_config import sparse_experts
from maxbatch.batch_rules.findings import FINDINGS, WSD
from maxbatch.batch_rules.rule import steps_factor
from maxbatch.command_line.screen import Table, gib_of
from maxbatch.core.keys import counted
from maxbatch.estimate.best_split import BatchSplit

_FAR = 10
"""Times outside of a rule's range."""
_MEANINGS = {
  "critical": "twice the data",
  "optimal": "least loss",
  "tolerance": "within 0.01 nats",
}


def report(advice: Advice, planned: Planned) -> str:
  """Returns all of it, sections apart."""
  sections = [
    _answer(advice, planned),
    _batch(advice),
    _ramp(advice, planned),
    _optimizer(advice),
    _mixture(advice, planned),
    _findings(advice),
    *([_split(advice), _frontier(advice)] if advice.here else []),
    _elsewhere(advice),
    _limits(advice, planned),
    _experiment(advice),
  ]
  return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _answer(advice: Advice, planned: Planned) -> Iterator[str]:
  asked, first = advice.asked, advice.sizes.phases[0].samples
  grown = f", after a ramp from {first:,}" if first != advice.sizes.samples else ""
  yield (
    f"{advice.sizes.samples:,} samples of {asked.length:,} tokens a step, "
    f"{short(advice.batch_tokens)} tokens{grown}"
  )
  training = asked.training
  active = " active" if asked.config.model.num_experts > 1 else ""
  where = f", on {asked.place}" if asked.place else ""
  yield from wrapped(
    f"{asked.config.model.model_name}, {short(training.parameters)}{active} parameters, "
    f"{short(asked.tokens)} tokens ({short(training.tokens_per_parameter)} a parameter){where}"
  )
  if planned.step_seconds:
    yield from _costs(advice, planned)
  else:
    yield f"  {planned.plan.steps:,} steps; compile_topology=v5e-256 would give days and costs"
  yield from wrapped(
    f"data overhead {advice.ramp_overhead:.2g} with the ramp, {advice.constant_overhead:.2g} "
    f"without: worth {short(asked.tokens / (1 + advice.ramp_overhead))} tokens in small batches"
    if grown
    else f"data overhead {advice.constant_overhead:.2g}: worth "
    f"{short(asked.tokens / (1 + advice.constant_overhead))} tokens in small batches"
  )


def _trust(split: BatchSplit) -> str:
  """Says where the time of a step is from; see docs/effective_microbatches.md for how far off it
  is."""
  if split.step.how == "compiled":
    return "as it was compiled"
  rates = split.step.rates
  spread = percent(rates.spread["seconds"])
  return f"estimated without compiling, {rates.chosen:.2g} of what is counted, ±{spread}"


def _costs(advice: Advice, planned: Planned) -> Iterator[str]:
  asked, days = advice.asked, planned.seconds / DAY
  assert asked.place
  assert advice.here
  hours, price = asked.place.chips * planned.seconds / 3600, asked.price(asked.place)
  split = advice.here.split
  yield from wrapped(
    f"{planned.plan.steps:,} steps in {about(split.step)}{span(days)}, {planned.tokens_per_second():,.0f} tokens/s, "
    f"utilisation {used(split.step)} ({_trust(split)})"
  )
  unit = f"{asked.place.unit} hours"
  cost = f", {money(hours * price.price)} at {price}" if price.price else ""
  yield from wrapped(f"{hours:,.3g} {unit}{cost}" if hours < 100 else f"{hours:,.0f} {unit}{cost}")
  if each := str(step_cost(price, asked.place.chips, split.step.step_seconds)):
    yield from wrapped(each)
  yield from wrapped(on_gpus([asked.place]))
  for sentence in eight_bits(asked.work.quantization, [asked.place, *asked.elsewhere]):
    yield from wrapped(sentence)


def _batch(advice: Advice) -> Iterator[str]:
  size = advice.size
  yield "Batch: what the rules say, in tokens of a step"
  head = ("rule", "says", "which means", f"at {size.data_overhead:g}", "outside its range")
  rows = [_rule_row(one) for one in size.said if one.at_overhead is not None]
  rows += [_measured_row(one, size.data_overhead) for one in size.measured]
  others = [_rule_row(one) for one in size.said if one.at_overhead is None]
  lines = Table(head, [*rows, *others], left=(0, 2)).lines()
  yield from lines[: 1 + len(rows)]
  yield from wrapped(
    f"together {short(size.low)} to {short(size.high)} at a data overhead of "
    f"{size.data_overhead:g}; taken {short(size.tokens)}, the middle"
  )
  if advice.asked.own_batch:
    yield from wrapped(
      f"Your own batch stays: {short(advice.batch_tokens)} tokens, a data overhead of "
      f"{advice.constant_overhead:.2g} by the middle of the rules."
    )
  yield from wrapped(
    f"A batch of x·Bcrit takes (1 + x) times the data of a small one, and (1 + 1/x) times the "
    f"fewest steps: at x = {size.data_overhead:g}, {size.data_overhead:.0%} more data and "
    f"{steps_factor(size.data_overhead):.3g} times the steps. Bcrit is {short(size.critical_tokens)}."
  )
  if not WSD.misfit(advice.asked.setting):
    schedule = advice.asked.setting.lr_schedule_type
    yield from wrapped(f"But lr_schedule_type={schedule}: {WSD.says} ({WSD.name}).")
  for one in size.measured:
    yield from wrapped(_changed(one, advice))
  yield "  Other questions, which the above does not follow:"
  yield from lines[1 + len(rows) :]


def _rule_row(one: Said) -> tuple[str, ...]:
  rule = one.rule
  means = _MEANINGS.get(rule.means) or f"{rule.data_overhead:.0%} more data"
  return (
    rule.title,
    short(one.tokens),
    means,
    "–" if one.at_overhead is None else short(one.at_overhead),
    "–" if one.beyond == 1 else times(one.beyond),
  )


def _measured_row(one: Measured, overhead: float) -> tuple[str, ...]:
  return (
    f"measured, {one.kind}",
    short(one.found.value),
    "within 0.01 nats" if one.kind == "branches" else "twice the data",
    short(one.at_overhead(overhead).value),
    f"at {short(one.at_tokens)} tokens",
  )


def _changed(one: Measured, advice: Advice) -> str:
  """Returns what a measurement does to the answer."""
  low, high = one.carried.low, one.carried.high
  upper = "" if math.isinf(high) else f" to {short(high)}"
  words = (
    f"{one.kind} of {one.where}: {short(one.found.low)}"
    f"{'' if math.isinf(one.found.high) else f' to {short(one.found.high)}'} after "
    f"{short(one.at_tokens)} tokens, which for a run of {short(advice.asked.tokens)} is {short(low)}"
    f"{upper}"
  )
  before, now = advice.size.by_rules, advice.size.tokens
  moved = "nothing moves" if now == before else f"it moves {short(before)} to {short(now)}"
  if one.kind == "branches":
    return f"{words}; the batch is kept inside of it: {moved}."
  if one.kind == "branches' curve":
    share = f"{advice.size.data_overhead:g}"
    return f"{words}, twice the data; the batch is kept inside of {share} of it: {moved}."
  return (
    f"{words}, with the factor of 1.7 by which it was low where we measured it (docs/advice_check.md); one "
    f"value among the rules: {moved}. It can be too low by orders of magnitude (Merrill 2025)."
  )


def _ramp(advice: Advice, planned: Planned) -> Iterator[str]:
  phases = planned.plan.phases
  if len(advice.sizes.phases) == 1:
    if advice.asked.wishes.ramp:
      yield "No ramp"
      yield from wrapped(
        f"Half of {advice.sizes.samples:,} samples would not be whole samples of every data-parallel group."
      )
    return
  yield "Ramp: double where twice the batch keeps to the overhead (zhang-growth)"
  head = ("from sample", "from token", "batch", "steps", "rate", "β2", "decay")
  rows = []
  for phase, setting in zip(phases, advice.settings.phases, strict=False):
    rows.append(
      (
        f"{phase.first.samples:,}",
        short(planned.plan.tokens(phase.first.samples)),
        f"{phase.batch:,}",
        f"{phase.num_steps:,}",
        f"{setting.learning_rate:.2g}",
        f"{setting.adam_b2:.4g}",
        f"{setting.adam_weight_decay:.2g}",
      )
    )
  yield from Table(head, rows).lines()
  constant = advice.asked.tokens / advice.batch_tokens
  same = advice.asked.tokens / (advice.ramp_overhead * advice.goal.critical_tokens)
  yield from wrapped(
    f"{planned.plan.steps:,} steps. Constant, the last batch takes {constant:,.0f} steps at a data "
    f"overhead of {advice.constant_overhead:.2g}; the batch with the ramp's overhead of "
    f"{advice.ramp_overhead:.2g} takes {same:,.0f}. β2 and weight decay are what would keep half-life "
    "and timescale; a run has those of its last phase."
  )


def _mixture(advice: Advice, planned: Planned) -> Iterator[str]:
  """Says what the batch is for each expert of a mixture, and how little is published about that."""
  mixture = mixture_of(advice)
  if mixture is None:
    return
  share = percent(mixture["active_parameters"] / mixture["parameters"])
  yield f"Mixture of experts: {short(mixture['parameters'])} parameters, {share} active for a token"
  model, first, last = advice.asked.config.model, *mixture["tokens_per_expert"]
  grown = f", {short(first)} when the ramp begins" if first != last else ""
  yield from wrapped(
    f"An expert sees {short(last)} tokens of a step{grown}: num_experts_per_tok={model.num_experts_per_tok} / "
    f"num_experts={model.num_experts} of the batch. Its gradient is the mean of so few, and that of the router "
    "and of all other layers the mean of the whole batch."
  )
  for sentence in sparse_experts(model, planned.plan):
    yield from wrapped(f"Warning: {sentence}.")
  yield from wrapped(
    "Little is published: no rule counts experts. The rules above are fitted to dense models and asked with the "
    "active parameters; published mixtures have larger batches than these rules say (docs/advice.md). One public "
    "run, Marin's 67B with 2B active, was stable with 33M tokens a step and not with 67M. maxbatch critical_batch "
    "measures your model."
  )


def _findings(advice: Advice) -> Iterator[str]:
  """Says what newer findings mean for this optimizer, schedule and model, and which are of others."""
  setting = advice.asked.setting
  yield f"Newer, without a number: for {setting.opt_type} with lr_schedule_type={setting.lr_schedule_type}"
  for one in FINDINGS:
    if one is not WSD and not one.misfit(setting):
      yield from wrapped(f"{one.title} ({one.name}): {one.says}.")
  others = [f"{one.name} ({one.misfit(setting)})" for one in FINDINGS if one.misfit(setting)]
  if others:
    yield from wrapped(f"Not of this run: {', '.join(others)}.")


def _optimizer(advice: Advice) -> Iterator[str]:
  one = advice.settings
  last = one.phases[-1]
  yield f"Optimizer: {one.opt_type} at {short(last.batch_tokens)} tokens a step"
  yield from wrapped(f"learning_rate {one.learning_rate:g}: {one.why}")
  if one.said:
    head = ("rule", "rate", "at tokens", "here", "outside its range")
    rows = [
      (
        each.title,
        f"{each.rate:.2g}",
        short(each.found_at_tokens),
        f"{each.carried:.2g}",
        "–" if each.beyond == 1 else times(each.beyond),
      )
      for each in one.said
    ]
    yield from Table(head, rows, left=(0,)).lines(indent="    ")
    if min(each.beyond for each in one.said) > _FAR:
      yield from wrapped(
        "No rule for the rate comes near to this training: a guess, to be tried in a short run, or "
        "learning_rate=RATE of your own."
      )
  if one.b2_half_life_tokens:
    yield from wrapped(
      f"adam_b2 {last.adam_b2:.4g}: a half-life of {short(one.b2_half_life_tokens)} tokens, which at "
      "κ times the batch is β2^κ (marek-b2)"
    )
  if "adam_weight_decay" in one.advised:
    yield from wrapped(
      f"adam_weight_decay {last.adam_weight_decay:g}: the timescale of power-lines-timescale"
    )
  yield from wrapped(
    "Found a rate at another batch? learning_rate=RATE rate_found_at=TOKENS carries it over."
    if not advice.asked.wishes.rate_found_at
    else "Rules disagree about large changes: check the rate where it went far."
  )


def _split(advice: Advice) -> Iterator[str]:
  split, here = advice.sizes.split, advice.here
  assert split
  assert here
  yield f"On {here.place}: what fits and is fastest"
  keys = " ".join(f"{key}={value}" for key, value in split.keys.items() if key != "batch_size")
  yield from wrapped(keys)
  step = split.step
  yield from wrapped(
    f"{counted(split.num_microbatches, 'microbatch', 'microbatches')} of "
    f"{advice.sizes.micro_batch:,} samples, "
    f"{about(step)}{step.step_seconds:.3g} s a step, about {gib_of(step.peak_bytes, step.capacity_bytes)}, "
    f"limited by {step.limited_by}"
  )
  if split.stages:
    yield from wrapped(without_stages(advice.asked, here))
  own = advice.asked.own_batch
  exact = float(own or advice.size.tokens / advice.asked.length)
  who = "You ask" if own else "The rules ask"
  yield from wrapped(
    f"{who} for {exact:,.0f} samples; batches near that which divide, held constant, to "
    "the same loss:"
  )
  points = sorted([here, *advice.neighbours], key=lambda one: one.split.batch)
  yield from _points(points, advice)


def _points(points: Sequence[Point], advice: Advice) -> list[str]:
  priced = any(one.cost for one in points)
  unit = "GPU" if all(one.place.chip.is_gpu for one in points) else "chip"
  head = ["slices", "batch", "overhead", "tokens", "steps", "days", f"{unit} h", "used"]
  head += [*(["cost"] if priced else []), ""]
  rows = []
  for one in points:
    mark = "knee" if one.is_knee else ""
    is_taken = one.place == advice.asked.place and one.split.batch == advice.sizes.samples
    rows.append(
      [
        str(one.place),
        f"{one.split.batch:,}",
        f"{one.data_overhead:.2g}",
        short(one.tokens),
        short(one.steps),
        f"{one.days:.3g}",
        short(one.chip_hours),
        used(one.split.step),
        *([short(one.cost) if one.cost else "–"] if priced else []),
        f"{'*' if is_taken else ' '}{mark}",
      ]
    )
  return Table(head, rows, left=(0, len(head) - 1)).lines()


def _frontier(advice: Advice) -> Iterator[str]:
  assert advice.here
  yield "Time against data, to the same loss, constant batches"
  yield from _points([one for curve in advice.curves for one in curve.points], advice)
  yield from wrapped(
    "* the batch that is advised. knee: where a percent of time costs a percent of data. Of "
    "seven batches, those that take more data and no less time than a smaller one are left out. "
    f"≈ not compiled: {advice.here.split.step.rates.chosen:.2g} of the speed that is counted, as the best of many estimates is too good."
  )


def _elsewhere(advice: Advice) -> Iterator[str]:
  if not advice.elsewhere or not advice.here:
    return
  yield "Elsewhere: the batch held constant, to the same loss"
  points = [advice.here, *advice.elsewhere]
  yield from _points(points, advice)
  by_generation = {one.place.generation: advice.asked.price(one.place) for one in points}
  for generation, price in by_generation.items():
    yield from wrapped(f"{generation}: {price if price.price else 'no price is known'}")
  yield from wrapped(on_gpus([one.place for one in points]))


def _limits(advice: Advice, planned: Planned) -> Iterator[str]:
  results = list(limits(advice, planned))
  if results:
    yield "What limits"
    for sentence in results:
      yield from wrapped(sentence)


def _experiment(advice: Advice) -> Iterator[str]:
  one = advice.experiment
  yield "What would narrow the interval most for its price"
  where = f"from a checkpoint after {short(one.at_tokens)} tokens"
  own = " of the run itself, which then continues from it" if one.is_own_run else ""
  share = one.tokens / advice.asked.tokens
  price = f", {one.chip_hours:,.3g} chip hours" if one.chip_hours else ""
  price += f" ({money(one.cost)})" if one.cost else ""
  *first, last = (f"{each:,}" for each in one.batches)
  yield from wrapped(
    f"Branches with {', '.join(first)} and {last} samples a step {where}{own}: "
    f"{short(one.tokens)} tokens, {percent(share)} of the run{price}. The interval is a factor of "
    f"{one.spread_now:.2g}, and would be {one.spread_after:.2g}."
    + (
      ""
      if one.is_worth_it
      else " That is no narrower: the rules agree as well as it would measure."
    )
  )
  for command in one.commands:
    yield from wrapped(command, "    ")
  if "load_full_state_path" in one.commands[0]:
    yield from wrapped(
      "That is the largest branch; for the others, scale the rate by the square root of the batch. Compare "
      "the mean loss of their last quarter (docs/critical_batch.md)."
    )
