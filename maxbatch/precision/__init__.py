"""Number formats: which values are kept in which, how they are rounded, and the loss scale."""
