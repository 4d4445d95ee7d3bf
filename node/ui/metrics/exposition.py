"""A node's status as Prometheus reads it: the text format, each figure by a name that stays.

Names, types and units follow prometheus.io/docs/practices/naming. What is not known yet is left out, as Prometheus
would have it, rather than told as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...status.status import NodeStatus, PipelineStatus, RunStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(status: NodeStatus) -> bytes:
    """The figures of one moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Moment(status))
    return generate_latest(registry)


class _Moment(Collector):
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield InfoMetricFamily(
            "farandole_node",
            "Which node this is.",
            {
                "version": status.version,
                "peer_id": status.peer_id,
                "run": status.run.name,
                "run_id": status.run.run_id,
                "device": status.device,
                "reachability": status.reachability,
            },
        )
        yield from _node(status)
        if status.phase != "relaying":  # a relay trains nothing, and is no member who knows what others do
            yield from _training(status)
            yield from _exchanges(status)
            yield from _run(status.run)
        yield from _network(status)
        if status.pipeline is not None:
            yield from _pipeline(status.pipeline)


def _node(status: NodeStatus) -> Iterator[Metric]:
    phase = GaugeMetricFamily("farandole_phase", "1 for what the node is doing.", labels=["phase"])
    phase.add_metric([status.phase], 1)
    yield phase
    yield GaugeMetricFamily("farandole_start_time_seconds", "When the node began, Unix time.", status.started_at)


def _training(status: NodeStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("farandole_round", "The round under way.", status.round)
    yield CounterMetricFamily("farandole_inner_steps", "Inner steps taken.", status.inner_steps)
    yield CounterMetricFamily("farandole_tokens", "Tokens trained on.", status.tokens)
    yield GaugeMetricFamily("farandole_tokens_per_second", "In the newest round.", status.tokens_per_second)
    if status.loss is not None:
        yield GaugeMetricFamily("farandole_loss", "Training loss of the newest round, nats a token.", status.loss)
    for _, loss in status.validation[-1:]:
        yield GaugeMetricFamily("farandole_validation_loss", "Newest loss on held-out text, nats a token.", loss)
    if status.recent_utilisation is not None:
        yield GaugeMetricFamily(
            "farandole_utilisation_ratio",
            "Share of the last few rounds that went into inner steps.",
            status.recent_utilisation,
        )
    yield CounterMetricFamily("farandole_trainer_restarts", "Trainers that were replaced.", status.trainer_restarts)


def _exchanges(status: NodeStatus) -> Iterator[Metric]:
    ends = CounterMetricFamily("farandole_rounds", "Rounds that are over, by how.", labels=["verdict"])
    ends.add_metric(["committed"], status.exchanges_ok)
    ends.add_metric(["alone"], status.exchanges_alone)
    ends.add_metric(["failed"], status.exchanges_failed)
    yield ends
    yield CounterMetricFamily("farandole_contribution_sent_bytes", "Of contributions, sent.", status.bytes_sent)
    yield CounterMetricFamily(
        "farandole_contribution_received_bytes", "Of contributions, received.", status.bytes_received
    )
    last = status.last_exchange
    if last is not None and last.verdict == "committed":
        yield GaugeMetricFamily("farandole_exchange_seconds", "What the newest exchange took.", last.seconds)


def _network(status: NodeStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("farandole_sent_bytes_per_second", "All traffic, 10 s mean.", status.bytes_sent_per_second)
    yield GaugeMetricFamily(
        "farandole_received_bytes_per_second", "All traffic, 10 s mean.", status.bytes_received_per_second
    )
    yield GaugeMetricFamily("farandole_connected_peers", "Peers with a connection.", status.connected_peers)
    links = GaugeMetricFamily("farandole_links", "Connected members, by the way to them.", labels=["path"])
    ways = Counter(member.path for member in status.members if member.is_connected and member.path)
    for way in ("direct", "punched", "relayed"):
        links.add_metric([way], ways[way])
    yield links
    yield GaugeMetricFamily("farandole_relays", "Relays that lead to this node.", len(status.relays))
    yield GaugeMetricFamily("farandole_relayed_peers", "Peers that this node leads to.", status.relayed_peers)
    yield GaugeMetricFamily("farandole_relayed_circuits", "Pairs that talk through it now.", status.relayed_circuits)


def _run(run: RunStatus) -> Iterator[Metric]:
    members = GaugeMetricFamily("farandole_run_members", "Members that this node knows of.", labels=["state"])
    members.add_metric(["live"], run.members_live)
    members.add_metric(["gone"], run.members_gone)
    yield members
    yield CounterMetricFamily("farandole_run_tokens", "Tokens that the whole run has trained on.", run.tokens)
    yield GaugeMetricFamily("farandole_run_tokens_per_second", "Of all live members.", run.tokens_per_second)
    if run.loss_mean is not None:
        yield GaugeMetricFamily("farandole_run_loss", "Mean training loss of the live members.", run.loss_mean)
    stages = GaugeMetricFamily("farandole_run_stage_providers", "Live members of each stage.", labels=["stage"])
    for stage, providers in enumerate(run.providers):
        stages.add_metric([str(stage)], providers)
    yield stages


def _pipeline(pipeline: PipelineStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("farandole_stage", "The stage that this node holds.", pipeline.stage)
    yield GaugeMetricFamily("farandole_microbatches_in_flight", "In the trainer's memory.", pipeline.in_flight)
    ends = CounterMetricFamily("farandole_microbatches", "Microbatches, by what became of them.", labels=["outcome"])
    for outcome in ("kept", "dropped", "rerouted", "taken_out", "refused"):
        ends.add_metric([outcome], getattr(pipeline, outcome))
    yield ends
    yield CounterMetricFamily("farandole_activation_sent_bytes", "Activations and gradients.", pipeline.bytes_sent)
    yield CounterMetricFamily(
        "farandole_activation_received_bytes", "Activations and gradients.", pipeline.bytes_received
    )
