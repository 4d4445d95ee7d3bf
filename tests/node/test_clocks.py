"""Every timeout is monotonic: the time of day is read only where it is reported or shown."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from farandole.node.mesh.dialler import MIN_RESERVATION_SECONDS, seconds_left
from farandole.protocol.mesh.relay import RESERVATION_SECONDS

NODE = Path(__file__).parents[2] / "node"
NOW = 1_750_000_000
TIME_OF_DAY = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}
READ_IN = {
    "app/commands/checkpoints.py": "when a run was made, in its manifest",
    "app/commands/plan.py": "when a run was made, in its manifest",
    "app/commands/runs.py": "when a run was made, in its manifest",
    "app/doctor/examination.py": "compared with that of others",
    "app/doctor/peers.py": "compared with that of others",
    "app/serving.py": "when an answer was made, told to its client",
    "daemon.py": "since when the node runs, shown",
    "inspect/peek.py": "until when a visit is good",
    "join/address_book.py": "when a peer was reached last, kept from one life to the next",
    "join/invites.py": "until when an invite is good",
    "member/assembly.py": "a number that grows from one life to the next",
    "mesh/gate.py": "whether an invite has expired",
    "mesh/reach/reachability.py": "told to whoever asks what time it is",
    "mesh/reach/connectivity.py": "libp2p says in time of day until when a reservation lasts",
    "mesh/dialler.py": "libp2p says in time of day until when a reservation lasts",
    "own_loop/attachment.py": "since when the loop tells what its node warns of",
    "own_loop/create.py": "when a run was made, in its manifest",
    "relay_page.py": "when a page was written, shown",
    "state/gossip.py": "of entries, whose author says when they were written; never for who lives",
    "status/journal.py": "since when the phase lasts, shown",
    "ui/watch/app.py": "the time of a line",
}


def reads_time_of_day(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in TIME_OF_DAY
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_the_time_of_day_is_read_where_it_is_known_to_be() -> None:
    found = {str(path.relative_to(NODE)) for path in NODE.rglob("*.py") if reads_time_of_day(path)}
    assert found == set(READ_IN)


@pytest.mark.parametrize(
    ("ahead", "seconds"),
    [(0, 3_600), (-3_600, RESERVATION_SECONDS), (1_800, 1_800), (3_600, MIN_RESERVATION_SECONDS), (30 * 86_400, 60)],
)
def test_a_wrong_clock_loses_nobody_its_relay(ahead: float, seconds: float) -> None:
    """The relay grants an hour, by its own clock."""
    assert seconds_left(NOW + 3_600, NOW + ahead) == seconds
