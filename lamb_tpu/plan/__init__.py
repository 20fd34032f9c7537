"""Plans a run on a TPU slice without a TPU; `python -m lamb_tpu.plan` prints the plan."""
