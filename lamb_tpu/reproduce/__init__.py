"""Tables of papers as data, their runs, and what was measured; see `lamb_tpu.reproduce.tables`."""
