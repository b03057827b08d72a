"""Families of models, registered in maxbatch/hugging_face/registry.py; those that differ little share a file."""
