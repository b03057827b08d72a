"""The core: what a loss hands out, its sums over any split of a batch, and the step made of them."""
