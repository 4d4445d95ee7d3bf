"""Sections of documents that commands write."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testnet.report.section import Section, SectionError

DOCUMENT = """# Figures

Prose before.\r
<!-- begin speed -->
old
<!-- end speed -->
Prose — between.

<!-- begin memory -->
<!-- end memory -->
"""


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "FIGURES.md"
    path.write_bytes(DOCUMENT.encode())
    path.chmod(0o640)
    return path


def test_a_section_is_replaced_and_nothing_else(document: Path) -> None:
    Section(document, "speed").write("| new |\n")
    Section(document, "memory").write("small")
    Section(document, "speed").write("| newer |\n")

    expected = DOCUMENT.replace("\nold\n", "\n\n| newer |\n\n").replace("memory -->\n<", "memory -->\n\nsmall\n\n<")
    assert document.read_bytes() == expected.encode()
    assert document.stat().st_mode & 0o777 == 0o640
    assert list(document.parent.iterdir()) == [document]


def test_a_link_to_a_document_stays_one(document: Path) -> None:
    link = document.with_name("LINK.md")
    link.symlink_to(document)

    Section(link, "memory").write("small")

    assert link.is_symlink()
    assert "small" in document.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "prose alone",
        "<!-- begin speed -->\nwithout an end",
        "<!-- end speed -->\n<!-- begin speed -->\n",
        "<!-- begin speed -->\n<!-- end speed -->\n" * 2,
        "<!-- begin speed -->\n<!-- begin memory -->\n<!-- end memory -->\n<!-- end speed -->\n",
        "the lines `<!-- begin speed -->` and\n`<!-- end speed -->`\n",
        "<!-- begin speedy -->\n<!-- end speedy -->\n",
    ],
)
def test_a_document_without_the_section_is_refused_and_stays(document: Path, text: str) -> None:
    document.write_text(text)
    section = Section(document, "speed")

    with pytest.raises(SectionError, match="it needs the lines <!-- begin speed --> and <!-- end speed -->"):
        section.write("new")
    assert document.read_text() == text


def test_a_document_that_cannot_be_read_is_refused(document: Path) -> None:
    with pytest.raises(SectionError, match=r"cannot read .*MISSING\.md"):
        Section(document.with_name("MISSING.md"), "speed").write("new")
    document.write_bytes(b"\xff")
    with pytest.raises(SectionError, match="cannot read"):
        Section(document, "speed").write("new")


def test_a_document_that_cannot_be_written_is_left_whole(document: Path) -> None:
    partial = document.with_name("FIGURES.md.part")
    partial.mkdir()

    with pytest.raises(SectionError, match="cannot write"):
        Section(document, "speed").write("new")

    assert document.read_bytes() == DOCUMENT.encode()
