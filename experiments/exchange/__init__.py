"""Predicts when compressed gradient exchange pays, on fast and slow networks."""
