"""One file per family, registered in maxbatch/hugging_face/registry.py."""
