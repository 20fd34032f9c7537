"""Files of a run on disk: its folder, checkpoints with checksums, records."""
