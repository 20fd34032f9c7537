"""Several processes as one run, and the signals that end a run."""
