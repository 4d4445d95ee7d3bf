from __future__ import annotations

import http.client
import json
import math

import msgspec
import pytest
import trio

from farandole.node.status.status import MemberStatus, NodeStatus
from farandole.node.ui.dashboard import views
from farandole.node.ui.dashboard.app import open_dashboard
from farandole.node.ui.dashboard.views import MAX_POINTS_A_NODE, Curve, RunHistory

from ...statuses import ALICE, BOB, NOW, STATUS
from .page import Shown, open_page

Answer = tuple[int, dict[str, str], bytes]


def ask(shown: Shown, method: str, path: str, body: bytes, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", shown.port, timeout=10)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, sent)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


async def answer(shown: Shown, method: str, path: str, **headers: str) -> Answer:
    return await trio.to_thread.run_sync(lambda: ask(shown, method, path, b"", **headers))


async def test_the_page_and_its_parts_are_served_and_run_no_script_of_others() -> None:
    kinds = {
        "/": "text/html",
        "/dashboard.js": "/javascript",
        "/charts.js": "/javascript",
        "/icon.svg": "image/svg",
        "/style.css": "text/css",
    }
    async with open_page() as shown:
        for path, kind in kinds.items():
            code, headers, body = await answer(shown, "GET", path)
            assert code == 200
            assert kind in headers["content-type"]
            assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
            assert b"http" not in body.replace(b"http-equiv", b"") or path == "/icon.svg"  # no outside assets


async def test_the_overview_says_what_the_status_says() -> None:
    async with open_page() as shown:
        shown.status = msgspec.structs.replace(STATUS, remarks={BOB: "flooded this node"})
        token = f"Bearer {shown.place.token}"
        overview = json.loads((await answer(shown, "GET", "/api/overview", Authorization=token))[2])
        members = json.loads((await answer(shown, "GET", "/api/members", Authorization=token))[2])

    assert overview["headline"]["level"] == "well"
    rows = {row["label"]: (row["value"], row["emphasis"]) for row in overview["rows"]}
    assert rows["doing"] == ("training for 3.0 s: inner steps of round 7", "good")
    assert overview["summary"].startswith("3 live, 1 gone")
    assert "warning" not in rows
    assert overview["status"]["peer_id"] == ALICE
    assert overview["status"]["members"] == []
    assert [member["state"] for member in members["members"]] == ["this node", "live", "gone"]
    assert members["curves"][ALICE] == [[7, 2.5]]
    assert [member["remark"] for member in members["members"]] == ["", "flooded this node", ""]


async def test_who_bears_the_token_may_act() -> None:
    async with open_page() as shown:
        token = f"Bearer {shown.place.token}"
        done = await answer(shown, "POST", "/api/pause", Authorization=token, Origin=shown.place.url.rstrip("/"))
        refused = await answer(shown, "POST", "/api/leave", Authorization=token)
        unknown = await answer(shown, "POST", "/api/explode", Authorization=token)

    assert (done[0], json.loads(done[2])) == (200, {"ok": "pausing"})
    assert shown.actions == ["pause"]
    assert (refused[0], json.loads(refused[2])) == (409, {"error": "it is leaving already"})
    assert unknown[0] == 404


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"upload_mbit": 5}', 200),
        (b"", 200),
        (b'{"upload_mbit": 0.1}', 409),
        (b'{"upload_mbit": true}', 409),
        (b'{"upload_mbit": 1e999}', 400),
        (b"[5]", 400),
        (b"{", 400),
        (b'{"upload_mbit": 5, "x": "' + b"x" * 2_000 + b'"}', 413),
    ],
)
async def test_an_action_takes_a_few_numbers(body: bytes, code: int) -> None:
    async with open_page() as shown:
        token = f"Bearer {shown.place.token}"
        told = await trio.to_thread.run_sync(lambda: ask(shown, "POST", "/api/limit", body, Authorization=token))
    assert told[0] == code, told[2]
    changed = {b'{"upload_mbit": 5}': 5.0, b"": 0.0}
    assert shown.status.upload_mbit == changed.get(body, STATUS.upload_mbit)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer \u00e9"},
        {"Authorization": "TOKEN", "Origin": "https://evil.example"},
        {"Authorization": "TOKEN", "Origin": "null"},
        {"Authorization": "TOKEN", "Host": "evil.example"},
        {"Authorization": "TOKEN", "Host": "127.0.0.1.evil.example:80"},
        {"Authorization": "TOKEN", "Sec_Fetch_Site": "cross-site"},
    ],
)
async def test_others_may_not(headers: dict[str, str]) -> None:
    async with open_page() as shown:
        sent = {name: value.replace("TOKEN", f"Bearer {shown.place.token}") for name, value in headers.items()}
        code, _, body = await answer(shown, "POST", "/api/pause", **sent)

    assert code in (401, 403)
    assert "error" in json.loads(body)
    assert shown.actions == []


async def test_other_pages_and_other_users_of_the_machine_read_nothing_about_members() -> None:
    async with open_page() as shown:
        for path in ("/", "/api/members"):
            for headers in ({"Host": "evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "http://a.b"}):
                assert (await answer(shown, "GET", path, **headers))[0] == 403
        for path in ("/api/overview", "/api/members"):
            for query in ("", "?token=", "?token=wrong", "?token=%c3%a9"):
                code, _, body = await answer(shown, "GET", path + query)
                assert code == 401
                assert ALICE.encode() not in body
        code, _, body = await answer(shown, "GET", "/metrics")
        assert code == 200
        assert not [member for member in STATUS.members if member.peer_id != ALICE and member.peer_id.encode() in body]


async def test_a_port_that_is_taken_is_no_obstacle() -> None:
    async with open_page() as first, open_dashboard(first.port, lambda: STATUS, {}, lambda: 0.0) as second:
        assert second.url != first.place.url


async def test_garbage_costs_nobody_else() -> None:
    async with open_page() as shown:
        for garbage in (
            b"\x00" * 100,
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000,
            b"POST /api/pause HTTP/9\r\n\r\n",
        ):
            stream = await trio.open_tcp_stream("127.0.0.1", shown.port)
            with trio.move_on_after(5):
                try:
                    await stream.send_all(garbage)
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
            await stream.aclose()
        assert (await answer(shown, "GET", "/"))[0] == 200


def in_round(round_index: int, alices: str = "", bobs: str = "", loss: float = 2.0) -> NodeStatus:
    """Return a status in which both are in that round, after averaging with these partners."""

    def member(peer: str, partner: str) -> MemberStatus:
        return msgspec.structs.replace(
            STATUS.members[0], peer_id=peer, round=round_index, last_partner=partner, loss=loss
        )

    return msgspec.structs.replace(STATUS, members=[member(ALICE, alices), member(BOB, bobs)])


def observe(history: RunHistory, status: NodeStatus, now: float) -> None:
    history.observe(status.run, status.members, status.validation, now)


def test_a_meeting_is_seen_once_though_both_tell_of_it() -> None:
    history = RunHistory()
    observe(history, in_round(1, alices=BOB, bobs=ALICE), NOW)  # before it was seen: no meeting of now
    observe(history, in_round(2, alices=BOB), NOW + 1)
    observe(history, in_round(2, alices=BOB, bobs=ALICE), NOW + 2)
    observe(history, in_round(3, alices=BOB, bobs=ALICE), NOW + 3)
    observe(history, in_round(4), NOW + 4)

    meetings = list(history.meetings.values())
    assert [(meeting.round, meeting.at) for meeting in meetings] == [(2, NOW + 1), (3, NOW + 3)]
    assert {meetings[0].one, meetings[0].other} == {ALICE, BOB}


def test_newcomers_are_seen_though_thousands_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_CURVES", 2)
    history, one = RunHistory(), in_round(1).members[0]
    for generation in "abc":
        members = [msgspec.structs.replace(one, peer_id=f"{generation}{number}") for number in range(2)]
        for round_index in (1, 2):
            now = [msgspec.structs.replace(each, round=round_index, last_partner=BOB) for each in members]
            observe(history, msgspec.structs.replace(STATUS, members=now), NOW)
        assert set(history.losses) == {f"{generation}0", f"{generation}1"}
        assert list(history.meetings.values())[-1].one == f"{generation}1"


def test_what_cannot_be_drawn_or_is_not_newer_is_no_point() -> None:
    curve = Curve(8)
    for x, y in ((0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf), (2, 4.0), (1, 5.0)):
        curve.add(x, y)
    assert curve.points == [(0, 1.0), (2, 2.0)]


def test_a_curve_stays_small_and_keeps_its_ends_in_order() -> None:
    curve = Curve(MAX_POINTS_A_NODE)
    for x in range(100_000):
        curve.add(x, -x)

    xs = [x for x, _ in curve.points]
    assert MAX_POINTS_A_NODE / 4 < len(xs) < MAX_POINTS_A_NODE
    assert xs == sorted(xs)
    assert xs[0] == 0
    assert xs[-1] > 95_000
