"""Batch arithmetic: the only folder in which batch sizes are multiplied and divided. No jax.

Read solve.py (the sizes of a step), schedule.py (how they change), then plan.py (all of a run).
"""
