from __future__ import annotations

import io
import json
import re
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, RenderableType

from farandole.node.base import figures
from farandole.node.status.status import NodeStatus, PipelineStatus, TrafficStatus
from farandole.node.ui.exposition import metrics_text
from farandole.node.ui.view import members_table, status_rows, status_screen

from ..statuses import ALICE, BOB, NOW, STATUS


def shown(renderable: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def table(status: NodeStatus, **changes: object) -> str:
    return shown(members_table(msgspec.structs.replace(status, **changes)))


def line(status: NodeStatus, label: str) -> str:
    return next(text for text in shown(status_screen(status, NOW)).splitlines() if text.startswith(label))


def test_every_question_is_answered_on_one_screen() -> None:
    text = shown(status_screen(STATUS, NOW))
    assert len(text.splitlines()) <= 24
    assert text.startswith("training with 2 others, round 7")
    assert text.splitlines()[1].startswith("demo  run abababababababab  member")
    assert "training for 3.0 s: inner steps of round 7" in line(STATUS, "doing")
    assert "nothing" in line(STATUS, "waits for")
    assert "round 7, 350 inner steps (12 in this round), 717 k tokens at 9.50 k/s" in line(STATUS, "progress")
    assert "2.500 from 5.500  █▇▆▅▃▂▁" in line(STATUS, "loss")
    assert "2.610 (1.234 bits per byte) on held-out text after round 5" in text
    assert "6 committed with 2 partners (5 over a channel of their own, 1 over" in line(STATUS, "exchanges")
    assert f"round 6 with {BOB[-8:]}: committed, 2.00 MB sent, 2.00 MB received" in line(STATUS, "last exchange")
    assert "3 live, 1 gone; 2.10 M tokens at 28.0 k/s; loss 2.550 (2.500 to 2.600)" in line(STATUS, "the run")
    assert "2 peers connected (members: 1 direct)" in line(STATUS, "links")
    assert "1 min 18 s ago: the trainer died" in line(STATUS, "warning")


def test_a_relay_has_no_rows_of_training() -> None:
    relay = msgspec.structs.replace(STATUS, phase="relaying", is_member=False, connected_peers=1)
    labels = {row.label for row in status_rows(relay, NOW)}
    assert not labels & {"progress", "loss", "exchanges", "last exchange", "the run"}
    assert line(relay, "links").split(maxsplit=1)[1].startswith("1 peer connected")


TRAFFIC = TrafficStatus(limit=100 * 10**9, used=25 * 10**9, is_saved=False, resumes_at=0.0)
SAVED = msgspec.structs.replace(TRAFFIC, is_saved=True, resumes_at=datetime(2026, 11, 24, 14).timestamp())
REASONS = {"out of time": 4, "the round is over": 2}
PIPELINE = PipelineStatus(1, 3, 1_300, 1_234, 6, 2, 1, 0, REASONS, 5_000_000, 4_000_000)
RELAYS = [BOB, "12D3KooWdavesrelay"]
STAGES = msgspec.structs.replace(STATUS.run, providers=[2, 0, 1])
RELEASES = msgspec.structs.replace(STATUS.run, versions={STATUS.version: 1, "0.0.9": 2})


@pytest.mark.parametrize(
    ("label", "words", "changes"),
    [
        ("exchanges", "committed with 1 partner (", {"partners": {BOB: 1}}),
        ("", "2.610 on held-out text after round 5", {"bits_per_byte": None}),
        (
            "reached",
            f"by hole punching; through 2 relays: {BOB[-8:]}, ",
            {"reachability": "punchable", "relays": RELAYS},
        ),
        (
            "reached",
            "directly; is a relay for 3 peers, 1 pair talking",
            {"reachability": "public", "relayed_peers": 3, "relayed_circuits": 1},
        ),
        (
            "traffic",
            "sends 4.00 Mbit/s (at most 5); receives 0.80 Mbit/s (no cap)",
            {"upload_mbit": 5.0, "bytes_sent_per_second": 500_000.0, "bytes_received_per_second": 100_000.0},
        ),
        ("this month", "25.0 GB of 100 GB moved", {"traffic": TRAFFIC}),
        ("this month", "until Tue 24 Nov 14:00", {"traffic": SAVED}),
        ("microbatches", "1,234 kept, 3 in flight, 6 dropped (4 of them: out of time), 2", {"pipeline": PIPELINE}),
        ("loss", "known to stage 0", {"stage": 1, "loss": None, "pipeline": PIPELINE}),
        ("stage", "2 of 3 (0 to 2); live in each: 2, 0, 1; nobody holds 1", {"stage": 2, "run": STAGES}),
        ("", "not a member yet", {"phase": "joining", "is_member": False}),
        ("waits for", "a bootstrap peer", {"phase": "joining", "is_member": False, "waits_for": "a bootstrap peer"}),
        ("loss", "not measured yet", {"loss": None, "losses": [], "validation": []}),
        ("releases", "2 members run farandole 0.0.9; this node 0.1.0", {"run": RELEASES}),
    ],
)
def test_a_row_says_what_the_status_says(label: str, words: str, changes: dict[str, object]) -> None:
    status = msgspec.structs.replace(STATUS, **changes)
    assert words in (line(status, label) if label else shown(status_screen(status, NOW)))


def test_the_table_of_members_has_remarks_stages_and_releases_where_there_are_any() -> None:
    plain = table(STATUS, run=msgspec.structs.replace(STATUS.run, providers=[3]))
    assert "stage" not in plain
    assert "version" not in plain
    remarks = {BOB: "flooded this node (invited by GWsfZmfG)"}
    assert f"{BOB[-8:]} flooded this node (invited by GWsfZmfG)" in table(STATUS, remarks=remarks)
    members = [msgspec.structs.replace(STATUS.members[0], stage=2), *STATUS.members[1:]]
    staged = table(STATUS, members=members, run=STAGES)
    assert staged.splitlines()[1].split()[2] == "2"
    assert "live in each stage: 2 in 0, 0 in 1, 1 in 2" in staged
    apart = msgspec.structs.replace(STATUS.members[1], version="9.8", is_apart=True, is_live=False)
    differing = table(STATUS, members=[STATUS.members[0], apart])
    assert "other release" in differing
    assert "gone" not in differing
    assert "9.8" in differing


def test_words_from_peers_are_not_markup() -> None:
    hostile = msgspec.structs.replace(STATUS, device="[red]x", phase_detail="[/]", warnings=["[bold]"])
    assert "[red]x" in shown(status_screen(hostile, NOW))
    member = msgspec.structs.replace(STATUS.members[0], device="[/oops]")
    assert "[/oops]" in table(STATUS, members=[member])
    assert f'{ALICE[-8:]} "[/oops]"' in table(STATUS, names={ALICE: "[/oops]"})


def test_names_stand_behind_ids_and_give_way_to_them() -> None:
    named = msgspec.structs.replace(STATUS, names={BOB: "Anna's PC", ALICE: "x" * 32})
    assert f'{BOB[-8:]} "Anna\'s PC" ' in shown(members_table(named))
    assert f'round 6 with {BOB[-8:]} "Anna\'s PC": committed' in line(named, "last exchange")
    narrow = shown(members_table(named), width=70).splitlines()
    assert [row[:8] for row in narrow[1:3]] == [ALICE[-8:], BOB[-8:]], "only names are cut off"
    assert len(narrow) == 4, "a name begins no line"


def test_counts_have_three_figures_and_durations_two_units() -> None:
    counts = {0: "0", 999: "999", 1_000: "1.00 k", 12_345: "12.3 k", 999_999: "1.00 M", 2.5e9: "2.50 G"}
    assert {value: figures.count(value) for value in counts} == counts
    durations = {-1: "0.0 s", 3.21: "3.2 s", 59.6: "1 min 00 s", 185: "3 min 05 s", 7_800: "2 h 10 min"}
    assert {value: figures.duration(value) for value in durations} == durations
    assert figures.duration(273_600) == "3 d 4 h"


def test_a_chart_has_at_most_its_width_and_rises_through_its_lines() -> None:
    assert figures.chart([], 10) == [""]
    assert figures.chart([1.0], 10) == ["▁"]
    assert figures.chart([3.0, 2.0, 1.0], 10) == ["█▅▁"]
    assert figures.chart([3.0, 2.0, 1.0], 10, 2) == ["█▁ ", "██▁"]
    assert [len(line) for line in figures.chart([float(i) for i in range(256)], 40, 3)] == [40, 40, 40]


GRAFANA = Path(__file__).parents[3] / "grafana" / "farandole.json"
COUNTED = PipelineStatus(1, 3, 100, 90, 10, 5, 1, 2, {"deadline": 10}, 1_000, 2_000)
RUN = msgspec.structs.replace(STATUS.run, providers=[2, 1])
FULL = msgspec.structs.replace(STATUS, run=RUN, pipeline=COUNTED, validation=[(5, 2.5)], utilisation=0.9)


def samples(status: NodeStatus) -> dict[tuple[str, str], float]:
    """Return (name, value of the only label) -> figure, as Prometheus reads them."""
    return {
        (sample.name, "".join(sample.labels.values()) if len(sample.labels) == 1 else ""): sample.value
        for family in text_string_to_metric_families(metrics_text(status).decode())
        for sample in family.samples
    }


def test_prometheus_reads_what_the_status_says() -> None:
    expected = {
        ("farandole_round", ""): FULL.round,
        ("farandole_tokens_total", ""): FULL.tokens,
        ("farandole_rounds_total", "committed"): FULL.exchanges_ok,
        ("farandole_run_members", "live"): FULL.run.members_live,
        ("farandole_validation_loss", ""): 2.5,
        ("farandole_validation_bits_per_byte", ""): 1.234,
        ("farandole_microbatches_total", "rerouted"): 5,
        ("farandole_phase", FULL.phase): 1,
        ("farandole_node_info", ""): 1,
    }
    assert samples(FULL).items() >= expected.items()


def test_what_is_not_known_is_left_out() -> None:
    empty = msgspec.structs.replace(STATUS, loss=None, validation=[], utilisation=None, recent_exchanges=[])
    empty = msgspec.structs.replace(empty, bits_per_byte=None)
    names = {name for name, _ in samples(msgspec.structs.replace(empty, last_exchange=None))}
    assert not names & {"farandole_loss", "farandole_validation_loss", "farandole_utilisation_ratio"}
    assert "farandole_validation_bits_per_byte" not in names
    assert not names & {"farandole_exchange_seconds", "farandole_stage"}
    assert "farandole_round" in names


def test_words_of_others_cannot_break_the_format() -> None:
    hostile = msgspec.structs.replace(STATUS.run, name='a"} 1\nfarandole_tokens_total 9\\')
    assert samples(msgspec.structs.replace(STATUS, run=hostile))["farandole_tokens_total", ""] == STATUS.tokens


def test_every_figure_of_the_grafana_dashboard_exists_and_every_figure_has_its_place() -> None:
    names = {name for name, _ in samples(FULL)}
    names -= {name for name in names if name.endswith("_created")}
    expressions = [target["expr"] for panel in json.loads(GRAFANA.read_text())["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"farandole_\w+", expression)}
    assert shown <= names
    assert names - shown <= {"farandole_stage"}
