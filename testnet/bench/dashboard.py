"""The cost of the page of a run with a thousand members: a refresh in its browser, and CPU time of the node's daemon.

The daemon is a real one, paused, so that its trainer is not measured. Its run has a thousand more members
(`farandole.testnet.bench.crowd`), whose entries arrive as they would in such a run. The page is open in a headless
Chromium. A refresh is what the page does with one event: reading it, drawing, and the browser's layout and paint after
that, each by the browser's own clock, without waits in between. A daemon's seconds are the CPU time of all of its
threads, in the kernel too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farandole.node.base.settings import NodeSettings
from farandole.node.ui.dashboard.place import find_place
from farandole.protocol.run.manifest import SignedManifest

from ..natlab.groups import Leash, open_leash
from ..natlab.namespace import held
from ..report.section import Grid
from .daemon import START_TIMEOUT, running_daemon, sign_run, wait_for_node
from .process import BenchError, Say
from .report import OUT, BenchReport, Out, Write, open_bench

# Limits.
MAX_REFRESH_MS: Final = 100.0
MAX_DAEMON_SHARE: Final = 0.05
# After this time the entries of a thousand newcomers are synced to disk, and the page has drawn a few times.
SETTLE_SECONDS: Final = 30.0

# Lengths of the answers that the page fetches.
_LENGTH_OF: Final = """
async (path) => {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("token")}` };
  return (await (await fetch(path, { headers })).text()).length;
}
"""
# Runs in the page before its own script: times each event's listener, and the frame in which its changes are laid out
# and painted. A message that is posted in a frame's callback arrives after that frame.
_METER: Final = """
window.refreshes = [];
const add = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (kind, listener) {
  add.call(this, kind, (event) => {
    const began = performance.now();
    listener(event);
    const scripted = performance.now() - began;
    requestAnimationFrame(() => {
      const frame = performance.now();
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => window.refreshes.push([kind, scripted, performance.now() - frame]);
      port2.postMessage(null);
    });
  });
};
"""


@dataclass(frozen=True, slots=True)
class PageCost:
    """The cost of the page, or of the daemon."""

    name: str
    number: int
    """Number of refreshes."""
    median: str
    """Median of one refresh, in words."""
    worst_ms: float | None = None
    """The slowest refresh, all parts together."""
    share: float | None = None
    """Share of a core."""
    is_judged: bool = True

    @property
    def cells(self) -> list[str]:
        """Return the cells of the table."""
        if self.share is not None:
            limit = f"max {MAX_DAEMON_SHARE:.0%}" if self.is_judged else ""
            return [self.name, "", self.median, f"{self.share:.1%} of a core", limit]
        return [
            self.name,
            str(self.number),
            self.median,
            f"{self.worst_ms or 0.0:.1f} ms",
            f"max {MAX_REFRESH_MS:g} ms",
        ]

    def misses(self) -> list[str]:
        """Return the limits that were exceeded."""
        if self.worst_ms is not None and self.worst_ms > MAX_REFRESH_MS:
            return [f"{self.name}: a refresh took {self.worst_ms:.0f} ms"]
        if self.share is not None and self.is_judged and self.share > MAX_DAEMON_SHARE:
            return [f"{self.name}: {self.share:.1%} of a core"]
        return []


@dataclass(slots=True)
class PageFigures:
    """The measurements of all parts."""

    rows: list[PageCost]
    num_members: int
    seconds: float
    """Duration of each part."""
    overview_bytes: int
    members_bytes: int

    def report(self, setting: Mapping[str, Any]) -> BenchReport:
        """Return the table, words, data and misses."""
        title = f"A page about a run of {self.num_members:,} members, {self.seconds:.0f} s each"
        grid = Grid(title, ["what", "refreshes", "median", "worst", "limit"], [row.cells for row in self.rows])
        misses = [miss for row in self.rows for miss in row.misses()]
        return BenchReport(setting, [grid], asdict(self), [self.words()], misses)

    def words(self) -> str:
        """Return what the page fetches, in words."""
        return (
            f"Every second {self.overview_bytes / 1e3:.0f} kB come to the page, and every five seconds the members, "
            f"{self.members_bytes / 1e3:.0f} kB."
        )


def run(
    members: Annotated[int, typer.Option(min=1, help="Members of the run, without the node of the page.")] = 1_000,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each part: without a page, and with one.")] = 60.0,
    out: Out = OUT,
    write: Write = None,
) -> None:
    """Measure what a page about a large run costs its browser and the daemon; fails where a limit is not kept.

    Needs Chromium and the extra dev. Example: [cyan]farandole testnet bench dashboard --members 200 --seconds 20[/cyan]
    """
    with open_bench("dashboard", out, write) as bench:
        bench.publish(measure(out, members, seconds, bench.say).report(bench.setting))


def measure(folder: Path, num_members: int, seconds: float, say: Say) -> PageFigures:
    """Start a daemon, its run's members and a browser, and measure their costs."""
    home, signed = folder / "dashboard-node", sign_run()
    say("starting a daemon")
    with open_leash() as leash, running_daemon(leash, home, signed) as daemon:
        status = wait_for_node(home, lambda status: status.phase == "paused")
        say(f"{num_members} members more join the run")
        with _running_crowd(leash, folder, status.addresses[0], signed, num_members) as crowd:
            wait_for_node(home, lambda status: status.run.members_live + status.run.members_heard >= num_members)
            time.sleep(SETTLE_SECONDS)  # the newcomers' cost is not measured
            say("the daemon without a page")
            share_without = _share(daemon.pid, seconds)
            say("the daemon with a page, and the page")
            with _open_page(home) as page:
                page.wait_for_function(
                    f"parseInt(document.getElementById('members-count').textContent) >= {num_members}"
                )
                time.sleep(SETTLE_SECONDS)  # nor is the cost of drawing them first
                page.evaluate("window.refreshes.length = 0")
                share_with = _share(daemon.pid, seconds)
                page.wait_for_function(  # on a busy machine one may come late
                    "['members', 'overview'].every((name) => window.refreshes.some((refresh) => refresh[0] === name))"
                )
                if crowd.poll() is not None:
                    raise BenchError(f"the members of the run have ended; see {folder / 'dashboard-crowd.log'}")
                seen = page.evaluate("window.refreshes")
                sizes = [page.evaluate(_LENGTH_OF, f"api/{name}") for name in ("overview", "members")]
    rows = [
        *_sum_up(seen),
        PageCost("the daemon, with the page open", 0, "", share=share_with),
        PageCost("the daemon, without a page", 0, "", share=share_without, is_judged=False),
    ]
    return PageFigures(rows, num_members, seconds, *sizes)


def _sum_up(seen: Sequence[tuple[str, float, float]]) -> list[PageCost]:
    kinds = sorted({kind for kind, _, _ in seen} - {"error"})
    if kinds != ["members", "overview"]:
        raise BenchError(f"the page was told of {kinds or 'nothing'} only")
    rows = []
    for kind in kinds:
        times = [(script, frame) for each, script, frame in seen if each == kind]
        script, frame = (statistics.median(each) for each in zip(*times, strict=True))
        words = f"{script:.1f} ms in its script, {frame:.1f} ms to lay out and paint"
        rows.append(PageCost(f"the page, told of {kind}", len(times), words, max(map(sum, times))))
    return rows


@contextlib.contextmanager
def _running_crowd(
    leash: Leash, folder: Path, address: str, signed: SignedManifest, num_members: int
) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [address, signed.run_id.hex(), signed.creator.hex(), str(num_members)]
    command = [sys.executable, "-m", "farandole.testnet.bench.crowd", *arguments]
    with (
        (folder / "dashboard-crowd.log").open("wb") as output,
        held(command, leash, stdout=output, stderr=output) as process,
    ):
        yield process


@contextlib.contextmanager
def _open_page(home: Path) -> Iterator[Any]:
    """Open the node's page in a headless browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise BenchError("playwright is missing: pip install 'farandole[dev]'") from error
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise BenchError("there is no Chromium: on Debian, apt install chromium")
    place = find_place(NodeSettings(home=home).dashboard_place)
    if place is None:
        raise BenchError(f"the daemon serves no page; see {home / 'log'}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[] if os.geteuid() else ["--no-sandbox"])
        # Without the page's policy: Playwright waits by evaluating text in the page repeatedly.
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, bypass_csp=True)
        page.add_init_script(_METER)
        page.set_default_timeout(START_TIMEOUT * 1_000)
        page.goto(place.link)
        yield page
        browser.close()


def _share(pid: int, seconds: float) -> float:
    """Return the CPU time of a process over the next ``seconds``, as a share of one core."""
    before, began_at = _cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)  # the measured interval
    return (_cpu_seconds(pid) - before) / (time.monotonic() - began_at)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used (proc(5), ``stat``, the 14th and 15th field)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise BenchError(f"the daemon has ended, or this system has no /proc: {error}") from error
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
