"""The command `critical_batch`: measures a run's critical batch size with short branches of the run."""
