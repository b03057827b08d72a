"""Configuration: YAML and key=value at the edge, frozen dataclasses inside."""
