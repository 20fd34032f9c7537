"""Networks as two pure functions, `init` and `apply`, chosen by name.

The trainer and the tasks see nothing else of a model, so networks in Linen (all shipped ones), NNX
and plain JAX all fit: `linen` adapts a Linen module, and `Model(init, apply)` takes any other.
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
from lamb_tpu.models import efficientnet, gnmt, resnet
from lamb_tpu.models.bert_network import DTYPES, BertConfig
from lamb_tpu.models.davidnet import DavidNet
from lamb_tpu.models.groups import describe_groups
from lamb_tpu.models.lenet import LeNet, LeNet5
from lamb_tpu.models.lstm import RowLSTM
from lamb_tpu.models.lstm_lm import LSTMLanguageModel
from lamb_tpu.models.mlp import MLP
from lamb_tpu.models.norm import MOMENTS

Variables = Mapping[str, Any]


class Model(NamedTuple):
    """A network.

    Attributes:
      init: `(key, inputs) -> variables`; a mapping with 'params' and, if the network keeps
        statistics, further collections such as 'batch_stats'.
      apply: `(variables, inputs, *, train, key) -> (outputs, state)`; `state` holds the
        collections other than 'params', updated if `train` is true. If 'batch_moments' is among the
        variables, empty, BatchNorm fills it with the input of `norm.combine_moments`. `key` drives
        dropout.
      vocab_size, max_positions: for a network that reads text, the size of its vocabulary and the
        longest sequence; None for others.
      num_heads: number of attention heads, for a network that splits its sequences over the mesh
        axis 'sequence'; None for others.
      decode: functions by which a search writes with the network; None for others.
      stacked: regex over the paths of the parameters that stack layers along their first axis;
        None: there are none.
      carry_shape: for a network that hands state on from batch to batch, its shape for one row,
        float32. It reads the field `carry` of its inputs, and its outputs have the new one. None
        for others.
      num_segments: for a network that reads `token_type_ids`, the number of their values; None for
        others.

    `inputs` is one array, or for a network that reads text the mapping of a batch's fields.
    """

    init: Callable[[jax.Array, Any], Variables]
    apply: Callable[..., tuple[Any, Variables]]
    vocab_size: int | None = None
    max_positions: int | None = None
    num_heads: int | None = None
    decode: gnmt.Decode | None = None
    stacked: str | None = None
    carry_shape: tuple[int, ...] | None = None
    num_segments: int | None = None


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
    "gnmt": gnmt.GNMT,
    "lenet": LeNet,
    "lenet5": LeNet5,
    "lstm_lm": LSTMLanguageModel,
    "mlp": MLP,
    "resnet18": resnet.ResNet18,
    "resnet34": resnet.ResNet34,
    "resnet50": resnet.ResNet50,
    "resnet101": resnet.ResNet101,
    "resnet152": resnet.ResNet152,
    "row_lstm": RowLSTM,
}


def linen(module: nn.Module) -> Model:
    """Adapts a Linen module whose `__call__` takes `(inputs, train: bool)`.

    The module must use `models.dropout.Dropout`: inside shard_map and in microbatches the mask of
    `nn.Dropout` would be the same for every part of the batch.
    """

    def init(key: jax.Array, inputs: Any) -> Variables:
        return module.init(key, inputs, train=False)

    def apply(
        variables: Variables, inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Variables]:
        collections = [name for name in variables if name != "params"]
        # Only training draws random numbers, so an evaluation needs no key.
        rngs = None if key is None else {"dropout": key}
        # Linen returns updated collections only if they are declared mutable. Without them it
        # returns the outputs alone.
        if train and collections:
            return module.apply(variables, inputs, train=True, rngs=rngs, mutable=collections)
        outputs = module.apply(variables, inputs, train=train, rngs=rngs)
        return outputs, {name: variables[name] for name in collections}

    return Model(init, apply)


def build(name: str, axis_name: Sequence[str] = (), **fields: Any) -> Model:
    """Builds the named network, for example `build('lenet', num_classes=10)`.

    Args:
      name: one of `MODULES`, or 'package.module:Name' of a Linen or NNX module or of a function
        that returns a `Model`, see README.md of this folder.
      axis_name: inside shard_map or pmap, the mesh axes that split the batch, outermost first, for
        layers with explicit collectives.
      **fields: fields of the network, as in config.model.

    Raises:
      UserError: the name or a field is unknown; the message lists the known ones.
    """
    module = _module(name, fields, axis_name)
    if isinstance(module, Model):
        return module
    # A network without layers that communicate, such as LeNet, has no such field. Under jit the
    # field stays None, which makes BatchNorm's sums global.
    if axis_name and hasattr(module, "axis_name"):
        module = module.clone(axis_name=tuple(axis_name))
    model, config = linen(module), getattr(module, "config", None)
    # A user's own module may have one too.
    if (carry_shape := getattr(module, "carry_shape", None)) is not None:
        return model._replace(carry_shape=carry_shape)
    if isinstance(config, BertConfig):
        return model._replace(
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            num_heads=config.num_heads,
            num_segments=config.num_token_types,
            stacked="^encoder/layers/" if config.scan_layers else None,
        )
    if isinstance(module, gnmt.GNMT):
        return model._replace(vocab_size=module.vocab_size, decode=gnmt.decode(module))
    return model


def batch_norm_groups(config: Mapping[str, Any], batch: int, devices: int) -> tuple[int, str]:
    """Returns the number of devices that share a group of BatchNorm, and a line about the groups.

    Args:
      config: config.model: the name and the fields.
      batch: number of examples of a microbatch over all devices.
      devices: number of devices over which the batch is split evenly.

    Returns:
      The number of devices and the line; 1 and '' for a model without BatchNorm.

    Raises:
      UserError: see `build`.
      ValueError: the config's group_size does not fit; the message says what would.
    """
    fields = dict(config)
    module = _module(fields.pop("name"), fields)
    if isinstance(module, Model):
        return 1, ""
    # The MLP has the field `group_size` also without BatchNorm.
    if not hasattr(module, "group_size") or not getattr(module, "batch_norm", True):
        return 1, ""
    return describe_groups(module.group_size, batch, devices)


def own_fields(name: str) -> dict[str, dataclasses.Field]:
    """Returns the fields of config.model for the named network, with their types and defaults.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
    """
    # The trainer sets axis_name, by the mesh.
    hidden = ("parent", "name", "axis_name")
    if own.is_own(name):
        return own.fields(own.find(name, "config.model.name"), (*hidden, "rngs"))
    if name not in MODULES:
        raise UserError(
            f"config.model.name is {name!r}; known models: {', '.join(MODULES)}, and "
            "'package.module:Name' for your own"
        )
    return {f.name: f for f in dataclasses.fields(MODULES[name]) if f.name not in hidden}


def _module(
    name: str, fields: Mapping[str, Any], axis_name: Sequence[str] = ()
) -> nn.Module | Model:
    """Returns the named module with its fields set and checked."""
    known = own_fields(name)
    if own.is_own(name):
        own.check("config.model", "model", name, known, fields)
        return _own_module(name, dict(fields), axis_name)
    module = MODULES[name]
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.model.{key} is not a field of model {name!r}; known: {', '.join(known)}"
            )
    num_classes = fields.get("num_classes", 1)
    # `isinstance` would accept True as a whole number.
    if type(num_classes) is not int or num_classes < 1:
        raise UserError(
            f"config.model.num_classes is {num_classes!r}; it must be a whole number of at least 1"
        )
    if fields.get("dtype", DTYPES[0]) not in DTYPES:
        raise UserError(f"config.model.dtype is {fields['dtype']!r}; known: {', '.join(DTYPES)}")
    # BERT's entry in MODULES is a config, which checks itself and then makes the network.
    made = module(**fields)
    return made.module() if isinstance(made, BertConfig) else made


def _own_module(name: str, fields: dict[str, Any], axis_name: Sequence[str]) -> nn.Module | Model:
    """A user's own network: a Linen module, or the functions of any other."""
    make: Any = own.find(name, "config.model.name")
    told = f"config.model.name is {name!r}"
    takes = {parameter.name for parameter in own.parameters(make)}
    with own.making(name, "config.model.name"):
        # A Linen module gets its axes in `build`, as the shipped ones do.
        if isinstance(make, type) and issubclass(make, nn.Module):
            if "train" not in inspect.signature(make.__call__).parameters:
                raise UserError(f"{told}, whose __call__ has no argument 'train'; it must take one")
            return make(**fields)
        if axis_name and "axis_name" in takes:
            fields["axis_name"] = tuple(axis_name)
        # An NNX module, or a function that makes one, is told by this argument.
        if "rngs" in takes:
            from lamb_tpu.models import nnx

            return Model(*nnx.functions(functools.partial(make, **fields)))
        made = make(**fields)
    # `Model` is a tuple, so a plain pair (init, apply) passes too.
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
        # The trainer adds the moments' collection for this package's BatchNorm. Another network
        # need not know it.
        kept = set(variables) - {"params", MOMENTS}
        if not (
            isinstance(found, tuple)
            and len(found) == 2
            and isinstance(found[1], Mapping)
            and set(found[1]) - {MOMENTS} == kept
        ):
            raise UserError(
                f"{told}, whose apply must return (outputs, state), where state has the keys of "
                f"the variables but 'params': {', '.join(sorted(kept)) or 'none'}"
            )
        return found

    return model._replace(init=init, apply=apply)
