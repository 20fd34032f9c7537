"""Fuzzing of the commands: bad inputs drawn from a seed, and commands that are killed and started again."""
