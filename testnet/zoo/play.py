"""Play a scenario with hostile members, and before it the honest alone, to measure the cost of the attack.

Both plays have the same run and keys, and so the same initial weights and the same batches, for the same number of
rounds; only the pairing is random. A round ends with its exchange and not with a clock, so a busy machine makes both
plays longer and neither worse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ..play.launch import Intruder, Testnet, play_and_report
from ..play.report import PlayReport
from ..play.scenario import HostileSettings, Scenario, ScenarioError
from ..report.section import Grid, cell
from .conduct import Conduct, conduct_of
from .member_attacks import ATTACKS
from .plan import environment_of

CLEAN, HOSTILE = "clean", "hostile"
OUTCOME_NAME: Final = "hostile.json"


class HostileReport(msgspec.Struct, frozen=True):
    """The result of both plays: ``hostile.json``."""

    name: str
    reasons: list[str]
    """Harm done to the honest members, in words; empty: a pass."""
    clean: Conduct
    """Conduct of the honest members alone."""
    attacked: Conduct
    seconds: float
    """Seconds of both plays."""
    fair_share: float
    """Share of the honest members' rounds with a partner that the hostile daemons would get by chance."""
    hostile_rounds: int = 0
    """Rounds of honest members with a hostile partner, or, where these never exchange, without any because of them."""

    @property
    def loss_above(self) -> float:
        """Return the share by which the honest members' loss exceeds the loss of the honest alone."""
        return self.attacked.loss / self.clean.loss - 1

    @property
    def hostile_share(self) -> float:
        """Return `hostile_rounds` as a share."""
        return self.hostile_rounds / max(self.attacked.rounds, 1)


def intruders_of(settings: HostileSettings) -> list[Intruder]:
    """Return the hostile processes; `ScenarioError` if there is no such attack."""
    if settings.attack not in ATTACKS:
        raise ScenarioError(f"hostile.attack: no attack is called {settings.attack!r}; there are {', '.join(ATTACKS)}")
    is_daemon = settings.program == "daemon"
    command = [sys.executable, "-m", f"{__package__}.{'daemon' if is_daemon else 'programs'}"]
    return [Intruder(command, environment_of(settings), is_daemon)] * settings.members


@dataclass(frozen=True)
class Played:
    """One play, and the conduct of its honest members."""

    folder: Path
    report: PlayReport
    conduct: Conduct


def play_hostile(
    scenario: Scenario, out: Path, say: Callable[[str], None], clean: Played | None = None
) -> HostileReport:
    """Play the honest alone, unless ``clean`` is given, and with the hostile, in folders of ``out``; judge.

    Raises as `Testnet.play` does, and `ScenarioError`; `KeyboardInterrupt` if a person ends it.
    """
    assert scenario.hostile is not None, "there are hostile members"
    intruders = intruders_of(scenario.hostile)
    clean = clean or play_clean(scenario, out / CLEAN, say)
    say(f"attacked: {scenario.nodes} honest nodes and {len(intruders)} hostile processes")
    attacked = _play(Testnet(scenario, out / HOSTILE, say, intruders=intruders, like=clean.folder))
    made = judge(scenario, clean, attacked)
    (out / OUTCOME_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    return made


def play_clean(scenario: Scenario, folder: Path, say: Callable[[str], None]) -> Played:
    """Play the honest alone; raises as `play_hostile` does."""
    say(f"alone: {scenario.nodes} honest nodes")
    return _play(Testnet(msgspec.structs.replace(scenario, hostile=None), folder, say))


def _play(testnet: Testnet) -> Played:
    report = play_and_report(testnet)
    return Played(testnet.out, report, conduct_of(testnet.out, report))


def judge(scenario: Scenario, clean: Played, attacked: Played) -> HostileReport:
    """Return the verdict on both plays."""
    hostile = scenario.hostile
    assert hostile is not None
    fair_share = hostile.members / (scenario.nodes + hostile.members - 1) if hostile.program == "daemon" else 0.0
    seconds = clean.report.seconds + attacked.report.seconds
    name = str(scenario.run.get("name", ""))
    lost = max(attacked.conduct.alone - clean.conduct.alone, 0)
    rounds = lost if hostile.pairing == "absent" else attacked.conduct.hostile_met
    made = HostileReport(name, [], clean.conduct, attacked.conduct, seconds, fair_share, rounds)
    reasons = [f"the honest alone: {reason}" for reason in clean.report.reasons]
    reasons += [*attacked.report.reasons, *_harm(scenario, hostile, made)]
    return msgspec.structs.replace(made, reasons=reasons)


def _harm(scenario: Scenario, hostile: HostileSettings, made: HostileReport) -> Iterator[str]:
    clean, attacked, most = made.clean, made.attacked, hostile.max_loss_above_clean
    for name, conduct in (("alone", clean), ("attacked", attacked)):
        if len(conduct.losses) < scenario.nodes:
            yield f"{name}: {scenario.nodes - len(conduct.losses)} honest members have left no weights"
            return
    if not made.loss_above <= most:
        yield f"the honest members' loss is {made.loss_above:+.1%} of that of the honest alone, not at most {most:+.1%}"
    if attacked.honest_exchanges < hostile.min_exchanges * clean.honest_exchanges:
        yield (
            f"the honest members had {attacked.honest_exchanges} exchanges with one another, "
            f"and {clean.honest_exchanges} alone: less than {hostile.min_exchanges:.0%}"
        )
    if hostile.max_fair_share and made.hostile_share > hostile.max_fair_share * made.fair_share:
        yield (
            f"hostile members took {made.hostile_share:.0%} of the honest members' rounds, "
            f"more than {hostile.max_fair_share:g} times their fair share of {made.fair_share:.0%}"
        )
    if hostile.program == "daemon" and not made.hostile_rounds:
        yield "no honest member met a hostile one: nothing was tried"


HEADER: Final = (
    *("loss", "compared with alone", "worst member", "honest exchanges", "rounds alone", "rounds with hostile ones"),
    *("hostile used", "of them clipped", "honest refused", "honest clipped", "noticed", "daemon's CPU"),
)


def _cells(conduct: Conduct, clean: Conduct) -> list[str]:
    """Return one play's figures, in the order of `HEADER`."""
    known = [after for after in conduct.detected_after if after is not None]
    met = conduct.hostile_met
    noticed = f"by {len(known)} of {len(conduct.losses)}" + (
        f", at meeting {sum(known) / len(known):.1f}" if known else ""
    )
    return [
        f"{conduct.loss:.3f}",
        f"{conduct.loss / clean.loss - 1:+.1%}",
        f"{max(conduct.losses) / clean.loss - 1:+.1%}",
        str(conduct.honest_exchanges),
        str(conduct.alone),
        f"{met / max(conduct.rounds, 1):.0%}",
        f"{conduct.hostile_used / met:.0%}" if met else "",
        str(conduct.hostile_clipped),
        str(conduct.honest_refused),
        str(conduct.honest_clipped),
        noticed if conduct is not clean else "",
        cell(conduct.processor_share, "{:.0%}"),
    ]


def play_grid(made: HostileReport) -> Grid:
    """Return the table of one play: a row for each figure."""
    columns = zip(HEADER, _cells(made.clean, made.clean), _cells(made.attacked, made.clean), strict=True)
    return Grid(made.name, ["", "the honest alone", "attacked"], [list(row) for row in columns])


def zoo_grid(reports: Sequence[HostileReport]) -> Grid:
    """Return the table of several plays: a row for each."""
    rows = [
        [made.name.removeprefix("hostile-"), f"{made.clean.loss:.3f}", *_cells(made.attacked, made.clean), verdict]
        for made in reports
        for verdict in ["FAIL" if made.reasons else "pass"]
    ]
    return Grid("Hostile members among real daemons", ["attack", "loss alone", *HEADER, "verdict"], rows)


def said_lines(made: HostileReport) -> Iterator[str]:
    """Yield the honest members' warnings about hostile ones, and the reasons against a pass."""
    for warning in made.attacked.warnings:
        yield f"  {warning}"
    for reason in made.reasons:
        yield f"  - {reason}"
