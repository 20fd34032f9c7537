"""Large-batch training in JAX: LAMB, LARS and LEGW, from a laptop to a TPU pod."""

__version__ = "0.2.0"
