"""Network operations that run faster on some platforms than JAX's implementations."""
