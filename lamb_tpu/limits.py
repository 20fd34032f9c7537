"""Upper limits of counts and sizes in tables, configs and options of commands.

Each limit is far above real use, and a list of that many runs, layers or cells fits into memory.
"""

MAX_SEEDS = 1_000  # runs of one setting
MAX_TOGETHER = 64  # runs in one program; Python traces each of them
MAX_SEED = 2**32 - 1  # JAX's random keys use 32 bits of a seed
MAX_TRIALS = 10_000  # points of a search
MAX_RUNS = 100_000  # runs of a table or a sweep
MAX_CELLS = 1_000  # cells of a table
MAX_PROCESSES = 1_024  # processes on one machine
MAX_CPU_DEVICES = 1_024  # simulated devices of one process; each needs threads
MAX_NODES = 100_000  # machines, slices, or accelerators of a node
MAX_SECONDS = 10 * 365 * 86_400  # ten years; timers of the operating system overflow at 292 years
MAX_COUNT = 2**31 - 1  # any other count; a larger one does not fit an int32
# Units of a layer, or words of a vocabulary; a square matrix of this size has fewer than 2^63 bytes.
MAX_WIDTH = 2**24
MAX_LAYERS = 1_000  # Python traces each layer

# Limits of whole numbers in a config, by the last part of the key; MAX_COUNT for all other keys.
# `run.memory` limits the bytes of parameters and batches.
CONFIG = {
    "seed": MAX_SEED,
    "accumulation_steps": 2**20,
    # Models.
    "num_layers": MAX_LAYERS,
    "stages": MAX_LAYERS,
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "num_heads": MAX_WIDTH,
    "features": MAX_WIDTH,
    "transform": MAX_WIDTH,
    "width": MAX_WIDTH,
    "hidden_sizes": MAX_WIDTH,
    "num_classes": MAX_WIDTH,
    "vocab_size": MAX_WIDTH,
    "max_positions": MAX_WIDTH,
    "num_token_types": MAX_WIDTH,
    "rank": MAX_WIDTH,
    # Tasks: hypotheses and words of each decoded sentence, answers of each question.
    "beam": 256,
    "max_length": 4_096,
    "num_best": 10_000,
    "max_answer_length": 4_096,
    # Data.
    "threads": 1_024,
    "pad": 4_096,
    "cutout": 4_096,
    "size": 4_096,
    "policy_layers": 100,
    "sequence_length": 65_536,
    "max_predictions": 65_536,
    "document_stride": 65_536,
    "max_query": 65_536,
    "dupe_factor": 1_000,
    "widths": 1_000,
    "steps": 65_536,
    "eval_streams": 65_536,
    # Iterations of loops that Python or the compiler unrolls.
    "ns_steps": 100,
    "iterations": 100,
    # Stages and programs, each of which is compiled; checkpoints; examples.
    "warmup_stages": 1_000,
    "max_programs": 1_000,
    "keep": 10**6,
    "per_example": 2**20,
    "lipschitz_rows": 2**20,
}
MAX_ITEMS = 10_000  # items of a list in a config
MAX_TEXT = 10_000  # characters of a text in a config
