"""Runs of several processes, and the signals that end a run."""
