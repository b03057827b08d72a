"""maxbatch: a batch-size-first trainer for language models in JAX."""
