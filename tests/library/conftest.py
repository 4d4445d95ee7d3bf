from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "FARANDOLE_HOME": str(tmp_path / "home"),
        "FARANDOLE_LISTEN": "/ip4/127.0.0.1/tcp/0",
        "FARANDOLE_MDNS": "false",
    }.items():
        monkeypatch.setenv(name, value)
