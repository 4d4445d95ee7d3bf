"""A node's status in Prometheus' text format, with stable names.

Names, types and units follow prometheus.io/docs/practices/naming. Unknown values are left out, as Prometheus
recommends, and not reported as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..status.status import NodeStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(status: NodeStatus) -> bytes:
    """Return the figures of one status."""
    return generate_latest(_Moment(status))


# Kind, name after "farandole_", meaning, and where a status has the figure. Those of every node:
_OF_ALL: Final = (
    (Gauge, "start_time_seconds", "When the node began, Unix time.", "started_at"),
    (Gauge, "sent_bytes_per_second", "All traffic, 10 s mean.", "bytes_sent_per_second"),
    (Gauge, "received_bytes_per_second", "All traffic, 10 s mean.", "bytes_received_per_second"),
    (Gauge, "connected_peers", "Peers with a connection.", "connected_peers"),
    (Gauge, "relayed_peers", "Peers that this node leads to.", "relayed_peers"),
    (Gauge, "relayed_circuits", "Pairs that talk through it now.", "relayed_circuits"),
)
# Those of a node that trains; a relay does not, and is no member that knows the others' state.
_OF_MEMBERS: Final = (
    (Gauge, "round", "The round under way.", "round"),
    (Count, "inner_steps", "Inner steps taken.", "inner_steps"),
    (Count, "tokens", "Tokens trained on.", "tokens"),
    (Gauge, "tokens_per_second", "In the newest round.", "tokens_per_second"),
    (Gauge, "loss", "Training loss of the newest round, nats a token.", "loss"),
    (Gauge, "validation_bits_per_byte", "Newest loss on held-out text, bits per byte.", "bits_per_byte"),
    (Gauge, "utilisation_ratio", "Share of the last few rounds that went into inner steps.", "utilisation"),
    (Count, "trainer_restarts", "Trainers that were replaced.", "trainer_restarts"),
    (Count, "contribution_sent_bytes", "Of contributions, sent.", "bytes_sent"),
    (Count, "contribution_received_bytes", "Of contributions, received.", "bytes_received"),
    (Count, "run_tokens", "Tokens that the whole run has trained on.", "run.tokens"),
    (Gauge, "run_tokens_per_second", "Of all live members.", "run.tokens_per_second"),
    (Gauge, "run_loss", "Mean training loss of the live members.", "run.loss_mean"),
)
# Those of a node that holds a stage.
_OF_STAGES: Final = (
    (Gauge, "stage", "The stage that this node holds.", "pipeline.stage"),
    (Gauge, "microbatches_in_flight", "In the trainer's memory.", "pipeline.in_flight"),
    (Count, "activation_sent_bytes", "Activations and gradients.", "pipeline.bytes_sent"),
    (Count, "activation_received_bytes", "Activations and gradients.", "pipeline.bytes_received"),
)


class _Moment(Collector):
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status, run, pipeline, last = self._status, self._status.run, self._status.pipeline, self._status.last_exchange
        is_member = status.phase != "relaying"
        labels = {name: getattr(status, name) for name in ("version", "peer_id", "device", "reachability")}
        labels |= {"run": run.name, "run_id": run.run_id}
        yield InfoMetricFamily("farandole_node", "Which node this is.", labels)
        for kind, name, about, place in (
            *_OF_ALL,
            *(_OF_MEMBERS if is_member else ()),
            *(_OF_STAGES if pipeline is not None else ()),
        ):
            if (figure := attrgetter(place)(status)) is not None:
                yield kind(f"farandole_{name}", about, figure)
        ways = Counter(member.path for member in status.members if member.is_connected)
        links = {way: ways[way] for way in ("direct", "punched", "relayed")}
        yield _by(Gauge, "farandole_phase", "1 for what the node is doing.", "phase", {status.phase: 1})
        yield _by(Gauge, "farandole_links", "Connected members, by the way to them.", "path", links)
        yield Gauge("farandole_relays", "Relays that lead to this node.", len(status.relays))
        if is_member:
            ends = {
                "committed": status.exchanges_ok,
                "alone": status.exchanges_alone,
                "failed": status.exchanges_failed,
            }
            members = {state: getattr(run, f"members_{state}") for state in ("live", "heard", "gone", "left")}
            providers = {str(stage): number for stage, number in enumerate(run.providers)}
            yield _by(Count, "farandole_rounds", "Rounds that are over, by how.", "verdict", ends)
            yield _by(Gauge, "farandole_run_members", "Members that this node knows of.", "state", members)
            yield _by(Gauge, "farandole_run_stage_providers", "Live members of each stage.", "stage", providers)
            for _, loss in status.validation[-1:]:
                yield Gauge("farandole_validation_loss", "Newest loss on held-out text, nats a token.", loss)
            if last is not None and last.verdict == "committed":
                yield Gauge("farandole_exchange_seconds", "What the newest exchange took.", last.seconds)
        if pipeline is not None:
            ends = {end: getattr(pipeline, end) for end in ("kept", "dropped", "rerouted", "taken_out", "refused")}
            yield _by(Count, "farandole_microbatches", "Microbatches, by what became of them.", "outcome", ends)


def _by(kind: type[Gauge | Count], name: str, about: str, label: str, figures: Mapping[str, float]) -> Metric:
    """Return a family with a figure for each value of its only label."""
    family = kind(name, about, labels=[label])
    for value, figure in figures.items():
        family.add_metric([value], figure)
    return family
