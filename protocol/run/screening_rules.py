"""Settings of the screening rules: the section ``[screening]`` of a run file.

A screening rule decides whether a partner's contribution is averaged, and how far. Its settings are a struct here,
which the manifest holds, and its code is the file of the same name in `farandole.training.screening`: a rule of kind
``guard`` has its settings in `GuardConfig` and its code in ``training/screening/guard.py``. To add one, write both, and
name the struct in `ScreeningRules` at the end of this file.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class ScreeningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of the rules' own settings. Bound each float at both ends: only then msgspec refuses NaN."""

    @property
    def kind(self) -> str:
        """Return the rule's name, which is also the name of its module in `farandole.training.screening`."""
        return str(self.__struct_config__.tag)


class GuardConfig(
    ScreeningConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="guard"
):
    """Clips a contribution that is further away than usual, and refuses it if it makes the loss worse."""

    radius: Annotated[float, msgspec.Meta(ge=1, le=100)] = 4.0
    """Distances up to this many medians of the accepted ones are not clipped."""
    first_radius: Annotated[float, msgspec.Meta(ge=0, le=100)] = 2.0
    """Nor are those up to this many times the node's own movement in the round: all there is at first."""
    max_radius: Annotated[float, msgspec.Meta(ge=1, le=1_000)] = 20.0
    """Distances above this many times the median of the node's own movements are clipped, whatever was accepted."""
    min_clip: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.02
    """What would have to be clipped to less than this share of its distance is refused."""
    min_share: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 1 / 3
    """The least share of the mean that the tokens behind a contribution may leave to either partner."""
    checked_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1 / 8
    """The share of exchanges whose loss is compared although nothing was clipped."""
    first_checks: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2
    """The loss is compared in this many first exchanges with a peer."""
    least_loss_increase: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """As a share of the loss on the held-out batches that a rule may ask for: a mean may always be worse by this. Where
    it is less than the most, means must not be worse than others before them by more than chance explains.
    """
    max_loss_increase: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """A mean that is worse by more stands out, whatever others before it were. A tenth lets honest members pass in runs
    of small models at large learning rates, with nodes that come and go; 0.01, with 0.001 as the least, is for runs
    whose members are there all the time.
    """


ScreeningRules = GuardConfig
"""The rules that a manifest may name, by ``kind``: a union of the structs above, of one today."""

DEFAULT_SCREENING = GuardConfig()
"""The rule of a manifest that names none."""
