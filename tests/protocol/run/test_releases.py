"""Whether two releases can average follows from the protocols that each serves, and from nothing that either claims."""

from __future__ import annotations

import pytest

from farandole.protocol.run.releases import Software, Standing, is_incomplete, software_of, standing

NEEDED = ["/farandole/push/2", "/farandole/exchange/1"]


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"/farandole/push/2", "/farandole/exchange/1"}, None),
        ({"/farandole/push/2", "/farandole/exchange/1", "/farandole/exchange/2"}, None),  # newer, and serves both
        ({"/farandole/push/2", "/farandole/exchange/2"}, "newer"),
        ({"/farandole/push/1", "/farandole/exchange/1"}, "older"),
        ({"/farandole/push/1", "/farandole/exchange/10"}, "newer"),
        ({"/farandole/push/2"}, None),  # it is starting
        ({"/farandole/relay/7", "/farandole/kad/1.0.0"}, None),
        (set(), None),
    ],
)
def test_releases_fit_if_they_share_a_version_of_each_protocol(theirs: set[str], expected: Standing | None) -> None:
    assert standing([], Software("1", frozenset(theirs)), NEEDED) == expected


def test_a_node_that_serves_an_older_version_too_fits_an_older_one_and_one_that_is_starting_is_asked_again() -> None:
    older = Software("1", frozenset({"/farandole/push/1", "/farandole/exchange/1"}))
    assert standing(["/farandole/push/1"], older, NEEDED) is None
    assert is_incomplete(None, NEEDED)
    assert is_incomplete(Software("1", frozenset({"/farandole/push/2"})), NEEDED)
    assert not is_incomplete(Software("1", frozenset({"/farandole/push/2", "/farandole/exchange/9"})), NEEDED)


def test_what_a_peer_says_is_cut_to_what_a_terminal_may_show() -> None:
    assert software_of("farandole/1.2.3", ["/ipfs/id/1.0.0", "/farandole/push/2"]) == Software(
        "1.2.3", frozenset({"/farandole/push/2"})
    )
    for agent in ("farandole/\x1b[2J", "farandole/1 2", "farandole/" + "1" * 33, "js-libp2p/3.3", "", "farandole/1\n"):
        assert software_of(agent, ["/farandole/push/99999", "/farandole/PUSH/1", "x"]) == Software("", frozenset())
