"""Hugging Face's models: what of a config.json and of its tensors is what here. Reads no weights."""
