"""Benchmarks of time, traffic and memory."""
