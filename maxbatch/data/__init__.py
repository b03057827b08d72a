"""The data layer: from files to batches on devices, the same samples in the same order always."""
