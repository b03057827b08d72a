"""Batch arithmetic: the only folder in which batch sizes are multiplied and divided. No jax."""
