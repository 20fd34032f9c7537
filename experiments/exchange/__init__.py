"""When compressed gradient exchange pays, on fast and slow networks."""
