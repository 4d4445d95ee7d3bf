"""Play a scenario: real daemons on 127.0.0.1, each with a folder, key and port of its own, watched and judged.

    start the nodes -> faults, while they train -> wait until the run state is equal -> end them -> merge -> report

The first node gets the manifest, the others an invite. No node is special beyond that: an invite lists nodes that are
live at the moment, so a late joiner does not depend on the first node.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farandole.node.base.figures import count, duration
from farandole.node.base.identity import load_or_create_key
from farandole.node.mesh.addresses import rank
from farandole.protocol.run.invite import Invite, encode_invite
from farandole.protocol.run.manifest import Manifest, SignedManifest, decode_manifest, sign_manifest
from farandole.protocol.wire.errors import FarandoleError
from farandole.protocol.wire.identity import peer_id_of, public_bytes

from ..natlab.groups import Leash, open_leash
from . import wrong_clock
from .fault import Fault, FaultReport
from .faults import FaultContext, run_fault
from .judge import is_state_equal, make_report
from .places import Lodging, open_lodgings
from .process import NODE_COMMAND, NodeProcess
from .record import NodeRecord, Vacancies, false_deaths
from .report import Merged, NodeReport, PlayReport
from .scenario import Scenario

WATCH_INTERVAL: Final = 0.5
SUMMARY_INTERVAL: Final = 10.0
HEARTBEAT_SECONDS: Final = 2.0
# The longest time that a stage may have no provider, once it has had one.
MAX_EMPTY_SECONDS: Final = 30.0
# Nodes that start at a time: imports take seconds of a core in each, and nodes that all wait for a core find each other
# late.
MAX_STARTING: Final = 2 * (os.cpu_count() or 1)
# Number of addresses in an invite, of several nodes, since any may be dead.
INVITE_ADDRESSES: Final = 4
# Below the ephemeral ports (Linux: from 32768 on): another process could get such a port before its node, which may be
# the last to start, listens on it.
_PORTS: Final = range(20_000, 32_000)

MANIFEST_NAME: Final = "run.manifest"
REPORT_NAME: Final = "report.json"
SCENARIO_NAME: Final = "scenario.json"

PLAN, TARGETS = "TESTNET_HOSTILE", "TESTNET_TARGETS"
"""Environment variables of hostile processes: the scenario's settings of them, and the addresses of all nodes."""

Measure = Callable[[Manifest, bytes, Sequence[Path], Sequence[str]], Merged]


class TestnetError(FarandoleError):
    """The testnet cannot be played here."""

    __test__ = False  # not a test, whatever pytest makes of the name


@dataclass
class Testnet:
    """One play of a scenario in the folder ``out``."""

    __test__ = False

    scenario: Scenario
    out: Path
    say: Callable[[str], None]
    """Called with each event, and every ten seconds with a summary."""
    command: Sequence[str] = NODE_COMMAND
    measure: Measure | None = None
    """None: `farandole.testnet.play.merge.measure_merged`."""
    watch: Callable[[Sequence[NodeProcess], float], None] = lambda nodes, seconds: None
    """Called with the nodes and the seconds since the start, about twice a second."""
    is_interrupted: bool = False
    like: Path | None = None
    """Folder of another play, whose run and keys this one uses again: its nodes draw the same batches."""
    _events: list[str] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)
    _lodgings: list[Lodging] = field(default_factory=list)
    _nodes: list[NodeProcess] = field(default_factory=list)
    _hostile: list[NodeProcess] = field(default_factory=list)
    """They are not judged: started once the first node is up, and gone before the run state is compared."""
    _started_at: float = 0.0
    _summed_up_at: float = 0.0
    _exchanges_before: dict[int, int] = field(default_factory=dict)
    """Node -> its exchanges before the last fault was over."""
    _fault_reports: list[FaultReport] = field(default_factory=list)
    _vacancies: Vacancies = field(default_factory=Vacancies)
    _false_deaths: set[tuple[int, int]] = field(default_factory=set)
    _watched: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    """Where tasks wait for the next look at the nodes."""
    _stage: trio.CancelScope = field(default_factory=trio.CancelScope)
    """The scope that Ctrl-C cancels: the training, or the measuring after it."""

    async def play(self) -> PlayReport:
        """Play the scenario; Ctrl-C ends it early, in order and with a report; a second one kills the nodes.

        Raises `TestnetError` if the folder cannot be used, `NamespaceError` if its networks cannot be made here,
        `NoFaketimeError` if clocks cannot be set.
        """
        if self.like is None:
            manifest = self.scenario.manifest(time.time())
            signed = sign_manifest(manifest, Ed25519PrivateKey.generate())
        else:
            manifest, signed = decode_manifest((self.like / MANIFEST_NAME).read_bytes())
        prepare_folder(self.out)
        (self.out / MANIFEST_NAME).write_bytes(signed.encode())
        with (
            trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
            open_leash() as leash,
            open_lodgings(self.scenario.home, self.scenario.nodes, leash) as self._lodgings,
        ):
            self._nodes = self._make_nodes(leash)
            self._hostile = self._make_hostile(leash)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_signals, signals)
                nodes, seconds = await self._run_nodes(signed)
                merged = await self._measure(manifest, signed, nodes)
                nursery.cancel_scope.cancel()
        if self.is_interrupted:
            self._problems.insert(0, "interrupted")
        return make_report(
            self.scenario,
            signed.run_id,
            nodes,
            merged,
            seconds=seconds,
            events=self._events,
            problems=self._problems,
            faults=self._fault_reports,
        )

    def _say(self, text: str) -> None:
        self._events.append(f"{trio.current_time() - self._started_at:.1f} s: {text}")
        self.say(text)

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if self.is_interrupted:
                for node in self._nodes:
                    node.kill()
            else:
                self._say("interrupted: ending all nodes cleanly (again to kill them)")
            self.is_interrupted = True
            self._stage.cancel()

    def _make_nodes(self, leash: Leash) -> list[NodeProcess]:
        nodes = []
        for index, ((place, _), port) in enumerate(zip(self._lodgings, free_ports(self.scenario.nodes), strict=True)):
            home = self._home(index)
            if self.like is not None:
                home.mkdir(parents=True, mode=0o700)
                shutil.copy(self.like / "nodes" / home.name / "key", home / "key")
            options, command = self._options(index, place.ip, place.port or port), [*place.enter, *self.command]
            clock = wrong_clock.environment(home) if index in self.scenario.named_by("set_clock") else {}
            nodes.append(self._make(index, options, leash, command, clock))
        return nodes

    def _make_hostile(self, leash: Leash) -> list[NodeProcess]:
        if (hostile := self.scenario.hostile) is None:
            return []
        targets = " ".join(
            f"{node.options[node.options.index('--listen') + 1]}/p2p/{node.report.peer_id}" for node in self._nodes
        )
        module = "daemon" if hostile.program == "daemon" else "programs"
        command = [sys.executable, "-m", f"farandole.testnet.zoo.{module}"]
        environment = {PLAN: msgspec.json.encode(hostile).decode(), TARGETS: targets}
        return [
            self._make(number, self._options(number, "127.0.0.1", 0), leash, command, environment)
            for number in range(len(self._nodes), len(self._nodes) + hostile.members)
        ]

    def _make(
        self, index: int, options: Sequence[str], leash: Leash, command: Sequence[str], environment: Mapping[str, str]
    ) -> NodeProcess:
        home = self._home(index)
        peer_id = peer_id_of(public_bytes(load_or_create_key(home / "key")))
        record = NodeRecord(NodeReport(index, peer_id))
        return NodeProcess(record, home, options, leash, self._say, command, environment)

    def _home(self, index: int) -> Path:
        return self.out / "nodes" / f"{index:02d}"

    def _options(self, index: int, ip: str, port: int) -> list[str]:
        scenario = self.scenario
        settings = {
            "--listen": f"/ip4/{ip}/tcp/{port}",
            "--device": scenario.device,
            **({"--max-rounds": scenario.rounds} if index < scenario.nodes else {}),
            "--slow": scenario.slowness(index),
            "--step-seconds": scenario.seconds_of_step(index),
            "--heartbeat-seconds": HEARTBEAT_SECONDS,
            "--checkpoint-seconds": scenario.checkpoint_seconds,
            "--validate-every": 0,
            "--threads": 1,
        }
        if index < len(scenario.stage):
            settings["--stage"] = scenario.stage[index]
        texts = [("--data", path) for path in scenario.data]
        return [str(part) for pair in (*settings.items(), *texts) for part in pair]

    async def _run_nodes(self, signed: SignedManifest) -> tuple[list[NodeReport], float]:
        """Train, let the run state settle, record the results, and end the nodes."""
        self._started_at = self._summed_up_at = trio.current_time()
        async with trio.open_nursery() as life:
            with trio.CancelScope() as self._stage:
                with trio.move_on_after(self.scenario.timeout) as limit:
                    await self._train(life, signed)
                if limit.cancelled_caught:
                    self._problems.append(f"the training was not over after {self.scenario.timeout:g} s")
                seconds = trio.current_time() - self._started_at
                died = [node for node in self._hostile if node.report.died]
                self._problems += [f"{node.name}, a hostile one, ended early" for node in died]
                await self._leave(self._hostile)
                self._say("training is over; waiting until the run state is equal on all nodes")
                trained_at = trio.current_time()
                with trio.move_on_after(self.scenario.settle_timeout):
                    while not self._is_settled(trained_at):  # by their statuses after the training
                        self._watch()
                        await trio.sleep(WATCH_INTERVAL)
                    self._say("the run state is equal on all nodes")
            if self._stage.cancelled_caught:
                seconds = trio.current_time() - self._started_at
            nodes = self._node_reports()
            self._say("ending all nodes")
            await self._leave([*self._nodes, *self._hostile])
        return nodes, seconds

    async def _leave(self, nodes: Sequence[NodeProcess]) -> None:
        async with trio.open_nursery() as ending:
            for node in nodes:
                ending.start_soon(node.leave)

    def _node_reports(self) -> list[NodeReport]:
        for node in self._nodes:
            node.record.ledger.settle(trio.current_time())
        return [
            node.record.reported(is_alive=node.is_running, home=home.kind.name if home else "")
            for node, (_, home) in zip(self._nodes, self._lodgings, strict=True)
        ]

    async def _train(self, life: trio.Nursery, signed: SignedManifest) -> None:
        """Train until every fault is over and every live node has done its rounds, or enough exchanges."""

        async def start(node: NodeProcess) -> None:
            if node.joined.is_set():
                source = None  # it remembers the run
            elif node is self._nodes[0]:
                source = str(self.out / MANIFEST_NAME)
            else:
                live = [other.record.status for other in self._nodes if other.is_running]
                addresses = [rank(status.addresses)[0] for status in live if status and status.addresses]
                source = encode_invite(Invite(signed.run_id, tuple(rank(addresses)[:INVITE_ADDRESSES])))
            await life.start(node.run, source)

        context = FaultContext(
            nodes=self._nodes,
            homes={index: home for index, (_, home) in enumerate(self._lodgings) if home is not None},
            started_at=self._started_at,
            start=start,
            is_settled=self._is_settled,
            say=self._say,
        )

        async def befall(fault: Fault) -> None:
            if fault.after_start is not None:
                await self._until(lambda: all(node.record.trained_at is not None for node in self._early_nodes))
                await trio.sleep(fault.after_start)
            elif (at_round := fault.at_round) is not None:
                await self._until(lambda: any(n.report.rounds >= at_round for n in self._nodes if n.is_running))
            self._fault_reports.append(await run_fault(fault, context))
            self._exchanges_before = {node.report.index: node.report.exchanges_ok for node in self._nodes}

        async with trio.open_nursery() as nursery:
            for fault in self.scenario.fault:
                nursery.start_soon(befall, fault)
            nursery.start_soon(self._start_nodes, start)
            while self._is_training():
                if any(node.report.died for node in self._nodes):
                    nursery.cancel_scope.cancel()  # it has failed, whatever comes
                self._watch()
                await trio.sleep(WATCH_INTERVAL)
            if self.scenario.exchanges_after_faults:
                for node in self._nodes:
                    nursery.start_soon(node.have, "pause")
        self._watch()
        self._problems += self._vacancies.problems(MAX_EMPTY_SECONDS)
        if self.scenario.no_false_death:
            self._problems += [
                f"node {there} was there, and node {observer} took it for dead"
                for there, observer in sorted(self._false_deaths)
            ]

    @property
    def _early_nodes(self) -> list[NodeProcess]:
        return [node for node in self._nodes if node.report.index not in self.scenario.named_by("join")]

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so at a look at the nodes."""
        while not is_so():
            await self._watched.park()

    def _is_training(self) -> bool:
        honest, before = {node.report.peer_id for node in self._nodes}, self._exchanges_before
        return (
            len(self._fault_reports) < len(self.scenario.fault)
            or not all(node.joined.is_set() for node in self._early_nodes)
            or any(
                node.is_running and not is_done(node.record, self.scenario, honest, before.get(node.report.index, 0))
                for node in self._nodes
            )
        )

    def _watch(self) -> None:
        now = trio.current_time()
        for node in self._nodes:
            is_watched = node.is_running and not node.is_frozen
            if is_watched and node.record.check_progress(now, self.scenario.wedged_after):
                phase = node.record.status.phase if node.record.status else "starting"
                self._say(f"{node.name} is wedged: {phase} for {self.scenario.wedged_after:g} s")
        statuses = [node.record.status for node in self._nodes if node.is_running]
        held = {status.stage for status in statuses if status and (status.pipeline or status.phase == "finished")}
        for news in self._vacancies.observe(held, now):
            self._say(news)
        self._false_deaths.update(false_deaths(node.record for node in self._nodes))
        self._watched.unpark_all()
        if now - self._summed_up_at >= SUMMARY_INTERVAL:
            self._summed_up_at = now
            self.say(f"{duration(now - self._started_at)}: {summary(self._nodes, self.scenario)}")
        self.watch(self._nodes, now - self._started_at)

    async def _start_nodes(self, start: Callable[[NodeProcess], Awaitable[None]]) -> None:
        """Start the first node, and when it can be dialled hostile ones and the others, one after the other."""
        daemons = self._hostile if self.scenario.hostile and self.scenario.hostile.program == "daemon" else []
        first, *others = self._early_nodes
        self._say(f"starting {len(self._early_nodes)} nodes in {self.out / 'nodes'}")
        async with trio.open_nursery() as nursery:

            async def begin(node: NodeProcess) -> None:
                await start(node)
                if self.scenario.start_together:
                    nursery.start_soon(node.have, "pause")

            await begin(first)
            await first.is_up.wait()
            for node in self._hostile:
                await (begin if daemons else start)(node)
                if daemons:
                    await node.is_up.wait()
            for node in others:
                await self._until(lambda: sum(each.is_starting for each in self._early_nodes) < MAX_STARTING)
                await begin(node)
        if self.scenario.start_together:
            async with trio.open_nursery() as nursery:
                for node in (*self._early_nodes, *daemons):
                    node.record.excuse(trio.current_time())
                    nursery.start_soon(node.have, "resume")
            self._say("all nodes are up, and begin to train")

    def _is_settled(self, since: float) -> bool:
        live = [node.record for node in self._nodes if node.is_running]
        is_fresh = all(record.seen_at is not None and record.seen_at > since for record in live)
        return is_fresh and is_state_equal(self._node_reports())

    async def _measure(self, manifest: Manifest, signed: SignedManifest, nodes: Sequence[NodeReport]) -> Merged | None:
        """Merge the replicas of the nodes that were live at the end; return None if there are none, or on Ctrl-C."""
        alive = {node.index for node in nodes if node.is_alive}
        newest = [node.checkpoint for node in self._nodes if node.report.index in alive]
        checkpoints = [path for path in newest if path is not None]
        if not checkpoints:
            return None
        self._say(f"measuring the mean of {len(checkpoints)} replicas on held-out text")
        from .merge import measure_merged  # which needs torch

        with trio.CancelScope() as self._stage:
            try:
                return await trio.to_thread.run_sync(
                    self.measure or measure_merged,
                    manifest,
                    signed.run_id,
                    checkpoints,
                    self.scenario.data,
                    abandon_on_cancel=True,  # type: ignore[call-arg]  # newer than the stubs that libp2p brings
                )
            except (OSError, ValueError, RuntimeError) as error:
                self._problems.append(f"the replicas could not be merged: {error}")
        return None


def is_done(record: NodeRecord, scenario: Scenario, honest: Collection[str], exchanges_before: int) -> bool:
    """Return whether a node has done its rounds, or its exchanges after the last fault and with enough partners.

    Only the peer ids in ``honest`` count as partners: hostile members may be faster than the nodes that are judged.
    """
    if not scenario.exchanges_after_faults or record.is_finished:
        return record.is_finished
    num_exchanges = record.report.exchanges_ok - exchanges_before
    num_partners = sum(peer in honest for peer in record.report.partners)
    return num_exchanges >= scenario.exchanges_after_faults and num_partners >= scenario.partners_required


def summary(nodes: Sequence[NodeProcess], scenario: Scenario) -> str:
    """Return a one-line summary of all nodes."""
    running = [node for node in nodes if node.is_running]
    statuses = [node.record.status for node in running if node.record.status]
    if not statuses:
        return f"{len(running)} nodes start"
    rounds = [status.round for status in statuses]
    losses = [status.loss for status in statuses if status.loss is not None]
    course = f"loss {min(losses):.3f} to {max(losses):.3f}" if losses else "no loss yet"
    return (
        f"{len(running)} live, rounds {min(rounds)} to {max(rounds)} of {scenario.rounds}, {course}, "
        f"{sum(node.report.exchanges_ok for node in nodes) // 2} exchanges, "
        f"{count(sum(status.tokens_per_second for status in statuses))} tokens/s"
    )


def prepare_folder(out: Path) -> None:
    """Make the folder, or empty it if a testnet was played in it; raise `TestnetError` if it holds anything else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).exists())):
        raise TestnetError(f"{out} holds other things: name a new folder with --out")
    try:
        for name in (REPORT_NAME, SCENARIO_NAME, MANIFEST_NAME):
            (out / name).unlink(missing_ok=True)
        if (out / "nodes").exists():
            shutil.rmtree(out / "nodes")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TestnetError(f"cannot use the folder {out}: {error.strerror}; name another with --out") from error


def free_ports(count: int) -> list[int]:
    """Return free TCP ports on 127.0.0.1, outside the range of ephemeral ones. Raises `TestnetError`."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            return ports
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("127.0.0.1", port))
            ports.append(port)
    raise TestnetError(f"{count} ports are needed, and of {_PORTS[0]} to {_PORTS[-1]} only {len(ports)} are free")


def play_and_report(testnet: Testnet) -> PlayReport:
    """Play a testnet to its end, and write its report. Raises `KeyboardInterrupt` for a play that was cut short."""
    report = trio.run(testnet.play)
    if testnet.is_interrupted:
        raise KeyboardInterrupt
    write_report(report, testnet.out)
    (testnet.out / SCENARIO_NAME).write_bytes(msgspec.json.encode(testnet.scenario))
    return report


def play_once(testnet: Testnet) -> PlayReport:
    """Return the report of an earlier play of the very scenario that passed; play it if there is none."""
    played = testnet.out / SCENARIO_NAME
    if played.exists() and played.read_bytes() == msgspec.json.encode(testnet.scenario):
        report = load_report(testnet.out)
        if report.verdict == "pass":
            testnet.say(f"{testnet.out / REPORT_NAME} is there already")
            return report
    return play_and_report(testnet)


def load_report(out: Path) -> PlayReport:
    """Load a play's report from its folder; raises `TestnetError`."""
    try:
        return msgspec.json.decode((out / REPORT_NAME).read_bytes(), type=PlayReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise TestnetError(f"cannot read {out / REPORT_NAME}: {error}") from error


def write_report(report: PlayReport, out: Path) -> None:
    """Write ``report.json``."""
    (out / REPORT_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
