"""Text: documents -> sentences -> WordPiece ids -> ArrayRecord shards, and reading those."""
