"""The file for TensorBoard, read with the protocol buffers of tensorboardX."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tensorboardX.proto.event_pb2 import Event

from farandole.node.base.exits import Exit
from farandole.node.cli import main
from farandole.node.status.round_log import RoundRecord, write_events

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
    assert first == {
        "loss/training": 4.0,
        "loss/held out": 3.5,
        "loss/bits per byte": 1.25,
        "round/inner steps": 5.0,
        "round/tokens": 640.0,
        "round/tokens in all": 640.0,
        "round/seconds": 2.0,
        "round/tokens a second": 320.0,
        "exchange/committed": 1.0,
        "exchange/seconds": 0.5,
        "exchange/megabytes sent": 4.0,
        "exchange/megabytes received": 2.0,
        "exchange/clip": 1.0,
        "exchange/inner steps late": 3.0,
    }
    of_rounds = {name: first[name] for name in first if name.startswith("round/")}
    assert last == of_rounds | {"round/tokens in all": 1280.0, "exchange/committed": 0.0}


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in (FIRST, LAST)))

    def run(folder: Path, *arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "metrics", "--home", str(tmp_path), "--tensorboard", str(folder), *arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    code, said = run(tmp_path / "runs")
    assert (code, "tensorboard --logdir" in said) == (Exit.OK, True)
    (file,) = (tmp_path / "runs").iterdir()
    assert len(list(events_of(file))) == 3
    assert run(tmp_path / "runs", "--last", "1")[0] == Exit.OK
    _, event = events_of(file)
    assert {value.tag: value.simple_value for value in event.summary.value}["round/tokens in all"] == 1280.0
    assert run(tmp_path / "rounds.jsonl")[0] == Exit.BAD_INPUT
