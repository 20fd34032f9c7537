"""What a run keeps on disk: its folder, checkpoints with checksums, records."""
