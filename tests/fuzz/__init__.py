"""A composition fuzzer: any combination of features against one device in float64.

`python -m tests.fuzz` draws cases, `running` trains each case on simulated devices, and `oracle`
computes what the case must give.
"""
