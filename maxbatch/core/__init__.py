"""The core: the plan of a batch, what a loss hands out, its sums over any split, and the step."""
