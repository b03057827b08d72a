"""Tokens in the blocks of queries and keys that the attention kernel for TPUs (splash attention) visits.

Chosen by the instructions that libtpu 0.0.51 schedules for a block, `scripts/attention_blocks.py`
(docs/compiled_step.md): a visit takes 140 to 410 cycles before it multiplies, and a row of blocks some to begin and
to end, so that larger blocks cost less in long rows, though more of what lies above the diagonal is computed.
"""

LARGEST = 1024
"""Blocks of 2,048 tokens compute more above the diagonal than they spare, or exceed the vector memory."""
USUAL = 512
"""What fits with heads as wide as 256 in float32; also the keys that are multiplied at once."""
_BLOCKS = (LARGEST, USUAL, 384, 256, 128)
_SHORTEST = {
  "TPU v4": 2048,
  "TPU v5 lite": 4096,
  "TPU v5": 2048,
  "TPU v6 lite": 2048,
  "TPU7x": 2048,
}
"""By what jax calls a device, the tokens of a row from which on the largest blocks pay; on others they are not used."""
_WIDEST = 512
"""Bytes of a head with which the largest blocks fit into vector memory."""


def attention_block(device_kind: str, length: int, part: int, window: int, head_bytes: int) -> int:
  """Returns the tokens of a block, the largest that pays and divides `part`.

  Args:
    device_kind: as jax calls the device; of GPUs, whose kernels choose for themselves, what is assumed.
    length: tokens of a row.
    part: tokens that blocks must divide, a multiple of 128: those of the row, or of a device's shares of it.
    window: keys that a query sees; 0: all before it. In a narrow one large blocks are mostly masked.
    head_bytes: of a head's query in the computation's format.
  """
  is_narrow = 0 < window < 2 * LARGEST
  pays = length >= _SHORTEST.get(device_kind, length + 1) and not is_narrow
  largest = LARGEST if pays and head_bytes <= _WIDEST else USUAL
  return next(block for block in _BLOCKS if block <= largest and part % block == 0)


ONE_BACKWARD_KERNEL = ("TPU v6 lite", "TPU7x")
"""Devices where one kernel for all gradients is faster than two, by its instructions and the published recipes
for them; those for a v5p say the opposite."""
WHOLE_ROWS = (1024, 2048)
"""Tokens of rows for which it is: of more blocks than one, parts of the queries' gradient would be added up."""


def joint_block(device_kind: str, length: int, part: int, window: int, head_bytes: int) -> int:
  """Returns the tokens of a block of the backward kernel that gives all gradients; 0: two kernels give them.

  Arguments are those of `attention_block`.
  """
  is_known = device_kind in ONE_BACKWARD_KERNEL and head_bytes <= _WIDEST // 2
  return length if is_known and length == part and length in WHOLE_ROWS and not window else 0
