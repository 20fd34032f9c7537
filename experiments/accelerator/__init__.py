"""Measurements in order of value, for an accelerator that is available for a few minutes."""
