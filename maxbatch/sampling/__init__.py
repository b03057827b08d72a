"""Texts written by a model, token by token."""
