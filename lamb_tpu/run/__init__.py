"""A config made concrete: checks, the resolved recipe, phases and first weights."""
