"""Weights of Hugging Face models: read into parameters, and written from them, tensor by tensor."""
