"""Costs of compiled programs: operations, traffic, and the TPU slices they are compiled for."""
