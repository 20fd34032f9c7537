"""Faulty user modules for tests, and a config with four correct custom components."""

import pathlib
import textwrap

from tests import package_pages

# The faulty modules by name.
BROKEN = {
    "my_failing": "import math\n\nmath.sqrt(-1)\n",
    "my_importing": "import absent_library\n",
    "my_exiting": "raise SystemExit(3)\n",
    "my_misspelt": "def f(:\n",
    "my_broken": """
        import dataclasses

        import flax.linen as nn
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        from lamb_tpu.data import ArraySource, BaseSource, FieldSpec
        from lamb_tpu.models import Model
        from lamb_tpu.tasks.classification import Classification

        NUMBER = 3

        def returns_number(width: int = 3):
            return width

        def refuses(width: int):
            raise ValueError("the width is odd")

        def without_params():
            return Model(lambda key, inputs: {"weights": jnp.ones(3)}, lambda *a, **k: None)

        def without_state():
            return Model(
                lambda key, inputs: {"params": {"w": jnp.ones((64, 10))}},
                lambda v, x, *, train, key=None: x.reshape(len(x), -1) @ v["params"]["w"],
            )

        def in_a_list():
            def init(key, inputs):
                return {"params": [
                    (0.1 * jax.random.normal(key, (64, 10)), jnp.zeros(10, jnp.bfloat16)),
                    {"scale": jnp.ones(())},
                ], "calls": {"count": jnp.zeros((), jnp.int32)}}

            def apply(variables, inputs, *, train, key=None):
                (kernel, bias), last = variables["params"]
                x = (inputs.reshape(len(inputs), -1) @ kernel + bias) * last["scale"]
                return x, {"calls": {"count": variables["calls"]["count"] + train}}

            return init, apply

        class Untrained(nn.Module):
            @nn.compact
            def __call__(self, inputs):
                return nn.Dense(10)(inputs)

        class Fails(nn.Module):
            width: int = 3

            @nn.compact
            def __call__(self, inputs, train):
                return nn.Dense(self.widht)(inputs)

        @dataclasses.dataclass
        class Lossless:
            model: Model

            def check(self, source): ...

        class Other(Classification):
            def loss(self, params, model_state, batch, key):
                raise KeyError("margin")

        def without_split(size: int = 3):
            return ArraySource("x", {"image": np.ones((size, 2))}, None)

        def no_source(split):
            return [1, 2, 3]

        def empty(split):
            return ArraySource("x", {"image": np.ones((0, 2))}, None)

        class Shapes(BaseSource):
            name = "shapes"
            element_spec = {"image": FieldSpec((2,), np.dtype(np.float32))}

            def __init__(self, split, source_dir=None, missing: int = 3): ...

            def __len__(self):
                return 3

            def gather(self, indices, epochs=0):
                return {"image": np.ones((len(indices), 3), np.float32)}

        def rateless(b1: float = 0.9):
            return optax.adam(0.1, b1)

        def not_optax(learning_rate, b1: float = 0.9):
            return 3

        def whole(learning_rate, b1: float = 0.9):
            return optax.adam(learning_rate, b1)
    """,
    # Code that ends the command, or raises exceptions that `except Exception` does not catch.
    "my_leaving": """
        import sys

        import jax.numpy as jnp
        import numpy as np
        import optax

        from lamb_tpu.data import ArraySource, BaseSource, FieldSpec
        from lamb_tpu.errors import Preempted
        from lamb_tpu.models import Model
        from lamb_tpu.tasks.classification import Classification

        class Abort(BaseException): ...

        def made():
            sys.exit(0)

        def aborted():
            raise Abort("enough")

        def closed():
            raise GeneratorExit

        def preempted():
            raise Preempted("the machine is needed")

        def init():
            return Model(lambda key, inputs: sys.exit(0), lambda *a, **k: None)

        def apply():
            return Model(
                lambda key, inputs: {"params": {"w": jnp.ones((64, 10))}},
                lambda v, x, *, train, key=None: sys.exit(0),
            )

        class Loss(Classification):
            def loss(self, params, model_state, batch, key):
                raise Abort("in loss")

        class Metrics(Classification):
            def evaluate(self, params, model_state, batch):
                sys.exit(0)

        class Examples(BaseSource):
            name, num_classes = "examples", 10
            element_spec = {
                "image": FieldSpec((8, 8, 1), np.dtype(np.uint8)),
                "label": FieldSpec((), np.dtype(np.int32)),
            }

            def __init__(self, split, training, allowed: int = 0):
                self.allowed = allowed if training else 10**9

            def __len__(self):
                return 200

            def gather(self, indices, epochs=0):
                self.allowed -= 1
                if self.allowed < 0:
                    sys.exit(0)
                rows = len(indices)
                return {
                    "image": np.ones((rows, 8, 8, 1), np.uint8), "label": np.zeros(rows, np.int32),
                }

        def optimizer(learning_rate):
            sys.exit(0)

        def update(learning_rate):
            return optax.GradientTransformation(lambda params: (), lambda *given: sys.exit(0))
    """,
    # Optimizers whose update returns a wrong value.
    "my_updates": """
        import jax
        import jax.numpy as jnp
        import optax

        def _make(update, init=lambda params: {"count": jnp.zeros(())}):
            return optax.GradientTransformation(init, update)

        def _map(function):
            return _make(lambda g, s, p=None: (jax.tree.map(function, g), s))

        def none(learning_rate):
            return _make(lambda g, s, p=None: None)

        def no_updates(learning_rate):
            return _make(lambda g, s, p=None: (None, s))

        def tree(learning_rate):
            return _make(lambda g, s, p=None: ({"all": jax.tree.leaves(g)}, s))

        def shape(learning_rate):
            return _map(lambda g: g[None])

        def whole(learning_rate):
            return _map(lambda g: jnp.sign(g).astype(jnp.int32))

        def grows(learning_rate):
            return _make(lambda g, s, p=None: (g, {**s, f"g{len(s)}": jnp.zeros(3)}))

        def lists(learning_rate):
            return _make(lambda g, s, p=None: (g, [*s, 1.0]), lambda params: [jnp.zeros(())])

        def widens(learning_rate):
            return _make(lambda g, s, p=None: (g, {"count": jnp.zeros(2)}))

        def casts(learning_rate):
            return _make(lambda g, s, p=None: (g, {"count": s["count"].astype(jnp.bfloat16)}))
    """,
}

# A config file with four custom components.
MINE = """
from ml_collections import ConfigDict

from lamb_tpu.config import base_config

def get_config(argument=None):
    config = base_config()
    config.data.name = "my_arrays:rings"
    config.model = ConfigDict({"name": "my_jax:two_layers", "num_classes": 2})
    config.task = ConfigDict({"name": "my_tasks:SquaredError", "scale": 1.0})
    config.optimizer = ConfigDict(
        {"name": "my_optimizers:sign_momentum", "learning_rate": 0.01}
    )
    config.duration, config.checkpoint.every = "8 steps", "4 steps"
    config.log.tensorboard = False
    return config
"""


def write(folder: pathlib.Path) -> None:
    for package in ("models", "tasks", "data", "optim"):
        package_pages.write_modules(package_pages.text(package), folder)
    for name, code in BROKEN.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
    (folder / "mine.py").write_text(MINE)
