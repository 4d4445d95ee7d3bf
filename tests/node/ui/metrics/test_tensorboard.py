"""The file for TensorBoard, read again as its format says, and by TensorBoard where it is installed."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.node.base.exits import Exit
from farandole.node.status.round_log import RoundRecord
from farandole.node.ui.metrics.tensorboard import crc32c, write_events
from farandole.testnet.cli import main

FIRST = RoundRecord(1_000.5, 0, 5, 640, 2.0, 4.0, 3.5, "committed", "12D3", 4_000_000, 2_000_000, 0.5, "bulk", 3)
LAST = RoundRecord(1_002.5, 300, 5, 640, 2.0, None, None, "alone: nobody is there", "", 0, 0, 0.0, "", 0)


def fields_of(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer."""
    place = 0

    def varint() -> int:
        nonlocal place
        number = shift = 0
        while True:
            byte = data[place]
            place += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while place < len(data):
        tag = varint()
        match tag & 7:
            case 0:
                yield tag >> 3, varint()
            case 2:
                size = varint()
                place += size
                yield tag >> 3, data[place - size : place]
            case kind:
                size, form = {1: (8, "<d"), 5: (4, "<f")}[kind]
                place += size
                yield tag >> 3, struct.unpack(form, data[place - size : place])[0]


def records_of(data: bytes) -> Iterator[bytes]:
    def checked(part: bytes, checksum: bytes) -> bytes:
        unmasked = (int.from_bytes(checksum, "little") - 0xA282EAD8) & 0xFFFFFFFF
        assert crc32c(part) == (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF
        return part

    while data:
        size = int.from_bytes(checked(data[:8], data[8:12]), "little")
        yield checked(data[12 : 12 + size], data[12 + size : 16 + size])
        data = data[16 + size :]


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_each_round_is_an_event_with_what_is_known_of_it(tmp_path: Path) -> None:
    path = write_events([FIRST, LAST], tmp_path / "runs" / "mine")
    version, *events = map(dict, map(fields_of, records_of(path.read_bytes())))
    assert (version[1], version[3]) == (1_000.5, b"brain.Event:2")
    assert [(event[1], event[2]) for event in events] == [(1_000.5, 0), (1_002.5, 300)]
    first, last = (
        {value[1].decode(): value[2] for _, raw in fields_of(event[5]) if (value := dict(fields_of(raw)))}
        for event in events
    )
    assert first == {
        "loss/training": 4.0,
        "loss/held out": 3.5,
        "round/inner steps": 5.0,
        "round/tokens": 640.0,
        "round/tokens a second": 320.0,
        "exchange/committed": 1.0,
        "exchange/seconds": 0.5,
        "exchange/megabytes sent": 4.0,
        "exchange/megabytes received": 2.0,
        "exchange/inner steps late": 3.0,
    }
    assert last == {name: first[name] for name in first if name.startswith("round/")} | {"exchange/committed": 0.0}


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    try:
        accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError as error:
        pytest.skip(f"TensorBoard is not here: {error}")
    write_events([FIRST, LAST], tmp_path)
    read = accumulators.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("round/tokens")] == [(0, 640.0), (300, 640.0)]
    assert [(event.wall_time, event.value) for event in read.Scalars("loss/training")] == [(1_000.5, 4.0)]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import msgspec

    (tmp_path / "rounds.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in (FIRST, LAST)))

    def run(folder: Path, *arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", "metrics", "--home", str(tmp_path), "--tensorboard", str(folder), *arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    code, said = run(tmp_path / "runs")
    assert (code, "tensorboard --logdir" in said) == (Exit.OK, True)
    (file,) = (tmp_path / "runs").iterdir()
    assert len(list(records_of(file.read_bytes()))) == 3
    assert run(tmp_path / "runs", "--last", "1")[0] == Exit.OK
    assert len(list(records_of(file.read_bytes()))) == 2
    assert run(tmp_path / "rounds.jsonl")[0] == Exit.BAD_INPUT
