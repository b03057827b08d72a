"""Formats of files, one file each; maxbatch.data.record_files names them."""
