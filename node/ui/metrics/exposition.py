"""A node's status in Prometheus' text format, with stable names.

Names, types and units follow prometheus.io/docs/practices/naming. Unknown values are left out, as Prometheus
recommends, and not reported as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...status.status import NodeStatus, PipelineStatus, RunStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(status: NodeStatus) -> bytes:
    """Return the figures of one status."""
    return generate_latest(_Moment(status))


class _Moment(Collector):
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        labels = {name: getattr(status, name) for name in ("version", "peer_id", "device", "reachability")}
        labels |= {"run": status.run.name, "run_id": status.run.run_id}
        yield InfoMetricFamily("farandole_node", "Which node this is.", labels)
        yield _by(Gauge, "farandole_phase", "1 for what the node is doing.", "phase", {status.phase: 1})
        yield Gauge("farandole_start_time_seconds", "When the node began, Unix time.", status.started_at)
        if status.phase != "relaying":  # a relay trains nothing, and is no member that knows the others' state
            yield from _training(status)
            yield from _exchanges(status)
            yield from _run(status.run)
        yield from _network(status)
        if status.pipeline is not None:
            yield from _pipeline(status.pipeline)


def _training(status: NodeStatus) -> Iterator[Metric]:
    yield Gauge("farandole_round", "The round under way.", status.round)
    yield Count("farandole_inner_steps", "Inner steps taken.", status.inner_steps)
    yield Count("farandole_tokens", "Tokens trained on.", status.tokens)
    yield Gauge("farandole_tokens_per_second", "In the newest round.", status.tokens_per_second)
    if status.loss is not None:
        yield Gauge("farandole_loss", "Training loss of the newest round, nats a token.", status.loss)
    for _, loss in status.validation[-1:]:
        yield Gauge("farandole_validation_loss", "Newest loss on held-out text, nats a token.", loss)
    if status.bits_per_byte is not None:
        about = "Newest loss on held-out text, bits per byte."
        yield Gauge("farandole_validation_bits_per_byte", about, status.bits_per_byte)
    if status.recent_utilisation is not None:
        yield Gauge(
            "farandole_utilisation_ratio",
            "Share of the last few rounds that went into inner steps.",
            status.recent_utilisation,
        )
    yield Count("farandole_trainer_restarts", "Trainers that were replaced.", status.trainer_restarts)


def _exchanges(status: NodeStatus) -> Iterator[Metric]:
    ends = {"committed": status.exchanges_ok, "alone": status.exchanges_alone, "failed": status.exchanges_failed}
    yield _by(Count, "farandole_rounds", "Rounds that are over, by how.", "verdict", ends)
    yield Count("farandole_contribution_sent_bytes", "Of contributions, sent.", status.bytes_sent)
    yield Count("farandole_contribution_received_bytes", "Of contributions, received.", status.bytes_received)
    last = status.last_exchange
    if last is not None and last.verdict == "committed":
        yield Gauge("farandole_exchange_seconds", "What the newest exchange took.", last.seconds)


def _network(status: NodeStatus) -> Iterator[Metric]:
    yield Gauge("farandole_sent_bytes_per_second", "All traffic, 10 s mean.", status.bytes_sent_per_second)
    yield Gauge("farandole_received_bytes_per_second", "All traffic, 10 s mean.", status.bytes_received_per_second)
    yield Gauge("farandole_connected_peers", "Peers with a connection.", status.connected_peers)
    ways = Counter(member.path for member in status.members if member.is_connected)
    links = {way: ways[way] for way in ("direct", "punched", "relayed")}
    yield _by(Gauge, "farandole_links", "Connected members, by the way to them.", "path", links)
    yield Gauge("farandole_relays", "Relays that lead to this node.", len(status.relays))
    yield Gauge("farandole_relayed_peers", "Peers that this node leads to.", status.relayed_peers)
    yield Gauge("farandole_relayed_circuits", "Pairs that talk through it now.", status.relayed_circuits)


def _run(run: RunStatus) -> Iterator[Metric]:
    members = {state: getattr(run, f"members_{state}") for state in ("live", "heard", "gone", "left")}
    yield _by(Gauge, "farandole_run_members", "Members that this node knows of.", "state", members)
    yield Count("farandole_run_tokens", "Tokens that the whole run has trained on.", run.tokens)
    yield Gauge("farandole_run_tokens_per_second", "Of all live members.", run.tokens_per_second)
    if run.loss_mean is not None:
        yield Gauge("farandole_run_loss", "Mean training loss of the live members.", run.loss_mean)
    providers = {str(stage): number for stage, number in enumerate(run.providers)}
    yield _by(Gauge, "farandole_run_stage_providers", "Live members of each stage.", "stage", providers)


def _pipeline(pipeline: PipelineStatus) -> Iterator[Metric]:
    yield Gauge("farandole_stage", "The stage that this node holds.", pipeline.stage)
    yield Gauge("farandole_microbatches_in_flight", "In the trainer's memory.", pipeline.in_flight)
    ends = {end: getattr(pipeline, end) for end in ("kept", "dropped", "rerouted", "taken_out", "refused")}
    yield _by(Count, "farandole_microbatches", "Microbatches, by what became of them.", "outcome", ends)
    yield Count("farandole_activation_sent_bytes", "Activations and gradients.", pipeline.bytes_sent)
    yield Count("farandole_activation_received_bytes", "Activations and gradients.", pipeline.bytes_received)


def _by(kind: type[Gauge | Count], name: str, about: str, label: str, figures: Mapping[str, float]) -> Metric:
    """Return a family with a figure for each value of its only label."""
    family = kind(name, about, labels=[label])
    for value, figure in figures.items():
        family.add_metric([value], figure)
    return family
