"""The device mesh, placement of arrays on it, and the steps compiled for it."""
