"""Tests that the same weights give the same outputs here and in Hugging Face's transformers.

`make test-interchange` runs these tests; they are skipped without PyTorch and transformers.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.models.bert import BertConfig

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from lamb_tpu.models.bert_huggingface import from_huggingface, to_huggingface  # noqa: E402

CONFIG = BertConfig(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    intermediate_size=160,
    vocab_size=101,
    max_positions=24,
    dtype="float32",
)
RNG = np.random.default_rng(0)
INPUTS = {
    "input_ids": RNG.integers(0, 101, (4, 20)),
    "token_type_ids": RNG.integers(0, 2, (4, 20)),
    "attention_mask": (np.arange(20) < np.array([[20], [13], [1], [17]])).astype(np.int64),
}
REAL = INPUTS["attention_mask"] > 0


def random_params(config: BertConfig) -> Any:
    """Draws large parameters, so that attention is far from uniform and biases matter."""
    rng = np.random.default_rng(1)
    init = config.module().init
    shapes = jax.eval_shape(lambda x: init(jax.random.key(0), x, train=False), INPUTS)["params"]

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = float("scale" in jax.tree_util.keystr(path))
        return rng.normal(mean, 0.15, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def ours(config: BertConfig, params: Any) -> dict[str, np.ndarray]:
    module = config.module()
    outputs = jax.jit(lambda p, x: module.apply({"params": p}, x, train=False))(params, INPUTS)
    return {name: np.asarray(value) for name, value in outputs.items()}


def theirs(network: Any) -> dict[str, np.ndarray]:
    names = {
        "prediction_logits": "mlm_logits",
        "seq_relationship_logits": "nsp_logits",
        "start_logits": "start_logits",
        "end_logits": "end_logits",
        "logits": "mlm_logits",
    }
    inputs = {name: torch.from_numpy(value) for name, value in INPUTS.items()}
    with torch.no_grad():
        outputs = network.eval()(**inputs, output_hidden_states=True)
    actual = {names[k]: v.numpy() for k, v in outputs.items() if k in names}
    return {"hidden": outputs.hidden_states[-1].numpy(), **actual}


def assert_agree(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        # Outputs at padding positions may differ between implementations.
        places = ... if name == "nsp_logits" else REAL
        assert np.std(value[places]) > 0.1
        np.testing.assert_allclose(value[places], other[name][places], atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    "heads, network",
    [
        (("mlm", "nsp"), "BertForPreTraining"),
        (("span",), "BertForQuestionAnswering"),
        (("mlm",), "BertForMaskedLM"),
    ],
)
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_written_here_and_read_there(
    heads: tuple[str, ...], network: str, gelu: str, tmp_path: pathlib.Path
) -> None:
    config = dataclasses.replace(CONFIG, heads=heads, gelu=gelu)
    params = random_params(config)
    to_huggingface(config, params, tmp_path)
    read, loading = getattr(transformers, network).from_pretrained(
        tmp_path, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[problem], loading
    assert_agree(ours(config, params), theirs(read))


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
@pytest.mark.parametrize(
    "network, heads",
    [
        ("BertForPreTraining", ("mlm", "nsp")),
        ("BertForQuestionAnswering", ("span",)),
        ("BertForMaskedLM", ("mlm",)),
    ],
)
def test_written_there_and_read_here(
    network: str, heads: tuple[str, ...], hidden_act: str, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    made = getattr(transformers, network)(
        transformers.BertConfig(
            vocab_size=101,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=160,
            max_position_embeddings=24,
            hidden_act=hidden_act,
            initializer_range=0.15,
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path)
    config, params = from_huggingface(tmp_path)
    assert config.heads == heads and config.num_layers == 3
    assert_agree(ours(config, params), theirs(made))


def test_there_and_back_again(tmp_path: pathlib.Path) -> None:
    params = random_params(CONFIG)
    to_huggingface(CONFIG, params, tmp_path)
    transformers.BertForPreTraining.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    config, back = from_huggingface(tmp_path / "again")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, back, params)
