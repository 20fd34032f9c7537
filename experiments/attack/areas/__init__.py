"""Generators of bad inputs, one module for each area.

Each module has `draw(rng, prepared) -> Input`, which returns a working command with one change.
"""
