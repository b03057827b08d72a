"""Keys that were given and have no effect in a run, by the conditions that each declares."""

from collections.abc import Mapping

from maxbatch.config.declare import Besides, When
from maxbatch.config.load import assigned
from maxbatch.config.registry import naming_keys
from maxbatch.config.schema import Config, keys_of, to_flat
from maxbatch.errors import UserError


def without_effect(config: Config) -> list[str]:
  """Returns lines about keys that have another value than their default, and no effect.

  Raises:
    UserError: one without which the run would not be what its keys say.
  """
  values = to_flat(config)
  by_reason: dict[tuple[str, str], dict[str, object]] = {}
  for key, one in keys_of(config).items():
    if values[key] == one.default:
      continue
    for condition in one.read_when:
      where, instead = _obstacles(key, condition, values)
      if where and condition.refuses:
        raise UserError(
          f"{assigned({key: values[key]})} has no effect with {where}; leave it out, or set "
          f"{assigned({key: one.default})}; it has one with {instead}"
        )
      if where:
        by_reason.setdefault((where, instead), {})[key] = values[key]
        break
  return [
    f"Without effect: {assigned(keys)}, with {where}; there is one with {instead}"
    for (where, instead), keys in by_reason.items()
  ]


def _obstacles(own: str, condition: When, values: Mapping[str, object]) -> tuple[str, str]:
  """Returns the keys, beside its own, because of which no alternative holds, and what would do; nothing
  if one holds."""
  missing = [
    {key: allowed for key, allowed in each.items() if not _allows(key, allowed, values[key])}
    for each in condition.alternatives
  ]
  if not all(missing):
    return "", ""
  where = {key: values[key] for each in missing for key in each if key != own}
  return assigned(where), assigned({key: _example(allowed) for key, allowed in missing[0].items()})


def _allows(key: str, allowed: object, value: object) -> bool:
  if key in naming_keys() and isinstance(value, str) and ":" in value:
    return True
  if isinstance(allowed, Besides):
    return value not in allowed.excluded
  return value in (allowed if isinstance(allowed, list) else [allowed])


def _example(allowed: object) -> object:
  if isinstance(allowed, Besides):
    return allowed.like
  return allowed[0] if isinstance(allowed, list) else allowed
