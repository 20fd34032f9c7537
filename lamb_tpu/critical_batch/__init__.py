"""The command `critical_batch`: short branches of a run at several batches."""
