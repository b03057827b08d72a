"""Which prompt a step takes: epochs of prompts, and what is left at the end of one.

The prompts of a run are one stream, of which every step takes the next batch_size. Where an epoch
has no whole number of batches, leftover_prompts says what becomes of the rest: `carry`, a batch takes
the last prompts of an epoch and the first of the next; `drop`, they are not trained on in this epoch;
`error`, it is refused. Nothing is stored: the prompt at a place of the stream is a function of it.
"""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from maxbatch.core.keys import counted
from maxbatch.core.solve import divisors
from maxbatch.errors import UserError

Leftovers = Literal["carry", "drop", "error"]


@dataclasses.dataclass(frozen=True)
class PromptEpochs:
  """The stream of prompts of a run."""

  num_prompts: int
  """Prompts of an epoch; −1: there is no end."""
  batch_size: int
  leftovers: Leftovers

  @property
  def prompts_taken(self) -> int:
    """The prompts that an epoch gives to the stream; −1: there is no end."""
    if self.num_prompts == -1 or self.leftovers != "drop":
      return self.num_prompts
    return self.num_prompts - self.dropped_per_epoch

  @property
  def dropped_per_epoch(self) -> int:
    """The prompts that no step takes in an epoch."""
    if self.num_prompts == -1 or self.leftovers != "drop":
      return 0
    return self.num_prompts % self.batch_size

  def place(self, index: int) -> tuple[int, int]:
    """Returns the epoch of the prompt at `index` of the stream, and its place in that epoch."""
    return (0, index) if self.num_prompts == -1 else divmod(index, self.prompts_taken)

  def epochs(self, prompts: int) -> Fraction:
    """Returns how many epochs so many prompts of the stream are; 0 where an epoch has no end."""
    return Fraction(0) if self.num_prompts == -1 else Fraction(prompts, self.prompts_taken)

  def dropped(self, prompts: int) -> int:
    """Returns how many prompts are dropped at the ends of the epochs that `prompts` complete."""
    return math.floor(self.epochs(prompts)) * self.dropped_per_epoch

  def batches_of_two_epochs(self, prompts: int) -> int:
    """Counts, of the batches of so many prompts, those that take prompts of two epochs."""
    if self.num_prompts == -1:
      return 0
    ends = range(self.prompts_taken, prompts, self.prompts_taken)
    # An epoch ends inside a batch unless it ends with one, as every so many epochs do.
    whole = math.lcm(self.prompts_taken, self.batch_size) // self.prompts_taken
    return len(ends) - len(ends) // whole


def prompt_epochs(
  num_prompts: int,
  batch_size: int,
  leftovers: Leftovers,
  unit: int = 1,
  assigned: Callable[[int], str] = "batch_size={}".format,
) -> PromptEpochs:
  """Returns the stream of prompts.

  For what is suggested, batch_size is a multiple of `unit` and given as `assigned` writes it, key=value.

  Raises:
    UserError: an epoch has fewer prompts than a step takes, or leaves some and may not.
  """
  if num_prompts == -1:
    return PromptEpochs(num_prompts, batch_size, leftovers)
  if batch_size > num_prompts:
    fitting = num_prompts // unit * unit
    smaller = f"{assigned(fitting)} or " if fitting else ""
    raise UserError(
      f"{assigned(batch_size)} takes {batch_size} different prompts in a step, and an epoch has "
      f"{num_prompts}; for example {smaller}num_prompts={batch_size}, where there are more"
    )
  rest = num_prompts % batch_size
  if rest and leftovers == "error":
    near = [size for size in divisors(num_prompts) if size % unit == 0]
    around = [*[n for n in near if n < batch_size][-1:], *[n for n in near if n > batch_size][:1]]
    sizes = "".join(f"{assigned(size)}, or " for size in around)
    raise UserError(
      f"leftover_prompts=error: an epoch of {num_prompts} prompts leaves {counted(rest, 'prompt')} "
      f"after its last batch of {batch_size}; for example {sizes}num_prompts={num_prompts - rest}, "
      "or leftover_prompts=carry, which lets the next epoch fill up the batch"
    )
  return PromptEpochs(num_prompts, batch_size, leftovers)
