"""Tables of papers as data, their runs and their results; `loading` describes the file format."""
