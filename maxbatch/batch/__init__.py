"""Batch sizes: the only place where they are multiplied and divided."""
