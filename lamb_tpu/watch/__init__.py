"""Observers of a run: guards, best checkpoint, target, throughput, progress, logs."""
