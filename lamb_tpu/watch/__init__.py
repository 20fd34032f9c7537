"""Observers of a run: guards, best, target, rates, progress, logs."""
