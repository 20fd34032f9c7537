"""Batch sizes that training decides: statistics of gradients, and rules that read them.

Statistics are sums over rows, microbatches and devices; a formula turns the sums into a few
numbers. A rule, `rules.RULES`, makes the next batch size of those numbers on the host. Nothing here
knows a step, a mesh or a config.
"""
