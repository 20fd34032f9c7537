"""Benchmarks: times, traffic and memory, not results of training runs, so not in tables."""
