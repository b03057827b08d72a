"""Research on top of runs: the critical batch size by branches from a checkpoint."""
