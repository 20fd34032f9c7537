"""Matrices by name: which leaves `muon` orthogonalises, and which axes are rows and columns.

Muon's authors orthogonalise the matrices of hidden layers, and convolutions as
(spatial axes x inputs) x outputs; tables, positions and the output layer take Adam. A rule says so
with `matrix_axes`. Where no rule does, the name and the number of axes decide, by the conventions
below:

>>> axes_of('conv/kernel', 4, layer_axes=())
((0, 1, 2), (3,))
>>> axes_of('layers/attention/query/kernel', 4, layer_axes=(0,))  # (layers, inputs, heads, size)
((1,), (2, 3))
>>> axes_of('output/kernel', 2, layer_axes=())
()

A name cannot say everything. A 'kernel' of four axes is that of Flax's `Conv`, and one of two is
(inputs, outputs): the transposed kernels of Hugging Face's Flax GPT-2 need a rule. A 'weight' is
(outputs, inputs, ...) as in Equinox and PyTorch. Of three axes beside the layer axes only kernels
of modules called conv or by the names of attention are matrices, as any other may be a stack whose
rule lacks `layer_axes`. An output layer without a name, such as 'Dense_3' or 'layers/2', needs a
rule with `matrix_axes=()`. Weights that hold several products side by side, such as LSTM gates and
fused query-key-value kernels, are one matrix, as in the authors' code. A depthwise kernel is none:
its filters share no input. Another grouped convolution is taken for a full one unless a rule says
`matrix_axes=()`.
"""

import re

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]  # (rows, columns)

_PRODUCT = r"(/(kernel|w|weight))?$"  # the leaf of a module, or the module's name is the leaf's
# Never a matrix, whatever the number of axes.
_EXEMPT = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # Tables of words, positions and types. Flax, Haiku and Equinox call the table or its module
        # 'embed...'; a 'kernel' or 'proj/weight' in there is a product, as that of patches.
        r"embed(?!.*((^|/)kernel|(linear|dense|proj|conv|mlp|fc)[^/]*/(w|weight))$)",
        r"(^|/)(wte|wpe|(\w+_)?(emb|codebook|lookup|table|tokens?|vocab(ulary)?))s?(/(w|weight))?$",
        r"(^|/)(rel(ative)?_)?pos(ition)?(al)?s?(_(bias|enc\w*|h|w|ids))?(/(w|weight))?$",
        r"(^|/)(token_type|segment|relative_attention_bias)s?(/(w|weight))?$",
        # Output layers and classifiers, by names that no hidden layer has.
        rf"(^|/)((lm|mlm|nsp|cls|classification|output|prediction)_?head|heads?|classifier|score"
        rf"|(to_)?logits(_dense)?|qa_outputs|un_?embed\w*|readout|nsp|span|seq_relationship){_PRODUCT}",
        rf"(^|/)((predictions|(lm|mlm)_head)/decoder|classifier/(out_proj|1|6)){_PRODUCT}",
        # Names that hidden layers have too, further down, such as BERT's 'layer_0/output'.
        rf"^((model|decoder)/)?(output|output_projection|out|fc|final|decoder){_PRODUCT}",
        r"depth_?wise|(^|/)dw_?conv",
    )
]
_IN = re.compile(r"(^|/)(quer(y|ies)|keys?|values?|[qkv]|w[qkv]|qkv|(q|k|v|qkv)_?proj)/(kernel|w)$")
_OUT = re.compile(r"(^|/)(out|output|o|wo|(o|out|output)_?proj)/(kernel|w)$")
_CONVOLUTION = re.compile(r"(conv[^/]*|(^|/)c_(attn|proj|fc))/[^/]+$", re.IGNORECASE)
_OUTPUTS_FIRST = re.compile(r"(^|/|_)weight(_[^/]*)?$")
_OUTPUTS_LAST = re.compile(r"(^|/)(kernel|w)$")


def axes_of(path: str, num_axes: int, layer_axes: tuple[int, ...]) -> MatrixAxes | tuple[()]:
    """Returns a leaf's axes of rows (inputs) and of columns (outputs); () if it is no matrix.

    Args:
      path: the leaf's keys, joined by '/'; not that of a bias or of a norm.
      num_axes: the number of its axes.
      layer_axes: those of them that stack layers.
    """
    axes = [axis for axis in range(num_axes) if axis not in layer_axes]
    name = path.removesuffix("/value")  # paths of NNX end in it
    num_rows = _num_rows(name.removeprefix("params/"), len(axes))
    if not num_rows:
        return ()
    # Counted from the end where outputs come first.
    sides = tuple(axes[:num_rows]), tuple(axes[num_rows:])
    return sides if num_rows > 0 else sides[::-1]


def _num_rows(name: str, num_axes: int) -> int:
    """How many of the first axes are rows; negative: of the last ones; 0 for no matrix."""
    if num_axes < 2 or any(pattern.search(name) for pattern in _EXEMPT):
        return 0
    convolution = _CONVOLUTION.search(name) is not None
    if _OUTPUTS_FIRST.search(name):
        return 1 - num_axes if num_axes in (2, 4) or convolution else 0
    if num_axes == 2:
        return 1
    if _IN.search(name) and not convolution:
        # (inputs, heads, size), and (inputs, 3, heads, size) of a fused kernel.
        return 1 if num_axes == 3 + ("qkv" in name) else 0
    if _OUT.search(name) and num_axes == 3 and not convolution:
        return 2  # (heads, size, outputs)
    if _OUTPUTS_LAST.search(name) and (num_axes == 4 or convolution):
        return num_axes - 1
    return 0
