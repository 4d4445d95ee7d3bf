"""Addresses of the project: placeholders are not shown, and a defect's report names where to send it."""

from __future__ import annotations

import pytest

from farandole.node import cli
from farandole.node.base.project import addresses, where_to_report


def test_placeholders_are_not_addresses() -> None:
    declared = ["Source, https://farandole.invalid/source", "Issues, https://example.org/issues"]
    assert addresses(declared) == {"Issues": "https://example.org/issues"}


def test_a_report_names_the_address_if_there_is_one() -> None:
    assert where_to_report({"Issues": "https://example.org/issues"}).endswith("report it: https://example.org/issues")
    assert "report it" not in where_to_report({})


def test_a_defect_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "whole_app", lambda: lambda args: broken())
    with pytest.raises(ZeroDivisionError) as raised:
        cli.main(["status"])
    (note,) = raised.value.__notes__
    assert "defect of farandole" in note
