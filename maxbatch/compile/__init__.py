"""Before a run: checks, the cache of compiled programs, the compiled step as a file."""
