"""Formats of files, one file each; maxbatch.data.formats.registry names them."""
