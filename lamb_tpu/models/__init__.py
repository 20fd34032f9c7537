"""Networks, chosen by name, as two pure functions `init` and `apply`.

The shipped networks are Linen modules; custom networks may also be written in NNX or plain JAX.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from lamb_tpu import components
from lamb_tpu.errors import UserError, out_of_range, unknown
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
      init: `(key, inputs) -> variables`. The variables are a mapping with the collection 'params'
        and possibly others, such as 'batch_stats'.
      apply: `(variables, inputs, *, train, key) -> (outputs, state)`. `state` has all collections
        except 'params', updated if `train` is true. If the variables contain an empty
        collection 'batch_moments', BatchNorm fills it for `norm.combine_moments`. `key` is the
        random key of dropout, which only training needs.
      vocab_size, max_positions: the size of the vocabulary and the length of the longest sequence,
        for a network that reads text; otherwise None.
      num_heads: the number of attention heads, for a network that splits its sequences over the
        mesh axis 'sequence'; otherwise None.
      decode: functions for a beam search, for a network that generates text; otherwise None.
      stacked: a regex that matches the paths of parameters that stack layers along their first
        axis; None if no parameter stacks layers.
      carry_shape: for a network that passes a recurrent state from batch to batch, the shape of the
        state of one row, which is float32; otherwise None. The network reads the state from the
        field `carry` of its inputs, and returns the new state as `carry` in its outputs.
      num_segments: the number of possible values in `token_type_ids`, for a network that reads this
        field; otherwise None.

    `inputs` is one array; for a network that reads text, it is a mapping with the batch's fields.
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

    def output_shapes(self, inputs: Any) -> Any:
        """Returns the outputs' shapes and dtypes, by tracing the network without running it."""
        variables = jax.eval_shape(self.init, jax.random.key(0), inputs)
        apply = functools.partial(self.apply, train=False)
        return jax.eval_shape(apply, variables, inputs)[0]


# Classes of Linen modules, and for BERT the class of a config that builds the module.
_SHIPPED: dict[str, type[nn.Module] | type[BertConfig]] = {
    "bert": BertConfig,
    "davidnet": DavidNet,
    **{f"efficientnet_b{n}": getattr(efficientnet, f"EfficientNetB{n}") for n in range(8)},
    "gnmt": gnmt.GNMT,
    "lenet": LeNet,
    "lenet5": LeNet5,
    "lstm_lm": LSTMLanguageModel,
    "mlp": MLP,
    **{f"resnet{n}": getattr(resnet, f"ResNet{n}") for n in (18, 34, 50, 101, 152)},
    "row_lstm": RowLSTM,
}
# Hidden fields: the trainer sets axis_name from the mesh, and rngs for an NNX module.
MODULES = components.Registry("model", _SHIPPED, hidden=("parent", "name", "axis_name", "rngs"))


def linen(module: nn.Module) -> Model:
    """Adapts a Linen module whose `__call__` takes `(inputs, train: bool)`.

    The module must use `models.dropout.Dropout`: the mask of `nn.Dropout` would be the same on every
    device inside shard_map and in every microbatch.
    """

    def init(key: jax.Array, inputs: Any) -> Variables:
        return module.init(key, inputs, train=False)

    def apply(
        variables: Variables, inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Variables]:
        collections = [name for name in variables if name != "params"]
        # Only training draws random numbers, so evaluation needs no key.
        rngs = None if key is None else {"dropout": key}
        # Linen only returns updated collections if they are declared mutable. Otherwise it returns
        # only the outputs.
        if train and collections:
            return module.apply(variables, inputs, train=True, rngs=rngs, mutable=collections)
        outputs = module.apply(variables, inputs, train=train, rngs=rngs)
        return outputs, {name: variables[name] for name in collections}

    return Model(init, apply)


def build(name: str, axis_name: Sequence[str] = (), **fields: Any) -> Model:
    """Builds the named network, for example `build('lenet', num_classes=10)`.

    Args:
      name: a key of `MODULES`; or 'package.module:Name', where Name is a Linen module, an NNX
        module, or a function that returns a `Model`, see README.md in this folder.
      axis_name: for layers with explicit collectives inside shard_map or pmap: the mesh axes that
        split the batch, outermost first.
      **fields: the network's fields in config.model.

    Raises:
      UserError: the name or a field is unknown, or a value is invalid.
    """
    module = _module(name, fields, axis_name)
    if isinstance(module, Model):
        return module
    # A network without collectives, such as LeNet, does not have this field. Under jit the field
    # stays None, which makes BatchNorm's sums global.
    if axis_name and hasattr(module, "axis_name"):
        module = module.clone(axis_name=tuple(axis_name))
    model, config = linen(module), getattr(module, "config", None)
    # A custom module may have a carry too.
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
    """Returns `groups.describe_groups` for a network, or (1, '') if it has no BatchNorm.

    `config` is config.model. Raises the errors of `build`, and ValueError if the group size does not fit.
    """
    fields = dict(config)
    module = _module(fields.pop("name"), fields)
    if isinstance(module, Model):
        return 1, ""
    # The MLP has the field `group_size` even without BatchNorm.
    if not hasattr(module, "group_size") or not getattr(module, "batch_norm", True):
        return 1, ""
    return describe_groups(module.group_size, batch, devices)


def _module(
    name: str, fields: Mapping[str, Any], axis_name: Sequence[str] = ()
) -> nn.Module | Model:
    """Checks the fields and returns the named module."""
    MODULES.check(name, fields)
    if MODULES.is_custom(name):
        return _custom_module(name, dict(fields), axis_name)
    if fields.get("num_classes", 1) < 1:
        raise out_of_range("config.model.num_classes", fields["num_classes"], "at least 1")
    if fields.get("dtype", DTYPES[0]) not in DTYPES:
        raise unknown("config.model.dtype", fields["dtype"], DTYPES)
    # BERT's entry in MODULES is a config, which checks its fields and then builds the network.
    made = MODULES[name](**fields)
    return made.module() if isinstance(made, BertConfig) else made


def _custom_module(
    name: str, fields: dict[str, Any], axis_name: Sequence[str]
) -> nn.Module | Model:
    """Builds a custom network: a Linen module, or a `Model` of any other network."""
    make: Any = MODULES.find(name)
    wrong = functools.partial(UserError, "config.model.name", name)
    takes = {parameter.name for parameter in components.parameters(make)}
    with MODULES.making(name):
        # `build` sets the axes of a Linen module.
        if isinstance(make, type) and issubclass(make, nn.Module):
            if "train" not in inspect.signature(make.__call__).parameters:
                raise wrong("has a __call__ without the argument 'train'", "add that argument")
            return make(**fields)
        if axis_name and "axis_name" in takes:
            fields["axis_name"] = tuple(axis_name)
        # The argument `rngs` identifies NNX modules and functions that make one.
        if "rngs" in takes:
            from lamb_tpu.models import nnx

            return Model(*nnx.functions(functools.partial(make, **fields)))
        made = make(**fields)
    # `Model` is a tuple, so a plain pair (init, apply) passes too.
    if isinstance(made, tuple) and len(made) >= 2 and callable(made[0]) and callable(made[1]):
        return _checked(Model(*made), wrong)
    raise wrong(
        f"returns {made!r}",
        "return a Linen module, an NNX module with the argument rngs, or lamb_tpu.models.Model(init, apply)",
    )


def _checked(model: Model, wrong: Callable[..., UserError]) -> Model:
    """Returns the model with an `init` and `apply` that check the custom functions' results."""

    def init(key: jax.Array, inputs: Any) -> Variables:
        variables = model.init(key, inputs)
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise wrong(
                "has an init that returns no 'params'", "return a mapping that has the key 'params'"
            )
        return variables

    def apply(
        variables: Variables, inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Variables]:
        result = model.apply(variables, inputs, train=train, key=key)
        # The trainer adds the collection of moments for this package's BatchNorm. Custom networks
        # may ignore it.
        expected = set(variables) - {"params", MOMENTS}
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], Mapping)
            and set(result[1]) - {MOMENTS} == expected
        ):
            keys = ", ".join(sorted(expected)) or "none"
            raise wrong(
                "has an apply that returns an invalid result",
                f"return (outputs, state), where state has the keys: {keys}",
            )
        return result

    return model._replace(init=init, apply=apply)
