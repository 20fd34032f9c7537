"""Costs of compiled programs: operations, traffic, and the TPU slices that they are compiled for."""
