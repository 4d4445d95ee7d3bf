from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from farandole.node.status.status import NodeStatus, PipelineStatus
from farandole.node.ui.exposition import metrics_text

from ..statuses import STATUS

GRAFANA = Path(__file__).parents[3] / "grafana" / "farandole.json"
PIPELINE = PipelineStatus(1, 3, 100, 90, 10, 5, 1, 2, {"deadline": 10}, 1_000, 2_000)
RUN = msgspec.structs.replace(STATUS.run, providers=[2, 1])
FULL = msgspec.structs.replace(STATUS, run=RUN, pipeline=PIPELINE, validation=[(5, 2.5)], utilisation=0.9)


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
