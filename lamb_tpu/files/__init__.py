"""Reading, writing and locking of files on this machine and in buckets."""
