"""Names of registered things: found, or refused the same way everywhere."""

import dataclasses

import pytest

from maxbatch.config.load import load_config
from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.models.registry import build_model


def test_a_registered_name_is_found():
  assert registered("opt_type", "sgd", {"adamw": 1, "sgd": 2}) == 2


def test_a_name_that_resembles_nothing_gets_the_list():
  with pytest.raises(UserError) as caught:
    registered("opt_type", "zzz", {"adamw": 1, "sgd": 2})
  assert str(caught.value) == "opt_type=zzz: there is no such opt_type. Known: adamw, sgd."


def test_an_unknown_model_is_refused_with_the_nearest_name():
  model = load_config(["config=base"]).model
  with pytest.raises(UserError) as caught:
    build_model(dataclasses.replace(model, decoder_block="Transfomer"), 16)
  assert str(caught.value) == (
    "decoder_block=Transfomer: there is no such decoder_block. Did you mean transformer? "
    "Known: transformer."
  )
