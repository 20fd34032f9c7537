"""Tests each type of fault that users of other projects reported, on inputs made here.

The tests that mirror the package's modules cover the details.
"""

import json
import pathlib
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from PIL import Image
from safetensors.numpy import save_file

from lamb_tpu import optim
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.text import squad
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.models.bert_huggingface import from_huggingface
from lamb_tpu.optim import parameters
from lamb_tpu.optim.factory import OPTIMIZERS
from lamb_tpu.tasks import squad_answers, squad_metric
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some

# --- Values of a data set outside their range -----------------------------------------------------

_SET = """
    import numpy as np

    from lamb_tpu.data import ArraySource

    def points(split, low: int = 0, bad_pixel: bool = False, late: bool = False):
        rng = np.random.default_rng(1)
        label = (np.arange(96) % 4).astype(np.int32)
        image = (np.eye(4)[label][:, :, None] * np.ones((96, 4, 4))
                 + rng.normal(0, 0.1, (96, 4, 4))).astype(np.float32)
        if bad_pixel:
            image[37, 2, 1] = np.nan
        if late:
            label[81] = 4
        return ArraySource("points:" + split, {"image": image, "label": label + low}, 4)
"""


@pytest.fixture
def points(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfigDict]:
    """The config of a run on four classes of points, a custom data set that can have wrong values."""
    (tmp_path / "reported_points.py").write_text(textwrap.dedent(_SET))
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny.digits(batch_size=32, duration="6 steps", eval__batch_size=32)
    config.data.name = "reported_points:points"
    config.data.train_split = config.data.eval_split = "train"
    config.task = ConfigDict({"name": "classification"})
    config.model = ConfigDict({"name": "mlp", "hidden_sizes": (8,), "num_classes": 4})
    yield config
    sys.modules.pop("reported_points", None)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("options", "value"),
    [({"low": 1}, "4"), ({"low": -1}, "-1"), ({"low": -6}, "-"), ({"late": True}, "4")],
    ids=["from 1", "-1", "-6", "one late"],
)
def test_labels_outside_their_classes(
    points: ConfigDict,
    tmp_path: pathlib.Path,
    options: dict[str, Any],
    value: str,
    smoothing: float,
) -> None:
    points.data.options = ConfigDict(options)
    points.task.label_smoothing = smoothing
    with pytest.raises(UserError) as error:
        train(points, tmp_path / "run", quiet=True)
    output = str(error.value)
    assert "label" in output and value in output and "points:train" in output and "0 to 3" in output
    assert "learning_rate" not in output


def test_a_pixel_that_is_nan(points: ConfigDict, tmp_path: pathlib.Path) -> None:
    points.data.options = ConfigDict({"bad_pixel": True})
    with pytest.raises(UserError) as error:
        train(points, tmp_path / "run", quiet=True)
    assert "image" in str(error.value) and "37" in str(error.value)
    assert "learning_rate" not in str(error.value)


# --- Folders of images ----------------------------------------------------------------------------


def _image(path: pathlib.Path, form: str, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(path.name)).integers(0, 255, (24, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, format=form, **options)


def test_images_are_read_by_content(tmp_path: pathlib.Path) -> None:
    for class_ in ("train/ant", "train/bee"):
        for number, (ending, form) in enumerate(
            (
                ("jpeg", "JPEG"),
                ("JFIF", "JPEG"),
                ("png", "PNG"),
                ("webp", "WEBP"),
                ("bmp", "BMP"),
                ("jpg", "PNG"),
                ("image", "JPEG"),
                ("tif", "TIFF"),
                ("gif", "GIF"),
            )
        ):
            _image(tmp_path / class_ / f"{number}.{ending}", form)
    records = FolderRecords(str(tmp_path), "train")
    assert len(records) == 14
    notes = " ".join(records.notes)
    assert "2 .gif" in notes and "2 .tif" in notes


def test_a_folder_one_level_too_deep_says_where_the_images_are(tmp_path: pathlib.Path) -> None:
    for class_ in ("ant", "bee"):
        _image(tmp_path / "train" / class_ / "images" / "1.JPEG", "JPEG")
    # As in torchvision, an image belongs to the class of its outermost folder.
    records = FolderRecords(str(tmp_path), "train")
    assert len(records) == 2 and records.num_classes == 2
    with pytest.raises(UserError, match=r"images.*ant|ant.*images"):
        FolderRecords(str(tmp_path / "train" / "ant" / "images"), "train")


# --- Answers and vocabularies ---------------------------------------------------------------------

_WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] which town ? she left ze naive zur ##ich , then .".split()


@pytest.mark.parametrize(
    "answer",
    ["Zu\u0308rich\u200d", "Zurich\u00ad", "naive\u0301", "nai\u0308ve\u200c", "Zurich\ufe0f"],
    ids=ascii,
)
def test_an_answer_that_ends_in_a_deleted_character(answer: str) -> None:
    context = f"she left {answer} , then ."
    questions = [squad.Question("a", "which town ?", context, ((answer, context.index(answer)),))]
    sizes = dict(max_length=40, document_stride=8, max_query=6)
    vocabulary = Vocabulary(_WORDS)
    features = squad.make_features(questions, vocabulary, training=True, **sizes)
    start = np.full(features.arrays["input_ids"].shape, -9.0)
    stop = start.copy()
    for row, (first, last) in enumerate(
        zip(features.arrays["start_position"], features.arrays["end_position"])
    ):
        if first:
            start[row, first] = stop[row, last] = 9
    asked = squad.make_features(questions, vocabulary, **sizes)
    actual = squad_answers.choose(squad_answers.best_answers(questions, asked, start, stop))
    scores = squad_metric.evaluate(questions, actual)
    assert actual == {"a": answer} and scores["exact_match"] == 100


# --- Published weights ----------------------------------------------------------------------------

_HIDDEN, _VOCAB = 6, 14


def _bert() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (_VOCAB, _HIDDEN),
        "embeddings.position_embeddings.weight": (12, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, _HIDDEN),
    }
    layer = "encoder.layer.0."
    for name in ("query", "key", "value"):
        sizes[f"{layer}attention.self.{name}.weight"] = (_HIDDEN, _HIDDEN)
    sizes[f"{layer}attention.output.dense.weight"] = (_HIDDEN, _HIDDEN)
    sizes[f"{layer}intermediate.dense.weight"] = (10, _HIDDEN)
    sizes[f"{layer}output.dense.weight"] = (_HIDDEN, 10)
    sizes |= {
        name.replace(".weight", ".bias"): size[:1]
        for name, size in sizes.items()
        if "embeddings" not in name
    }
    for norm in ("embeddings", f"{layer}attention.output", f"{layer}output"):
        sizes |= {f"{norm}.LayerNorm.weight": (_HIDDEN,), f"{norm}.LayerNorm.bias": (_HIDDEN,)}
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def _published(folder: pathlib.Path, **files: dict[str, np.ndarray]) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "bert",
                "vocab_size": _VOCAB,
                "hidden_size": _HIDDEN,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "intermediate_size": 10,
                "max_position_embeddings": 12,
                "type_vocab_size": 2,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-12,
            }
        )
    )
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def test_published_weights_in_shards_without_a_prefix(tmp_path: pathlib.Path) -> None:
    tensors = _bert()
    prefixed = {f"bert.{name}": value for name, value in tensors.items()}
    _, expected = from_huggingface(_published(tmp_path / "one", model=prefixed))
    names = sorted(tensors)
    first, second = ({name: tensors[name] for name in half} for half in (names[::2], names[1::2]))
    folder = _published(tmp_path / "two", **{"a-00001": first, "a-00002": second})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    name: f"a-0000{1 if name in first else 2}.safetensors" for name in names
                }
            }
        )
    )
    _, actual = from_huggingface(folder)
    tiny.assert_equal(actual, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_published_weights_that_are_not_finite(tmp_path: pathlib.Path, value: float) -> None:
    tensors = {f"bert.{name}": array for name, array in _bert().items()}
    tensors["bert.encoder.layer.0.output.dense.weight"][1, 2] = value
    with pytest.raises((UserError, ValueError), match="layer.0.output.dense.weight"):
        from_huggingface(_published(tmp_path / "bad", model=tensors))


# --- Optimizers -----------------------------------------------------------------------------------


def _matrices(params: Any, rules: str) -> set[str]:
    resolved = parameters.resolve(params, rules)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    metadata = jax.tree.leaves(
        resolved, is_leaf=lambda x: isinstance(x, parameters.ParameterMetadata)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, leaf), meta in zip(leaves, metadata)
        if meta.adapt and meta.matrix(leaf.ndim)
    }


def test_muon_takes_kernels_and_leaves_tables_and_outputs_to_adam() -> None:
    ones = jnp.ones
    networks = {
        "no_bias_no_norm": (
            {
                "wte": ones((20, 6)),
                "wpe": ones((9, 6)),
                "lm_head": {"kernel": ones((6, 20))},
                "h1": {"mlp": {"c_fc": {"w": ones((6, 24)), "b": ones(24)}}},
            },
            {"h1/mlp/c_fc/w"},
        ),
        "resnet": (
            {
                "stage": {"conv": {"kernel": ones((1, 1, 6, 12))}, "bn": {"scale": ones(12)}},
                "output": {"kernel": ones((12, 5))},
            },
            {"stage/conv/kernel"},
        ),
        "bert": (
            {
                "embeddings": {
                    "word": ones((20, 6)),
                    "position": ones((9, 6)),
                    "type": ones((2, 6)),
                },
                "encoder": {"layer_3": {"intermediate": {"kernel": ones((6, 24))}}},
            },
            {"encoder/layer_3/intermediate/kernel"},
        ),
    }
    for rules, (params, expected) in networks.items():
        assert _matrices(params, rules) == expected, rules


_PARAMS = {"dense": {"kernel": jnp.linspace(-1, 1, 15).reshape(5, 3), "bias": jnp.ones(3)}}
_GRADS = [jax.tree.map(lambda p, s=s: jnp.sin(s + p), _PARAMS) for s in (0.0, 1.5, 3.0, 4.5)]


def _steps(tx: optax.GradientTransformation, grads: list[Any]) -> Any:
    params, state, update = _PARAMS, tx.init(_PARAMS), jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", some(sorted(OPTIMIZERS), ("lamb", "lars", "muon", "onebit_adam")))
def test_multi_steps_equals_the_mean_gradient(name: str) -> None:
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *_GRADS[i : i + 2]) for i in (0, 2)]
    expected = _steps(optim.make_optimizer({"name": name}, 0.01), means)
    many = optax.MultiSteps(optim.make_optimizer({"name": name}, 0.01), every_k_schedule=2)
    actual = _steps(many.gradient_transformation(), _GRADS)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    ["lamb", "lars", "novograd", "rmsprop_tf", "diffgrad", "muon", "adagrad_norm", "adamw", "lion"],
)
def test_an_injected_rate_is_the_rate(name: str) -> None:
    make = getattr(optim, name)
    actual = _steps(optax.inject_hyperparams(make)(learning_rate=0.02), _GRADS)
    expected = _steps(make(learning_rate=0.02), _GRADS)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_argument_that_cannot_be_injected_is_named() -> None:
    with pytest.raises(ValueError, match=r"rank.*static_args=\('rank',\)"):
        optax.inject_hyperparams(optim.apollo)(learning_rate=0.02).init(_PARAMS)
    static = optax.inject_hyperparams(optim.apollo, static_args=("rank",))
    actual = _steps(static(learning_rate=0.02, rank=2), _GRADS)
    expected = _steps(optim.apollo(0.02, rank=2), _GRADS)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


# --- Norms, dtypes and layers ---------------------------------------------------------------------


def test_each_layer_of_a_stack_has_a_separate_ratio() -> None:
    scale = jnp.array([1.0, 10.0, 100.0, 1000.0])[:, None, None]
    params, grads = {"kernel": scale * jnp.ones((4, 3, 3))}, {"kernel": jnp.ones((4, 3, 3))}
    tx = optim.lamb(1.0, weight_decay=0.0, rules=[("", {"layer_axes": (0,)})])
    updates, _ = tx.update(grads, tx.init(params), params)
    sizes = -np.asarray(updates["kernel"])[:, 0, 0]
    np.testing.assert_allclose(sizes / sizes[0], [1, 10, 100, 1000], rtol=1e-5)


def test_a_norm_inside_shard_map_is_that_of_the_full_tensor() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    params = {"kernel": jnp.arange(32.0).reshape(8, 4)}
    grads = {"kernel": jnp.cos(params["kernel"])}

    def update(tx: optax.GradientTransformation, grads: Any, params: Any) -> Any:
        return tx.update(grads, tx.init(params), params)[0]

    full = update(optim.lamb(0.1), grads, params)
    split = jax.jit(
        jax.shard_map(
            lambda g, p: update(optim.lamb(0.1, axis_name="x"), g, p),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=spec,
        )
    )(grads, params)
    np.testing.assert_allclose(split["kernel"], full["kernel"], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_moments_of_narrow_parameters_are_wide(dtype: Any) -> None:
    params = {"kernel": jnp.full((4, 4), 300.0, dtype)}
    tx = optim.lamb(0.01)
    updates, state = tx.update(params, tx.init(params), params)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(x.dtype == jnp.float32 for x in floats)
    assert np.isfinite(np.asarray(updates["kernel"], np.float32)).all()
    assert np.abs(np.asarray(updates["kernel"], np.float32)).min() > 0


def test_no_decay_does_not_turn_lamb_into_adam() -> None:
    params, grads = {"kernel": jnp.full((3, 3), 5.0)}, {"kernel": jnp.ones((3, 3))}
    tx = optim.lamb(0.1, weight_decay=0.0)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.5, rtol=1e-4)  # Adam's would be -0.1


def test_an_empty_list_of_rules_is_empty() -> None:
    with pytest.raises(ValueError, match="no rule matches the parameter 'kernel'"):
        optim.lamb(0.1, rules=[]).init({"kernel": jnp.ones(3)})


def test_the_warm_up_ends_at_its_peak_and_the_decay_at_the_last_update() -> None:
    rate = optim.warmup(0.4, total_steps=20, warmup_steps=4)
    rates = [float(rate(step)) for step in range(21)]
    assert max(rates) == pytest.approx(0.4) and rates[4] == pytest.approx(0.4)
    assert 0 <= rates[0] < rates[1] < rates[2] < rates[3] < rates[4]
    assert rates[20] == pytest.approx(0.0, abs=1e-8)
    with pytest.raises(ValueError, match="warmup_steps"):
        optim.warmup(0.4, total_steps=20, warmup_steps=21)
