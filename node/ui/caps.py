"""The bandwidth caps and quiet hours of a running node, as a person changes them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..base.bandwidth import Shaping
from ..base.control import ControlError
from ..base.figures import BYTES_PER_MBIT
from ..base.quiet_hours import QuietHoursError
from ..base.settings import MIN_CAP_MBIT
from ..loop.rest_service import RestService


def set_caps(shaping: Shaping, params: Mapping[str, object]) -> str:
    """Set the caps in Mbit/s (0: none) that ``params`` name, until the node ends; return all caps in words.

    Raises `ControlError` for anything that is no cap.
    """
    caps = {}
    for name, shaper in (("upload_mbit", shaping.up), ("download_mbit", shaping.down)):
        cap = params.get(name, shaper.rate / BYTES_PER_MBIT)
        if isinstance(cap, bool) or not isinstance(cap, int | float):
            raise ControlError("bad_request", "a cap is a number")
        if not (cap == 0 or MIN_CAP_MBIT <= cap < math.inf):
            raise ControlError("bad_request", f"a cap is {MIN_CAP_MBIT:g} Mbit/s or more, or 0 for none")
        caps[shaper] = float(cap)
    for shaper, cap in caps.items():
        shaper.set_rate(cap * BYTES_PER_MBIT)
    up, down = (f"at most {cap:g} Mbit/s" if cap else "without a cap" for cap in caps.values())
    return f"until this node ends: upload {up}, download {down}"


def change_quiet_hours(keeper: RestService, params: Mapping[str, object]) -> str:
    """Keep the quiet hours that ``hours`` in ``params`` lists, with commas between them, until the node ends.

    An empty text ends them. Returns them in words. Raises `ControlError` for anything else that is no quiet hours.
    """
    text = params.get("hours")
    if not isinstance(text, str):
        raise ControlError("bad_request", "hours is a text, such as 22:00-07:30")
    hours = [part.strip() for part in text.split(",") if part.strip()]
    try:
        keeper.change_hours(hours)
    except QuietHoursError as error:
        raise ControlError("bad_request", str(error)) from error
    return f"until this node ends: quiet hours {', '.join(hours)}" if hours else "until this node ends: no quiet hours"
