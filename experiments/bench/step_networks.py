"""The networks of `step`, each as a config of this package and as a PyTorch module.

PyTorch is imported only when a module is built, because a separate extra installs PyTorch.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lamb_tpu.spec import Spec, changed

Modules = Callable[[Any], Any]  # called with the package torch, returns a module


class Network(NamedTuple):
    """A network and the batch it is timed with.

    Attributes:
      model: fields of config.model.
      batch: examples per update.
      pixels: height and width of the images; 0 for text.
      channels: channels of the images.
      peer: function from the package torch to the same network as a PyTorch module; raises ImportError
        if a further package is missing.
    """

    model: Mapping[str, Any]
    batch: int
    pixels: int
    channels: int
    peer: Modules


def config_of(network: Network) -> Spec:
    """Returns a config with the network, LAMB, and one batch of random examples."""
    changes = {
        "batch_size": network.batch,
        "duration": "1000 steps",
        "schedule.decay": "constant",
        "model": network.model,
        "optimizer": {"name": "lamb", "learning_rate": 1e-3, "rules": "no_bias_no_norm"},
        "task": {"name": "classification", "input_std": 255.0},
        "data.name": "experiments.bench.step_data:images",
        "data.train_split": "all",
        "data.eval_split": "all",
        "data.options": {
            "size": network.pixels,
            "channels": network.channels,
            "count": network.batch,
        },
    }
    if not network.pixels:
        changes |= {
            "task": {"name": "masked_lm"},
            "data.name": "experiments.bench.step_data:masked_text",
            "data.options": {"count": network.batch},
        }
    return changed(Spec(), changes)


def lenet(torch: Any) -> Any:
    """Returns `lamb_tpu.models.lenet.LeNet`, the network of the LAMB author's MNIST code, in PyTorch."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 1024),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(1024, 10),
    )


def lenet5(torch: Any) -> Any:
    """Returns LeNet-5, `lamb_tpu.models.lenet.LeNet5`."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def davidnet(torch: Any) -> Any:
    """Returns DavidNet of width 64, `lamb_tpu.models.davidnet.DavidNet`."""
    nn = torch.nn

    def layer(inputs: int, outputs: int, *more: Any) -> Any:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), *more)

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.branch = nn.Sequential(layer(channels, channels), layer(channels, channels))

        def forward(self, x: Any) -> Any:
            return x + self.branch(x)

    pool = nn.MaxPool2d
    return nn.Sequential(
        layer(3, 64),
        layer(64, 128, pool(2)),
        Residual(128),
        layer(128, 256, pool(2)),
        layer(256, 512, pool(2)),
        Residual(512),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10, bias=False),
    )


def of_timm(name: str) -> Modules:
    """Returns a function that builds one of timm's networks."""

    def build(torch: Any) -> Any:
        del torch
        return importlib.import_module("timm").create_model(name, num_classes=10)

    return build


def bert(layers: int, width: int, batch: int) -> Network:
    """Returns a BERT with attention heads of width 64 and both pre-training heads."""
    heads, words = width // 64, 8192

    def build(torch: Any) -> Any:
        del torch
        transformers = importlib.import_module("transformers")
        return transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=words,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                hidden_size=width,
                num_attention_heads=heads,
            )
        )

    model = {
        "name": "bert",
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "intermediate_size": 4 * width,
        "vocab_size": words,
        "dtype": "float32",
    }
    return Network(model, batch, 0, 0, build)


NETWORKS: dict[str, Network] = {
    "LeNet": Network({"name": "lenet"}, 1024, 28, 1, lenet),
    "LeNet-5": Network({"name": "lenet5"}, 1024, 28, 1, lenet5),
    "DavidNet": Network({"name": "davidnet"}, 512, 32, 3, davidnet),
    "ResNet-18": Network(
        {"name": "resnet18", "num_classes": 10, "dtype": "float32"}, 256, 64, 3, of_timm("resnet18")
    ),
    "ResNet-50": Network(
        {"name": "resnet50", "num_classes": 10, "dtype": "float32"}, 16, 224, 3, of_timm("resnet50")
    ),
    "EfficientNet-B0": Network(
        {"name": "efficientnet_b0", "num_classes": 10, "dtype": "float32"},
        16,
        224,
        3,
        of_timm("efficientnet_b0"),
    ),
    "BERT": bert(4, 256, 32),
    "BERT-Base": bert(12, 768, 32),
    "BERT-Large": bert(24, 1024, 32),
}
_TOO_SLOW = ("BERT-Base", "BERT-Large")  # for a CPU
# The networks measured on each platform.
PLATFORMS = {"cpu": [name for name in NETWORKS if name not in _TOO_SLOW], "gpu": list(NETWORKS)}
