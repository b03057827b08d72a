"""What a run writes and shows, whole files and their names, and where caches are."""
