"""What a run writes and shows: metrics, progress; and where caches are."""
