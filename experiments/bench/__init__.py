"""Benchmarks of time, traffic and memory; training results are in the tables instead."""
