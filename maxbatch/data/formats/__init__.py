"""Formats of files; maxbatch.data.record_files names them."""
