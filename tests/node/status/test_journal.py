from __future__ import annotations

import csv
import dataclasses
import io
import logging
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tensorboardX.proto.event_pb2 import Event

from farandole.node.base import logs
from farandole.node.base.errors import Exit
from farandole.node.base.logs import logging_to_file
from farandole.node.base.settings import NodeSettings
from farandole.node.status.journal import DISK, MAX_EVENTS, MAX_WARNINGS, WARNING_SECONDS, Journal
from farandole.node.status.round_log import RoundRecord, read_rounds, write_events
from farandole.node.status.status import NOT_BEGUN, REFUSED_HERE, NodeStatus
from farandole.protocol.run.roster import Roster
from farandole.protocol.state.entries import Delta, Kind, Member
from farandole.protocol.state.state import RunState
from farandole.protocol.wire.identity import peer_id_of, short_name

from ...protocol.authors import CREATOR, NOW, RUN_ID, author_of, signed, tick_at
from ...protocol.run.test_invitations import BEN, MALLORY, admit, invitation, sponsored
from ..conftest import Cli
from ..statuses import STATUS, ended, round_end


def test_a_month_of_strangers_is_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.node.status.journal.MAX_PARTNERS", 2)
    journal = Journal(lambda text: None)
    for peer in (b"a", b"a", b"b", b"c", b"d"):
        journal.record_exchange(ended(0, peer * 32))
    assert journal.history.partners == {peer_id_of(b"a" * 32): 2, peer_id_of(b"d" * 32): 1}
    assert journal.history.exchanges_ok == 5


def test_what_happened_is_kept_in_words_and_is_bounded() -> None:
    said: list[str] = []
    journal = Journal(said.append, clock=lambda: 1.0)
    journal.say("hello")
    journal.note("only for who looks")
    journal.warn("the disk is full")
    assert said == ["hello", "warning: the disk is full"]
    assert [(event.text, event.is_warning) for event in journal.events] == [
        ("hello", False),
        ("only for who looks", False),
        ("the disk is full", True),
    ]

    for index in range(2 * MAX_EVENTS):
        journal.note(str(index))
    assert len(journal.events) == MAX_EVENTS
    assert journal.events[-1].text == str(2 * MAX_EVENTS - 1)


def test_a_warning_has_its_time_and_ends_when_its_cause_does() -> None:
    now, said = [0.0], list[str]()
    journal = Journal(said.append, clock=lambda: now[0])
    journal.warn("the disk is full, 3 MB are free", f"{DISK}store")
    journal.warn("port 1 is taken")
    now[0] = 5.0
    journal.warn("the disk is full, 2 MB are free", f"{DISK}store")
    assert said == ["warning: the disk is full, 3 MB are free", "warning: port 1 is taken"]
    assert [(event.at, event.text) for event in journal.standing] == [
        (0.0, "port 1 is taken"),
        (5.0, "the disk is full, 2 MB are free"),
    ]
    assert journal.disk == "the disk is full, 2 MB are free"
    journal.over(f"{DISK}store")
    assert (journal.warnings, journal.disk) == (["port 1 is taken"], "")
    journal.warn("the disk is full, 2 MB are free", f"{DISK}store")
    assert len(said) == 3, "it is full again"
    for number in range(2 * MAX_WARNINGS):
        journal.blame(bytes([number]) * 32, "flooded")
    assert journal.disk, "it is not pushed out by peers that are named"
    assert len(journal.warnings) == MAX_WARNINGS
    now[0] = WARNING_SECONDS + 6.0
    assert journal.warnings == ["the disk is full, 2 MB are free"], "nothing has ended it"


def test_a_peer_is_named_once_for_what_it_does_and_with_who_invited_it() -> None:
    said: list[str] = []
    journal = Journal(said.append)
    eve, bob = author_of(MALLORY), author_of(BEN)
    of_bob, members = admit(invitation(quota=1), BEN), Roster(RUN_ID, CREATOR)
    for admission in (of_bob, admit(sponsored(of_bob, BEN, range(1)), MALLORY)):
        members.admit(admission)
    journal.run = RunState(RUN_ID, CREATOR, roster=members)
    tick, names = tick_at(Kind.MEMBER), ((MALLORY, "Eve"), (BEN, "Bob"))
    told = (signed(number, Kind.MEMBER, 0, tick, Member(name=name)) for number, name in names)
    journal.run.merge(Delta(tuple(told)), NOW)
    journal.finish_round(round_end(1, ended(1, eve)))
    assert f'; averaged with {short_name(eve)} "Eve", ' in said[-1]

    def meet(number: int, failure: str = "", clip: float = 1.0) -> None:
        for peer in (eve, bob):  # of three meetings with Bob, two are good
            ended_well = peer == bob and number % 3
            exchange = ended(number, peer, "" if ended_well else failure)
            journal.record_exchange(dataclasses.replace(exchange, clip=1.0 if ended_well else clip))

    for failure, clip in ((f"{REFUSED_HERE} far", 1.0), (NOT_BEGUN, 1.0), ("", 0.2)):
        for number in range(9):
            meet(number, failure, clip)
    journal.blame(eve, "flooded")
    journal.blame(eve, "flooded")
    invited = f' (invited by {short_name(bob)} "Bob")'
    assert [text for text in said if text.startswith("warning")] == [
        f'warning: {short_name(eve)} "Eve" {words}{invited}'
        for words in (
            "sent contributions that were refused",
            "agreed to exchanges and did not come",
            "sent contributions that counted in part, or not at all",
            "flooded this node, which keeps it out for a while",
        )
    ]
    assert list(journal.remarks) == [peer_id_of(eve)]
    assert journal.remarks[peer_id_of(eve)].endswith(f", flooded this node, which keeps it out for a while{invited}")


def test_why_an_exchange_failed_is_told_once() -> None:
    journal = Journal(lambda text: None)
    bob = b"b" * 32
    journal.record_exchange(ended(1, bob, "refused: the norm is off"))  # the refusing node has warned of it
    journal.record_exchange(ended(2, bob, "the partner aborted: refused: the norm is off"))
    journal.record_exchange(ended(3, bob, "the partner died"))
    name = short_name(bob)
    assert [event.text for event in journal.events] == [
        f"{name} refused this node's contribution: the norm is off",
        f"the exchange of round 3 with {name} failed: the partner died",
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_in_no_curve_and_in_no_round(loss: float) -> None:
    """JSON cannot hold it: a reader of the status would find null in place of a number."""
    rounds: list[RoundRecord] = []
    journal = Journal(lambda text: None, keep_round=rounds.append)
    for number in (3.0, loss, 2.0):
        journal.history.add_loss(7, number)
        journal.record_validation(7, number)
        journal.finish_round(round_end(7, loss=number))
    assert list(journal.history.losses) == list(journal.history.validation) == [(7, 3.0), (7, 2.0)]
    assert [record.loss for record in rounds] == [3.0, None, 2.0]
    assert "held-out text" in journal.warnings[-1]

    journal.update(loss=loss)
    status = msgspec.structs.replace(STATUS, loss=journal.state.loss, losses=list(journal.history.losses))
    assert msgspec.json.decode(msgspec.json.encode(status), type=NodeStatus).loss is None


BOB = b"b" * 32
NAME = peer_id_of(BOB)


def played(journal: Journal, num_rounds: int, bits_per_byte: float | None = None) -> None:
    """Play rounds with Bob; every third is alone, and every fourth is measured on held-out text."""
    for number in range(num_rounds):
        loss = 4.0 - number / 10
        if number % 3 == 2:
            journal.finish_round(round_end(number, alone="nobody is there", loss=loss))
        else:
            exchange = ended(number, BOB, bytes_sent=4_000_000, bytes_received=8, seconds=0.5, path="bulk")
            journal.finish_round(round_end(number, exchange, loss=loss))
        if number % 4 == 0:
            journal.record_validation(number, 3.5, bits_per_byte)


def log_of(home: Path, num_rounds: int, bits_per_byte: float | None = None) -> NodeSettings:
    """Play rounds as a daemon does, which prints and logs them."""
    settings = NodeSettings(home=home)
    with logging_to_file(settings):
        journal = Journal(logs.say, keep_round=logs.keep_round, clock=lambda: 1_000.0)
        played(journal, num_rounds, bits_per_byte)
        logging.getLogger("farandole.test").info("another line")
    return settings


def test_a_round_is_told_to_people_and_kept_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = log_of(tmp_path, 3)
    said = capsys.readouterr().out.splitlines()
    assert [line[10:] for line in said] == [
        f"round 0: 5 inner steps, loss 4.000; averaged with {NAME[-8:]}, 4.00 MB each way in 0.50 s",
        f"round 1: 5 inner steps, loss 3.900; averaged with {NAME[-8:]}, 4.00 MB each way in 0.50 s",
        "round 2: 5 inner steps, loss 3.800; alone: nobody is there",
    ]
    first, second, third = read_rounds(settings.rounds)
    assert first == RoundRecord(1_000.0, 0, 5, 640, 2.5, 4.0, None, "committed", NAME, 4_000_000, 8, 0.5, "bulk", 0)
    assert (second.validation, third.validation) == (3.5, None)  # reported once
    assert third.verdict == "alone: nobody is there"
    assert "inner_steps" not in settings.log.read_text()


def test_bits_per_byte_are_kept_with_the_loss_and_a_record_without_them_is_read(tmp_path: Path) -> None:
    settings = log_of(tmp_path, 3, bits_per_byte=1.25)
    assert [record.bits_per_byte for record in read_rounds(settings.rounds)] == [None, 1.25, None]
    settings.rounds.write_text(settings.rounds.read_text().replace('"bits_per_byte": 1.25', '"unknown": 1'))
    assert [(each.validation, each.bits_per_byte) for each in read_rounds(settings.rounds)][1] == (3.5, None)


def test_what_failed_exchanges_sent_is_counted_in_their_round() -> None:
    rounds: list[RoundRecord] = []
    journal = Journal(lambda text: None, keep_round=rounds.append)
    why = "127 MB did not fit into 30 s at 20 Mbit/s up"
    for number in (0, 1):
        failed = ended(number, BOB, why, bytes_sent=75_000_000, bytes_received=9, seconds=21.0, path="bulk")
        used = ended(number, BOB, bytes_sent=127_000_000, bytes_received=8, seconds=2.0, path="bulk")
        end = round_end(0, failed, alone=f"the exchange failed: {why}") if number == 0 else round_end(1, failed, used)
        journal.finish_round(end)
    alone, second_try = rounds

    assert alone.line().endswith(f"alone: the exchange failed: {why}")
    assert (alone.bytes_sent, alone.bytes_received, alone.contribution_bytes) == (75_000_000, 9, 0)
    assert (alone.failed_partner, alone.failure) == (NAME, f"failed: {why}")
    assert (second_try.bytes_sent, second_try.contribution_bytes) == (202_000_000, 127_000_000)
    assert "127.00 MB each way in 2.00 s" in second_try.line()


def test_lines_that_were_cut_short_are_left_out_and_the_older_file_comes_first(tmp_path: Path) -> None:
    settings = log_of(tmp_path, 4)
    lines = settings.rounds.read_text().splitlines(keepends=True)
    settings.rounds.with_name("rounds.jsonl.1").write_text("".join(lines[:2]) + lines[3][:40] + "\n" + "x" * 9 + "\n")
    settings.rounds.write_text(lines[2] + lines[3][:40])
    assert [record.round for record in read_rounds(settings.rounds)] == [0, 1, 2]


def test_the_command_prints_rounds_without_a_node(cli: Cli, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli("run", "metrics")
    assert (code, "no round is over yet" in err) == (Exit.BAD_INPUT, True)
    log_of(home, 30)
    capsys.readouterr()
    rows = csv.DictReader(io.StringIO(cli("run", "metrics", "--csv")[1]))
    assert [row["round"] for row in rows] == [str(n) for n in range(30)]
    assert len(cli("run", "metrics", "--csv", "--last", "3")[1].splitlines()) == 4
    table = cli("run", "metrics")[1]
    assert "alone: nobody is there" in table
    assert len([line for line in table.splitlines() if " 640 " in line]) == 20


@pytest.mark.parametrize("width", [200, 80])
def test_the_table_fits_the_terminal(
    cli: Cli, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    why = "the exchange failed: 127 MB did not fit into 30 s at 20 Mbit/s up"
    log_of(home, 5)
    with logging_to_file(NodeSettings(home=home)):
        Journal(logs.say, keep_round=logs.keep_round).finish_round(round_end(5, alone=why, loss=3.5))
    capsys.readouterr()
    header, *rows, _ = cli("run", "metrics")[1].splitlines()
    assert re.split(r" {2,}", header.strip())[-1] == "outer step with"
    assert len(rows) == 6
    assert all(len(line) <= width for line in (header, *rows))
    assert f"{NAME[-8:]}, 4.00 MB, 0.5 s" in rows[0]
    assert f"alone: {why}" in rows[5] if width == 200 else rows[5].rstrip().endswith("…")


FIRST = RoundRecord(1_000.5, 0, 5, 640, 2.0, 4.0, 3.5, "committed", "12D3", 4_000_000, 2_000_000, 0.5, "bulk", 3)
FIRST = msgspec.structs.replace(FIRST, bits_per_byte=1.25)
LAST = RoundRecord(1_002.5, 300, 5, 640, 2.0, None, None, "alone: nobody is there", "", 0, 0, 0.0, "", 0)


def events_of(path: Path) -> Iterator[Event]:
    """Yield the events of a TFRecord file: each has its length and a checksum before it, and a checksum after it."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_each_round_is_an_event_with_what_is_known_of_it(tmp_path: Path) -> None:
    version, *events = events_of(write_events([FIRST, LAST], 0, tmp_path / "runs" / "mine"))
    assert (version.wall_time, version.file_version) == (1_000.5, "brain.Event:2")
    assert [(event.wall_time, event.step) for event in events] == [(1_000.5, 0), (1_002.5, 300)]
    first, last = ({value.tag: value.simple_value for value in event.summary.value} for event in events)
    derived = {"round/tokens a second": 320.0, "exchange/committed": 1.0, "exchange/megabytes sent": 4.0}
    assert first.items() >= (derived | {"loss/bits per byte": 1.25, "exchange/inner steps late": 3.0}).items()
    assert len(first) == 14
    of_rounds = {name: first[name] for name in first if name.startswith("round/")}
    assert last == of_rounds | {"round/tokens in all": 1280.0, "exchange/committed": 0.0}


def test_the_command_writes_it(cli: Cli, home: Path, tmp_path: Path) -> None:
    home.mkdir()
    (home / "rounds.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in (FIRST, LAST)))
    write = ("run", "metrics", "--tensorboard")
    code, *said = cli(*write, tmp_path / "runs")
    assert (code, "tensorboard --logdir" in "".join(said)) == (Exit.OK, True)
    (file,) = (tmp_path / "runs").iterdir()
    assert len(list(events_of(file))) == 3
    assert cli(*write, tmp_path / "runs", "--last", "1")[0] == Exit.OK
    _, event = events_of(file)
    assert {value.tag: value.simple_value for value in event.summary.value}["round/tokens in all"] == 1280.0
    assert cli(*write, home / "rounds.jsonl")[0] == Exit.BAD_INPUT
