"""From a question (this model, these tokens, that slice) to a plan. No jax.

Read asked.py (the question), batch_size.py (rules and measurements joined), ramp.py, settings.py,
slices.py (what fits and how fast), advice.py (all of it), then report.py (how it is said).
"""
