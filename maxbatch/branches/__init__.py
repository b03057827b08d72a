"""Branches from one checkpoint with other batches: which batch still trains as far per token."""
