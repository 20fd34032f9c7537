"""From a config to a run: checks, the resolved recipe, phases and initial weights."""
