"""maxbatch.train in which process 1 exchanges two rows that it has read for step 3."""

import sys
from unittest import mock

import jax

from maxbatch.data.placement import RowPlacement
from maxbatch.hardware.processes import leave_together
from maxbatch.train import main

STAGE, STAGED = RowPlacement.stage, []


def stage(place, read, ids):
  """`RowPlacement.stage`, with the fault."""
  if place.row_dim == 1:  # Not those of an evaluation.
    STAGED.append(ids)
    if len(STAGED) == 3 and jax.process_index() == 1:
      read = {1: {name: array.copy() for name, array in read[1].items()}}
      for array in read[1].values():
        array[0, [3, 5]] = array[0, [5, 3]]
  return STAGE(place, read, ids)


if __name__ == "__main__":
  mock.patch.object(RowPlacement, "stage", stage).start()
  leave_together(main(sys.argv[1:]))
