"""BERT: config, sizes, network, and checkpoints in Hugging Face's layout."""

from lamb_tpu.models.bert_huggingface import from_huggingface, to_huggingface
from lamb_tpu.models.bert_network import DTYPES, HEADS, SIZES, Bert, BertConfig

__all__ = ["DTYPES", "HEADS", "SIZES", "Bert", "BertConfig", "from_huggingface", "to_huggingface"]
