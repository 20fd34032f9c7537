"""Batch sizes that change during training: statistics of gradients, and rules that use them.

Statistics are sums over rows, microbatches and devices, from which formulas compute a few numbers.
From these numbers a rule, see `rules.RULES`, computes the next batch size on the host. This package
is independent of the step, the mesh and the config.
"""
