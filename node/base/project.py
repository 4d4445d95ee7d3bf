"""Version and addresses of the project, as the installed package declares them (``[project.urls]``)."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import metadata, version
from typing import Final

VERSION: Final = version("farandole")


_UNSET: Final = ".invalid/"
"""Part of the address of a placeholder; no real address can be in this domain (RFC 2606)."""


def addresses(declared: Iterable[str] | None = None) -> dict[str, str]:
    """Return label -> URL, without placeholders; ``declared``: lines ``LABEL, URL``, by default the package's."""
    lines = declared if declared is not None else metadata("farandole").get_all("Project-URL") or []
    pairs = (line.partition(", ") for line in lines)
    return {label: url for label, _, url in pairs if _UNSET not in url}


def about_this_program() -> str:
    """Return the version, alone in the first line, and a line for each address of the project."""
    return "\n".join([VERSION, *(f"{label.lower()}: {url}" for label, url in addresses().items())])


def where_to_report(found: dict[str, str]) -> str:
    """Return what to do about a defect of farandole, given the project's addresses."""
    issues = found.get("Issues")
    return f"This is a defect of farandole {VERSION}" + (f"; please report it: {issues}" if issues else "")
