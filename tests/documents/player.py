"""Plays a page: runs its commands one after the other, each in its own shell, as a reader would type them.

Everything is real: daemons are processes, and talk over TCP. A page is played on *machines*. Each has a folder where
commands are typed, and a home folder for its node. By default all machines are this computer, and nodes listen on its
loopback interface; a test may place them in homes behind routers instead. Where a page relies on the reader, the
player fills in:

- an invite, wherever a command says ``farandole1...``: the last one that a command has printed;
- an address, wherever a command says ``/ip4/...``: the last one that a relay has printed after `farandole dial`;
- free ports for 4001, the dashboard's 8710 and 8000 of `farandole serve` (two machines may be one computer);
- nothing for `sudo` and the environment's folder, since tests run as root or not at all, and have an environment;
- the packages of examples, which a reader installs: they can be imported; a folder of text, `text`.

Examples are played with a smaller model and shorter rounds than they have (`SMALLER`), to save time.

A command must print what the page shows: each shown line matches a printed one, in this order. Figures, times, peer
ids, run ids and invites may differ, ``...`` stands for anything, and blanks do not matter.

Comments before blocks (`tests.documents.markdown`) say what cannot be seen:

| on=second               | typed on that machine; default: the machine of the block before, at first "here" |
| stays="in the run"      | the last command keeps running, in its own terminal; the page goes on once it prints this |
| when="training" types=q | the last command has a terminal, where this is typed once it prints that |
| until                   | the commands are repeated until they print what is shown: a node needs time |
| exit=3                  | the last command ends with this code instead of 0 |
| not-played="why"        | only checked: programs, options |
| long                    | not played with its page: each of its commands by itself (`tests.documents.test_long`) |
| file=run.toml           | for a block that is not a command: its text is written to this file |

At the end all commands that still run get SIGTERM, and must exit with code 0. A reader's own Python program may die
of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from farandole.node.base.errors import Exit
from farandole.testnet.play.launch import free_ports

from .markdown import ROOT, Block, Command, apply, blocks
from .usage import is_played

PATIENCE = 600  # a hang, not a duration
SMALLER = {
    'model = "3M"': 'model = "tiny"',
    'model = "125M"': 'model = "tiny"',
    "round_seconds = 60": "round_seconds = 2",
    "round_seconds = 120": "round_seconds = 2",
}
INVITE = re.compile(r"farandole1[0-9a-z]{30,}")
_PLACEHOLDER = re.compile(r"farandole1[0-9a-z]*\.\.\.")
DIALLED = re.compile(r"farandole dial (/\S+/p2p/\w+)")
_ADDRESS_PLACEHOLDER = re.compile(r"/ip4/\S*\.\.\.")
_ANY = {
    r"\.\.\.": r".*",
    r"farandole1\w+": r"farandole1\w+",
    r"12D3KooW\w+": r"12D3KooW\w+",
    r"\b[0-9a-f]{16,64}\b": r"[0-9a-f]{16,64}",
    r"\b(?=\w{8}\b)(?=\w*[A-Z])(?=\w*[a-z])\w+\b(?=[ ,;:]|$)": r"\w{8}",  # the end of a peer id
    r"\d+(?:[.,:-]\d+)*": r"\d+(?:[.,:-]\d+)*",
    r"\s+": r"\s+",
}
_SPECIAL = re.compile("|".join(f"({pattern})" for pattern in _ANY))
_FARANDOLE = "from farandole.node.cli import main; main()"
_BASH = ("bash", "-euo", "pipefail", "-c")
# Nothing of it means something to a shell, but quotes.
_PLAIN = re.compile(r"farandole [\w ./:=,@+%'\"-]+")


def pattern_of(line: str) -> re.Pattern[str]:
    """Return the pattern of printed lines that match a line shown on a page."""
    found, at = "", 0
    for special in _SPECIAL.finditer(line.strip()):
        kind = list(_ANY.values())[(special.lastindex or 1) - 1]
        found += re.escape(line.strip()[at : special.start()]) + kind
        at = special.end()
    return re.compile(found + re.escape(line.strip()[at:]))


def first_missing(shown: Sequence[str], printed: str) -> str | None:
    """Return the first line that a page shows and that was not printed; None if all were printed, in this order."""
    lines = iter(printed.splitlines())
    return next((line for line in shown if not any(pattern_of(line).fullmatch(each.strip()) for each in lines)), None)


@dataclass
class Machine:
    """A machine where commands are typed."""

    folder: Path
    """Folder where commands are typed; the home folder is next to it."""
    environment: dict[str, str]
    enter: Sequence[str] = ()
    """The command by which another command is run on the machine."""
    ports: dict[str, str] = field(default_factory=dict)
    """Ports as pages show them -> ports as typed."""

    async def open_shell(self, text: str, **options: Any) -> trio.Process:
        """Run a line in its own session: in a shell, or without it where it is only words, which is faster."""
        is_plain = _PLAIN.fullmatch(text)
        program = [sys.executable, "-m", "farandole.node", *shlex.split(text)[1:]] if is_plain else [*_BASH, text]
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {**given, "env": self.environment, "cwd": self.folder, **options}
        return await trio.lowlevel.open_process([*self.enter, *program], start_new_session=True, **options)


MakeMachine = Callable[[str, Path], Machine]


def on_this_computer(name: str, folder: Path) -> Machine:
    """Return a machine whose node listens on the loopback interface."""
    port, page, serve = free_ports(3)
    ports = {"tcp/4001": f"tcp/{port}", "port 4001": f"port {port}", "8710": str(page), "8000": str(serve)}
    return a_machine(folder / name, ports, FARANDOLE_LISTEN="/ip4/127.0.0.1/tcp/0", FARANDOLE_MDNS="false")


def with_the_code(name: str, folder: Path) -> Machine:
    """Return a machine with a copy of the repository, which may be changed."""
    machine = on_this_computer(name, folder)
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".bench", "out", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "examples"
    )
    shutil.copytree(ROOT, machine.folder, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    machine.environment |= {"PYTHONPATH": str(machine.folder / "src"), "OTHER_SOURCE": "changed"}
    return machine


def a_machine(folder: Path, ports: dict[str, str], enter: Sequence[str] = (), **variables: str) -> Machine:
    """Return a machine with the examples and ``farandole``. Its variables stand in for a reader's settings file."""
    work, program = folder / "work", folder / "bin" / "farandole"
    for made in (work, program.parent, folder / "home"):
        made.mkdir(parents=True)
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "text").symlink_to(ROOT / "examples")
    for run_file in work.rglob("*.toml"):
        run_file.write_text(smaller(run_file.read_text()))
    program.write_text(f"#!{sys.executable}\n{_FARANDOLE}\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    packages = [*(str(work / "examples" / name) for name in ("own_model", "nanochat")), os.environ.get("PYTHONPATH")]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("FARANDOLE_")}
    given: dict[str, str] = {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
        "HOME": str(folder / "home"),
        "COLUMNS": "120",
        "FARANDOLE_DEVICE": "cpu",
        "FARANDOLE_UPNP": "false",
        "FARANDOLE_HEARTBEAT_SECONDS": "1",
        "FARANDOLE_STEP_SECONDS": "0.2",  # leaves processor time to other tests
        "FARANDOLE_CHECKPOINT_SECONDS": "3",
        "FARANDOLE_DASHBOARD_PORT": ports.get("8710", "8710"),
    }
    return Machine(work, {**mine, **given, **variables}, enter, ports)


def smaller(text: str) -> str:
    """Return a run file that is played in seconds."""
    for usual, played in SMALLER.items():
        text = text.replace(usual, played)
    return text


class Shell:
    """A line that was typed, with its output."""

    def __init__(self, command: Command, process: trio.Process) -> None:
        self.command = command
        self.process = process
        self.printed = ""
        self.has_ended = trio.Event()
        self._has_news = trio.Event()

    async def listen(self, stream: trio.abc.ReceiveStream) -> None:
        """Read all output, so that the process never blocks on it; returns when the process has ended."""
        with contextlib.suppress(trio.BrokenResourceError):  # a terminal whose program has ended
            async with stream:
                async for data in stream:
                    self.printed += data.decode(errors="replace")
                    self._tell()
        await self.process.wait()
        self.has_ended.set()
        self._tell()

    def _tell(self) -> None:
        self._has_news.set()
        self._has_news = trio.Event()

    async def says(self, words: str) -> None:
        """Wait until the command has printed ``words``."""
        with trio.move_on_after(PATIENCE):
            while words not in self.printed and not self.has_ended.is_set():
                await self._has_news.wait()
        assert words in self.printed, self.told(f"did not say {words!r}")

    async def ends(self, *codes: int, patience: float = PATIENCE) -> None:
        """Wait until the command ends, with one of these exit codes."""
        with trio.move_on_after(patience):
            await self.has_ended.wait()
        assert self.has_ended.is_set(), self.told("does not end")
        assert self.process.returncode in codes, self.told(f"ended with {self.process.returncode}, not {codes}")

    def told(self, what: str) -> str:
        """Describe the failure, with the command and its output."""
        return f"line {self.command.line}: {self.command.text}\n{what}. It printed:\n{self.printed}"

    def kill(self) -> None:
        """Kill the command with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Player:
    """Plays one page."""

    folder: Path
    make_machine: MakeMachine
    nursery: trio.Nursery
    invite: str = ""
    address: str = ""
    machines: dict[str, Machine] = field(default_factory=dict)
    shells: list[Shell] = field(default_factory=list)
    _at: str = "here"

    async def play(self, *pages: str) -> None:
        """Play pages from top to bottom; each begins on the machine "here"."""
        for page in pages:
            self._at = "here"
            for block in blocks(page):
                self._at = block.play.get("on", self._at)
                if not {"not-played", "long"} & block.play.keys():
                    await self._play(block)

    async def end(self) -> None:
        """End the commands that still run; each must exit with code 0, but a reader's own program may die of it."""
        going = [shell for shell in self.shells if not shell.has_ended.is_set()]
        for shell in going:
            shell.process.send_signal(signal.SIGTERM)
        for shell in going:
            own = (-signal.SIGTERM,) if shell.command.text.startswith("python ") else ()
            await shell.ends(Exit.OK, *own)

    def machine(self) -> Machine:
        """Return the machine that the current block is for."""
        if self._at not in self.machines:
            self.machines[self._at] = self.make_machine(self._at, self.folder)
        return self.machines[self._at]

    async def _play(self, block: Block) -> None:
        if "file" in block.play:
            path = self.machine().folder / block.play["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(smaller(block.text))
        elif block.language == "diff":
            apply(block.text, self.machine().folder)
        commands = [command for command in block.commands if is_played(command.words)]
        for command in commands:
            is_last = command is commands[-1]
            if is_last and "stays" in block.play:
                shell = await self._open(command)
                await shell.says(block.play["stays"])
                self._learn(shell)
            elif is_last and "types" in block.play:
                await self._converse(command, block.play["when"], block.play["types"])
            elif "until" in block.play:
                await self._repeat(command)
            else:
                await self.type(command, int(block.play.get("exit", Exit.OK)) if is_last else Exit.OK)

    async def type(self, command: Command, code: int = Exit.OK, *, patience: float = PATIENCE) -> Shell:
        """Type a command that must end with this code, and print what the page shows."""
        shell = await self._open(command)
        await shell.ends(code, patience=patience)
        missing = first_missing(command.output, shell.printed)
        assert missing is None, shell.told(f"The page shows: {missing}")
        self._learn(shell)
        return shell

    async def _repeat(self, command: Command) -> None:
        told = ""
        with trio.move_on_after(PATIENCE):
            while True:
                shell = await self._open(command)
                await shell.ends(*Exit)
                missing = first_missing(command.output, shell.printed)
                if missing is None and shell.process.returncode == Exit.OK:
                    return self._learn(shell)
                told = shell.told(f"The page shows: {missing}")
                await trio.sleep(1)
        raise AssertionError(told)

    async def _converse(self, command: Command, words: str, answer: str) -> None:
        ours, theirs = os.openpty()
        shell = await self._open(command, trio.lowlevel.FdStream(ours), stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        await shell.says(words)
        os.write(ours, answer.encode())
        await shell.ends(Exit.OK)

    async def _open(self, command: Command, terminal: trio.abc.ReceiveStream | None = None, **options: Any) -> Shell:
        process = await self.machine().open_shell(self._filled_in(command.text), **options)
        stream = terminal or process.stdout
        assert stream is not None
        self.shells.append(Shell(command, process))
        self.nursery.start_soon(self.shells[-1].listen, stream)
        return self.shells[-1]

    def _learn(self, shell: Shell) -> None:
        if found := INVITE.findall(shell.printed):
            self.invite = found[-1]
        if found := DIALLED.findall(shell.printed):
            self.address = found[-1]

    def _filled_in(self, text: str) -> str:
        if _PLACEHOLDER.search(text):
            assert self.invite, f"{text}: no command has printed an invite yet"
        if _ADDRESS_PLACEHOLDER.search(text):
            assert self.address, f"{text}: no relay has printed its address yet"
        text = _ADDRESS_PLACEHOLDER.sub(self.address, _PLACEHOLDER.sub(self.invite, text))
        text = text.removeprefix("sudo ").replace(".venv/bin/", "")
        for shown, typed in self.machine().ports.items():
            text = text.replace(shown, typed)
        return text


@contextlib.asynccontextmanager
async def open_player(folder: Path, make_machine: MakeMachine = on_this_computer) -> AsyncIterator[Player]:
    """Open a player; when the block ends, so do all its commands, by a signal or, after an error, killed."""
    async with trio.open_nursery() as nursery:
        player = Player(folder, make_machine, nursery)
        try:
            yield player
            await player.end()
        finally:
            with trio.CancelScope(shield=True):  # killed processes end at once
                for shell in player.shells:
                    shell.kill()
                    await shell.process.wait()
