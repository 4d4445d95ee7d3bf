"""The parts of a Markdown page that tests use: fenced blocks with their comments, code.

A comment on the line before a block says how it is played (`tests.documents.player`):

    <!-- play: on=second stays="in the run" -->
    ```console
    $ farandole join farandole1...
    ```
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
# Some pages are generated from the code's own texts, or written by commands; their links and commands are checked too.
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

_HEAD = re.compile(r"--- (?P<old>\S+)\n\+\+\+ (?P<new>\S+)\n(?P<hunks>.*)", re.DOTALL)
_PLAY = re.compile(r"\s*<!-- play: (.*) -->$")
_COMMENT = re.compile(r"\s+#\s.*")
_PARSER = MarkdownIt()


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    """Line of the page, from 1, with the opening fence."""
    play: Mapping[str, str] = field(default_factory=dict)
    """Contents of the comment before it."""

    @property
    def commands(self) -> list[Command]:
        """Return the commands: in a ``console`` block the lines with ``$ ``, each followed by its output; in ``sh`` all
        lines but comments."""
        commands: list[Command] = []
        for number, line in enumerate(self.text.splitlines(), self.line + 1):
            if self.language == "sh" and line and not line.startswith("#"):
                commands.append(Command(line, (), number))
            elif self.language == "console" and line.startswith("$ "):
                commands.append(Command(line.removeprefix("$ "), (), number))
            elif self.language == "console" and line.strip():
                last = commands.pop()
                commands.append(Command(last.text, (*last.output, line), last.line))
        return commands


@dataclass(frozen=True)
class Command:
    """A command typed at a terminal."""

    text: str
    """A line for a shell, with its comment, if it has one."""
    output: tuple[str, ...]
    """Lines that the page shows below the command."""
    line: int

    @property
    def bare(self) -> str:
        """Return the command without its comment."""
        return _COMMENT.sub("", self.text)

    @property
    def words(self) -> list[str]:
        """Return the first program and its arguments, without ``sudo``, variables before it, and shell operators."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if word[0] in "|&;<>()":
                break
            if words or not (word == "sudo" or re.fullmatch(r"[A-Z_]+=.*", word)):
                words.append(word)
        return words


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, from the top."""
    play: dict[str, str] = {}
    for token in _PARSER.parse(page):
        if token.type == "fence" and token.map:
            yield Block(token.info, token.content, token.map[0] + 1, play)
        comment = _PLAY.match(token.content) if token.type == "html_block" else None
        play = dict(word.partition("=")[::2] for word in shlex.split(comment[1])) if comment else {}


def indented_commands(page: str) -> Iterator[Command]:
    """Yield the lines of indented blocks, for a page whose indented blocks contain only commands."""
    for token in _PARSER.parse(page):
        if token.type == "code_block" and token.map:
            for number, line in enumerate(token.content.splitlines(), token.map[0] + 1):
                yield Command(line, (), number)


def code_spans(page: str) -> list[str]:
    """Return the texts in backticks, each as one line."""
    inline = (child for token in _PARSER.parse(page) for child in token.children or ())
    return [" ".join(child.content.split()) for child in inline if child.type == "code_inline"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def apply(change: str, folder: Path) -> None:
    """Apply a ``diff`` block, which has no line numbers, to a file below the folder; /dev/null makes a new one.

    The lines of a hunk (after ``@@``) that are in the file now must occur there exactly once: an outdated page fails.
    """
    head = _HEAD.fullmatch(change)
    assert head, f"begins with --- and +++, a file's name behind each:\n{change}"
    path = folder / head["new"]
    text = "" if head["old"] == "/dev/null" else path.read_text()
    for hunk in head["hunks"].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-\n" for line in lines), hunk
        old = "".join(line[1:] or line for line in lines if line[0] != "+")
        new = "".join(line[1:] or line for line in lines if line[0] != "-")
        if head["old"] != "/dev/null":
            assert text.count(old) == 1, f"{path} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new) if old else new
    path.write_text(text)
