"""Tables of papers as data, their runs, and what was measured; `loading` has the format."""
