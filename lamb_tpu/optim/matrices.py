"""Recognises the matrices that `muon` orthogonalises, and their rows and columns, by name.

Muon's authors orthogonalise the matrices of hidden layers, and the kernels of convolutions as
matrices of the shape (spatial axes x inputs, outputs). Adam updates embedding tables, positions and
the output layer. A rule can give the `matrix_axes` of a leaf. Otherwise the leaf's name and its
number of axes decide, by these conventions:

>>> axes_of('conv/kernel', 4, layer_axes=())
((0, 1, 2), (3,))
>>> axes_of('layers/attention/query/kernel', 4, layer_axes=(0,))  # (layers, inputs, heads, size)
((1,), (2, 3))
>>> axes_of('output/kernel', 2, layer_axes=())
()

- A 'kernel' with four axes counts as the kernel of Flax's `Conv`. A 'kernel' with two axes is (inputs,
  outputs). The transposed kernels of Hugging Face's Flax GPT-2 need a rule.
- A 'weight' is (outputs, inputs, ...), as in Equinox and PyTorch.
- A leaf with three axes besides its layer axes is a matrix only if its module has the name of a
  convolution or of an attention projection. Any other such leaf may be a stack of matrices for which
  no rule gives `layer_axes`.
- An output layer without a descriptive name, such as 'Dense_3' or 'layers/2', needs a rule with
  `matrix_axes=()`.
- Weights that combine several products, such as LSTM gates and fused query-key-value kernels, are
  one matrix, as in the authors' code.
- A depthwise kernel is not a matrix, because its filters share no input. Other grouped convolutions
  are treated like ungrouped convolutions unless a rule has `matrix_axes=()`.
"""

import re

MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]  # (rows, columns)

# The end of a path: a leaf in a module with a matching name, or a leaf with a matching name.
_PRODUCT = r"(/(kernel|w|weight))?$"
# Leaves that are not matrices, whatever their number of axes.
_EXEMPT = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # Embedding tables of words, positions and token types. Flax, Haiku and Equinox call the table
        # or its module 'embed...'. But a 'kernel' or 'proj/weight' in such a module is a matrix, for
        # example in a patch embedding.
        r"embed(?!.*((^|/)kernel|(linear|dense|proj|conv|mlp|fc)[^/]*/(w|weight))$)",
        r"(^|/)(wte|wpe|(\w+_)?(emb|codebook|lookup|table|tokens?|vocab(ulary)?))s?(/(w|weight))?$",
        r"(^|/)(rel(ative)?_)?pos(ition)?(al)?s?(_(bias|enc\w*|h|w|ids))?(/(w|weight))?$",
        r"(^|/)(token_type|segment|relative_attention_bias)s?(/(w|weight))?$",
        # Output layers and classifiers with names that hidden layers do not have.
        rf"(^|/)((lm|mlm|nsp|cls|classification|output|prediction)_?head|heads?|classifier|score"
        rf"|(to_)?logits(_dense)?|qa_outputs|un_?embed\w*|readout|nsp|span|seq_relationship){_PRODUCT}",
        rf"(^|/)((predictions|(lm|mlm)_head)/decoder|classifier/(out_proj|1|6)){_PRODUCT}",
        # Output layers with names that hidden layers can have too, such as BERT's 'layer_0/output'. So
        # these names count only at the top of the tree.
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
    """Returns the axes of rows (inputs) and of columns (outputs); () if the leaf is not a matrix.

    The path must not belong to a bias or to a norm's scale.
    """
    axes = [axis for axis in range(num_axes) if axis not in layer_axes]
    name = path.removesuffix("/value")  # paths in NNX may end in '/value'
    num_rows = _num_rows(name.removeprefix("params/"), len(axes))
    if not num_rows:
        return ()
    # If the number is negative, the outputs come first, and the rows are the trailing axes.
    sides = tuple(axes[:num_rows]), tuple(axes[num_rows:])
    return sides if num_rows > 0 else sides[::-1]


def _num_rows(name: str, num_axes: int) -> int:
    """Returns the number of leading axes that form the rows of the matrix.

    The number is negative if the rows are the trailing axes, and 0 if the leaf is not a matrix.
    """
    if num_axes < 2 or any(pattern.search(name) for pattern in _EXEMPT):
        return 0
    convolution = _CONVOLUTION.search(name) is not None
    if _OUTPUTS_FIRST.search(name):
        return 1 - num_axes if num_axes in (2, 4) or convolution else 0
    if num_axes == 2:
        return 1
    if _IN.search(name) and not convolution:
        # (inputs, heads, size), or for a fused kernel (inputs, 3, heads, size).
        return 1 if num_axes == 3 + ("qkv" in name) else 0
    if _OUT.search(name) and num_axes == 3 and not convolution:
        return 2  # (heads, size, outputs)
    if _OUTPUTS_LAST.search(name) and (num_axes == 4 or convolution):
        return num_axes - 1
    return 0
