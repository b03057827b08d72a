"""The rows of scripts/longer_context.py: what is asked for is in them."""

import numpy as np

from scripts.longer_context import ANSWER, KINDS, PARTS, QUESTION, VALUES, Needles


def test_each_question_has_its_needles_value_for_an_answer_and_counts_once():
  weights = []
  for quarter in (None, *range(PARTS)):
    rows = Needles(0, 9, 128, quarter).rows(np.arange(5))
    weights.append(rows["weights"])
    np.testing.assert_array_equal(rows["inputs"][:, 1:], rows["targets"][:, :-1])
    for inputs, targets, counts in zip(rows["inputs"], rows["targets"], weights[-1], strict=True):
      needles = dict(divmod(token, VALUES) for token in inputs.tolist() if token < QUESTION)
      asked = np.flatnonzero((inputs >= QUESTION) & (inputs < ANSWER))
      assert sorted(inputs[asked] - QUESTION) == sorted(needles) == list(range(KINDS))
      wanted = [ANSWER + needles[kind] for kind in (inputs[asked] - QUESTION).tolist()]
      assert targets[asked].tolist() == wanted
      assert set(np.flatnonzero(counts)) <= set(asked)
  assert (weights[0].sum(1) == KINDS).all()
  np.testing.assert_array_equal(np.sum(weights[1:], 0), weights[0])
