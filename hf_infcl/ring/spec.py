"""The options of a sweep, as plain values that a compiled graph can carry."""

from dataclasses import dataclass
from typing import Any

from hf_infcl.ops import Rule

DIRECTIONS = ("both", "image_to_text", "text_to_image")


@dataclass(frozen=True)
class Spec:
    """What a loss asks of a sweep; the arguments of the losses of the same names."""

    duplicates: str = "mask"
    label_smoothing: float = 0.0
    direction: str = "both"
    block_size: int | None = None
    group: Any = None
    backend: str = "auto"
    precision: str = "auto"

    @property
    def rule(self) -> Rule:
        return Rule(self.duplicates, self.label_smoothing)

    @property
    def for_rows(self) -> bool:
        """Whether images are anchors."""
        return self.direction != "text_to_image"

    @property
    def for_cols(self) -> bool:
        """Whether texts are anchors."""
        return self.direction != "image_to_text"

    @property
    def directions(self) -> int:
        return self.for_rows + self.for_cols
