"""``farandole status``, ``peers`` and ``dashboard`` of the node that runs here; ``farandole doctor``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.errors import Exit
from ...base.figures import plural
from ...base.settings import NodeSettings
from .options import AsJson, Home, takes_settings
from .output import call_node, node_status, print_answer, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...base.causes import Diagnosis, Finding

INTERVAL: Final = 1.0
# A screen has no room for more members, and `farandole peers` shows all: a status of a thousand members has a megabyte.
MAX_MEMBERS: Final = 64


def status(
    home: Home,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Full-screen view, updated every second: q quits, p pauses.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the node on this machine: whether it is in the run, its last exchange, its loss.

    Examples: [cyan]farandole status --watch[/cyan]; [cyan]farandole status --json | jq .loss[/cyan]
    """
    if watch:
        if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on the latter
            raise FarandoleError("the screen of --watch needs a terminal: for a script there is --json")
        from ...ui.watch.app import WatchApp

        def ask(method: str) -> Any:
            return call_node(home, method, **({"max_members": MAX_MEMBERS} if method == "status" else {}))

        WatchApp(ask, INTERVAL).run()
    elif as_json:
        print_json(call_node(home, "status"))
    else:
        from rich.console import Console

        from ...ui.view import status_screen

        seen = node_status(home)
        Console().print(status_screen(seen, seen.at))


def peers(home: Home, as_json: AsJson = False) -> None:
    """List the members of the run as this node sees them, and how it reaches each.

    Example: [cyan]farandole peers[/cyan]
    """
    from rich.console import Console

    from ...ui.view import members_table

    if as_json:
        print_json(call_node(home, "status")["members"])
    else:
        status = node_status(home)
        Console().print(members_table(status))


def dashboard(
    home: Home,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the address of the page about the node that runs here; includes the access token.

    Example: [cyan]farandole dashboard --open[/cyan]
    """
    import webbrowser

    page = call_node(home, "dashboard")
    link = f"{page['url']}#{page['token']}"  # a browser sends the fragment to no server
    print_answer(as_json, page, link)
    if open_browser and not webbrowser.open(link):
        raise FarandoleError("no browser was found here; open the address above")


@takes_settings(
    *("invite", "port", "listen", "announce", "bootstrap", "device", "stage", "data", "tokenizer", "stream"),
    "allow_model",
    "base",
    *("upload_mbit", "download_mbit"),
    must_exist=False,
)
def doctor(settings: NodeSettings, as_json: AsJson = False) -> None:
    """Find what keeps this machine from joining or from being reached; exit code 1 if a check failed.

    Failures come first, each with its remedy, then warnings; the last line is the verdict, with the checks that could
    not be made, and why.

    Examples: [cyan]farandole doctor farandole1...[/cyan]; [cyan]farandole doctor --json | jq .findings[/cyan]
    """
    import msgspec
    import trio
    from rich.console import Console

    from ..doctor.examination import Examination

    diagnosis = trio.run(Examination(settings).run)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        Console().print(diagnosis_screen(diagnosis))
    raise typer.Exit(Exit.OK if diagnosis.is_well else Exit.NOT_WELL)


def diagnosis_screen(diagnosis: Diagnosis) -> RenderableType:
    """Return a line for each failure and warning with its remedy, one for all checks that passed, and the verdict."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    from ...base.causes import Level

    styles = {Level.FAILED: "bold red", Level.WARNING: "yellow", Level.OK: "green", Level.SKIPPED: "dim"}
    by_level = {level: [each for each in diagnosis.findings if each.level is level] for level in styles}
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for level in (Level.FAILED, Level.WARNING):
        for finding in by_level[level]:
            what = Text(finding.found)
            if finding.remedy:
                what.append(f"\n-> {finding.remedy}", "italic")
            table.add_row(finding.check, Text(level, styles[level]), what)
    others = _checks(each for each in diagnosis.findings if each.level is not Level.OK)
    passed = [check for check in _checks(by_level[Level.OK]) if check not in others]
    parts: list[RenderableType] = [table] if table.row_count else []
    if passed:
        parts.append(Text(f"{plural(len(passed), 'check')} passed: {', '.join(passed)}"))
    if failed := _checks(by_level[Level.FAILED]):
        verdict = Text(f"{plural(len(failed), 'check')} failed: {', '.join(failed)}", styles[Level.FAILED])
    elif by_level[Level.WARNING] or by_level[Level.SKIPPED]:
        verdict = Text("no check failed", styles[Level.OK])
    else:
        verdict = Text("all checks passed", styles[Level.OK])
    reasons: dict[str, list[Finding]] = {}
    for finding in by_level[Level.SKIPPED]:
        reasons.setdefault(finding.found, []).append(finding)
    skipped = []
    for why, findings in reasons.items():
        remedy = next((f": {finding.remedy}" for finding in findings if finding.remedy), "")
        skipped.append(f"{', '.join(_checks(findings))} ({why}{remedy})")
    if skipped:
        verdict.append(f"; not examined: {'; '.join(skipped)}", "not bold default")
    return Group(*parts, verdict)


def _checks(findings: Iterable[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.check for finding in findings))
