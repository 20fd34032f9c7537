"""Files that users name and files that a run writes, with one-sentence errors."""
