"""What one start does: resolve what is open, then validate, compile or train."""
