"""The command `critical_batch`: measures a run's critical batch size by short branches of the run."""
