"""Measurements for an accelerator that is available for a few minutes, the most valuable first."""
