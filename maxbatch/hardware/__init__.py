"""Devices, TPU slices, the mesh and how arrays lie on it, processes and their agreement."""
