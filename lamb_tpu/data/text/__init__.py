"""Text data: preparation of raw text as token ids, and the data sets that read the ids."""
