"""Whether the data keep up with the step, and with which settings."""
