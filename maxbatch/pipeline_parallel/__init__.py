"""Pipelines over the layers: the timetable as data, its rules, its cost, its drawings. No jax."""
