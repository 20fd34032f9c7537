"""Small sets for TFDS, each a list of examples in the split `train`, in order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow_datasets as tfds


class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base class: subclasses define a name, features and examples."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos: ClassVar = {}
    features: ClassVar[Mapping[str, Any]]
    examples: ClassVar[Sequence[Mapping[str, Any]]]

    @classmethod
    def prepare(cls, folder: object) -> str:
        cls(data_dir=folder, file_format="array_record").download_and_prepare()
        return str(folder)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(dict(self.features))
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.examples)
