"""Networks as two pure functions, `init` and `apply`, chosen by name.

The trainer and the tasks see nothing else of a model, so a network written in Linen (all shipped
ones), NNX or plain JAX fits alike: `linen` adapts the first, `Model(init, apply)` takes any other.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from lamb_tpu import own
from lamb_tpu.errors import UserError
from lamb_tpu.models import efficientnet, resnet
from lamb_tpu.models.bert_network import DTYPES, BertConfig
from lamb_tpu.models.davidnet import DavidNet
from lamb_tpu.models.groups import describe_groups
from lamb_tpu.models.lenet import LeNet, LeNet5
from lamb_tpu.models.mlp import MLP
from lamb_tpu.models.norm import MOMENTS

Variables = Mapping[str, Any]


class Model(NamedTuple):
    """A network.

    Attributes:
      init: `(key, inputs) -> variables`; a mapping with 'params' and, where the network keeps
        statistics, further collections such as 'batch_stats'.
      apply: `(variables, inputs, *, train, key) -> (outputs, state)`; `state` holds the
        collections other than 'params', updated when `train` is true; of 'batch_moments', which is
        given empty, BatchNorm makes what `norm.combine_moments` takes. `key` drives dropout.
      vocab_size, max_positions: of a network that reads text: the words it knows, and the longest
        sequence it takes; None for others.
      num_heads: of a network that splits its sequences over the mesh axis 'sequence'; None for
        others.
      stacked: regex over the paths of the parameters that stack layers along their first axis;
        None: there are none.

    `inputs` are one array, or for a network that reads text the mapping of a batch's fields.
    """

    init: Callable[[jax.Array, Any], Variables]
    apply: Callable[..., tuple[Any, Variables]]
    vocab_size: int | None = None
    max_positions: int | None = None
    num_heads: int | None = None
    stacked: str | None = None


# Linen modules, and a config that makes one.
MODULES: dict[str, type[nn.Module] | type[BertConfig]] = {
    "bert": BertConfig,
    "davidnet": DavidNet,
    "efficientnet_b0": efficientnet.EfficientNetB0,
    "efficientnet_b1": efficientnet.EfficientNetB1,
    "efficientnet_b2": efficientnet.EfficientNetB2,
    "efficientnet_b3": efficientnet.EfficientNetB3,
    "efficientnet_b4": efficientnet.EfficientNetB4,
    "efficientnet_b5": efficientnet.EfficientNetB5,
    "efficientnet_b6": efficientnet.EfficientNetB6,
    "efficientnet_b7": efficientnet.EfficientNetB7,
    "lenet": LeNet,
    "lenet5": LeNet5,
    "mlp": MLP,
    "resnet18": resnet.ResNet18,
    "resnet34": resnet.ResNet34,
    "resnet50": resnet.ResNet50,
    "resnet101": resnet.ResNet101,
    "resnet152": resnet.ResNet152,
}


def linen(module: nn.Module) -> Model:
    """Adapts a Linen module whose `__call__` takes `(inputs, train: bool)`.

    Let it drop values by `models.dropout.Dropout`: inside shard_map and in microbatches the mask of
    `nn.Dropout` would be the same for every part of the batch.
    """

    def init(key: jax.Array, inputs: Any) -> Variables:
        return module.init(key, inputs, train=False)

    def apply(
        variables: Variables, inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Variables]:
        collections = [name for name in variables if name != "params"]
        rngs = None if key is None else {"dropout": key}
        if train and collections:
            return module.apply(variables, inputs, train=True, rngs=rngs, mutable=collections)
        outputs = module.apply(variables, inputs, train=train, rngs=rngs)
        return outputs, {name: variables[name] for name in collections}

    return Model(init, apply)


def build(name: str, axis_name: Sequence[str] = (), **fields: Any) -> Model:
    """The named network with its fields set, for example `build('lenet', num_classes=10)`.

    Args:
      name: one of `MODULES`, or 'package.module:Name' of a Linen or NNX module or of a function
        that returns a `Model`, see README.md of this folder.
      axis_name: inside shard_map or pmap the mesh axes that split the batch, outermost first; for
        the layers that name their collectives.
      **fields: the network's own, as in config.model.

    Raises:
      UserError: an unknown name or field; the message lists the known ones.
    """
    module = _module(name, fields, axis_name)
    if isinstance(module, Model):
        return module
    if axis_name and hasattr(module, "axis_name"):
        module = module.clone(axis_name=tuple(axis_name))
    model, config = linen(module), getattr(module, "config", None)
    if isinstance(config, BertConfig):
        return model._replace(
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            num_heads=config.num_heads,
            stacked="^encoder/layers/" if config.scan_layers else None,
        )
    return model


def batch_norm_groups(config: Mapping[str, Any], batch: int, devices: int) -> tuple[int, str]:
    """Over how many devices a group of BatchNorm is spread, and a line that tells its size.

    Args:
      config: config.model, that is the name and the fields.
      batch: examples of one forward pass over all devices, that is of a microbatch.
      devices: among which they are split evenly.

    Returns:
      The devices that share a group, and the line; 1 and '' where the model has no BatchNorm.

    Raises:
      UserError: as `build`.
      ValueError: the config's group_size does not fit; the message says what would.
    """
    fields = dict(config)
    module = _module(fields.pop("name"), fields)
    if isinstance(module, Model):
        return 1, ""
    if not hasattr(module, "group_size") or not getattr(module, "batch_norm", True):
        return 1, ""
    return describe_groups(module.group_size, batch, devices)


def own_fields(name: str) -> dict[str, dataclasses.Field]:
    """The fields of config.model for the named network, with their types and defaults.

    Raises:
      UserError: an unknown name; the message lists the known ones.
    """
    # The axes of the mesh are not the model's to choose.
    hidden = ("parent", "name", "axis_name")
    if own.is_own(name):
        return own.fields(own.find(name, "config.model.name"), (*hidden, "rngs"))
    if name not in MODULES:
        raise UserError(f"config.model.name is {name!r}; known models: {', '.join(MODULES)}")
    return {f.name: f for f in dataclasses.fields(MODULES[name]) if f.name not in hidden}


def _module(
    name: str, fields: Mapping[str, Any], axis_name: Sequence[str] = ()
) -> nn.Module | Model:
    """The named module with its fields set, checked as `build` says."""
    known = own_fields(name)
    if own.is_own(name):
        own.check("config.model", "model", name, known, fields)
        return _own_module(name, dict(fields), axis_name)
    module = MODULES[name]
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.model.{key} is no field of model {name!r}; known: {', '.join(known)}"
            )
    num_classes = fields.get("num_classes", 1)
    if type(num_classes) is not int or num_classes < 1:
        raise UserError(
            f"config.model.num_classes is {num_classes!r}; it must be a whole number of at least 1"
        )
    if fields.get("dtype", DTYPES[0]) not in DTYPES:
        raise UserError(
            f"config.model.dtype is {fields['dtype']!r}; known: {', '.join(DTYPES)}"
        )
    made = module(**fields)
    return made.module() if isinstance(made, BertConfig) else made


def _own_module(
    name: str, fields: dict[str, Any], axis_name: Sequence[str]
) -> nn.Module | Model:
    """A user's own network: a Linen module, or the functions of any other."""
    make: Any = own.find(name, "config.model.name")
    told = f"config.model.name is {name!r}"
    takes = {parameter.name for parameter in own.parameters(make)}
    with own.making(name, "config.model.name"):
        if isinstance(make, type) and issubclass(make, nn.Module):
            if "train" not in inspect.signature(make.__call__).parameters:
                raise UserError(f"{told}, whose __call__ has no argument 'train'; it must take one")
            return make(**fields)
        if axis_name and "axis_name" in takes:
            fields["axis_name"] = tuple(axis_name)
        if "rngs" in takes:
            from lamb_tpu.models import nnx

            return Model(*nnx.functions(functools.partial(make, **fields)))
        made = make(**fields)
    if isinstance(made, tuple) and len(made) >= 2 and callable(made[0]) and callable(made[1]):
        return _checked(Model(*made), told)
    raise UserError(
        f"{told}, which makes {made!r}; it must be a Linen module, an NNX module (with the "
        "argument rngs), or a function that returns lamb_tpu.models.Model(init, apply)"
    )


def _checked(model: Model, told: str) -> Model:
    """The model, of which what `init` and `apply` return is checked when they are traced."""

    def init(key: jax.Array, inputs: Any) -> Variables:
        variables = model.init(key, inputs)
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise UserError(f"{told}, whose init must return a mapping with the key 'params'")
        return variables

    def apply(
        variables: Variables, inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Variables]:
        found = model.apply(variables, inputs, train=train, key=key)
        kept = set(variables) - {"params", MOMENTS}
        if not (
            isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
            and set(found[1]) - {MOMENTS} == kept
        ):
            raise UserError(
                f"{told}, whose apply must return (outputs, state), where state has the keys of "
                f"the variables but 'params': {', '.join(sorted(kept)) or 'none'}"
            )
        return found

    return model._replace(init=init, apply=apply)
