"""Starts runs: processes on this machine, TPU VMs, GKE, SLURM. README.md lists the commands."""
