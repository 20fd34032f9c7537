"""Plans of a run on a TPU slice, made without one; `python -m lamb_tpu.plan` prints them."""
