"""Settings of the screening rules: what the section ``[screening]`` of a run file may say.

A screening rule decides whether a partner's contribution is averaged, and how far. Its settings are a struct here,
which the manifest holds, and its code is the file of the same name in `farandole.training.screening`: a rule of kind
``similarity`` has its settings in `SimilarityConfig` and its code in ``training/screening/similarity.py``. To add one,
write both, and name the struct in `ScreeningRules` at the end of this file.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class ScreeningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of the rules' own settings. Bound each float at both ends: only then msgspec refuses NaN."""

    @property
    def kind(self) -> str:
        """The rule's name, and that of its module in `farandole.training.screening`."""
        return str(self.__struct_config__.tag)


class SimilarityConfig(
    ScreeningConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="similarity"
):
    """Compares a partner's contribution as a whole with one's own: its norm and its direction."""

    max_norm_ratio: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 4.0
    """The norms may be this factor apart."""
    min_cosine: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.25
    """The least cosine of the angle between them."""


ScreeningRules = SimilarityConfig
"""The rules that a manifest may name, by ``kind``: a union of the structs above."""

DEFAULT_SCREENING = SimilarityConfig()
"""The rule of a manifest that names none."""
