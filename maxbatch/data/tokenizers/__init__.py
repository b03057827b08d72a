"""Tokenizers of other libraries, one file each; maxbatch.data.registry names them."""
