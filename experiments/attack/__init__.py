"""Fuzzing of the commands: random bad inputs, and commands that are killed and started again."""
