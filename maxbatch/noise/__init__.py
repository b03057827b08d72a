"""The gradient noise scale: what is measured each step, what it means, and what follows from it."""
