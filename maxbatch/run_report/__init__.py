"""A run, or several, as one page for people."""
