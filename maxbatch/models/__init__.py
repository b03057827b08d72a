"""Models: functions from rows of tokens to hidden states, as flax.nnx modules."""
