"""`jit` that compiles small programs in half the time; they run slower, which tests do not feel."""

import functools

import jax

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

jit = functools.partial(jax.jit, compiler_options=OPTIONS)
