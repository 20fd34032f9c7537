"""Eight simulated CPU devices for every test, set before jax is imported."""

import os

# The CPU runtime sizes its thread pool by the cores it sees; with fewer threads than simulated
# devices the all-reduce of a step can wait for ever. NPROC tells it to start enough.
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
