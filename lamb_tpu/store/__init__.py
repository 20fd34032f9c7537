"""Files of a run: its folder, its checkpoints with checksums, and its records."""
