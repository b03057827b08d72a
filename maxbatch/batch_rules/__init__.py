"""Published rules of the batch size and of what follows it, as data."""
