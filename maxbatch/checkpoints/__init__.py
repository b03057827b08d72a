"""Checkpoints: Orbax, the record beside the arrays, fingerprints."""
