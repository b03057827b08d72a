"""The step and what it is made of, and the loop around it."""
