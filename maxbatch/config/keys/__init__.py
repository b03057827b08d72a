"""The configuration keys, by section."""
