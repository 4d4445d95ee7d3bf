from __future__ import annotations

import subprocess
import sys

import pytest

# What takes more than the tenth of a second that a person waits for help.
HEAVY = {"torch", "libp2p", "numpy", "trio", "cryptography", "transformers", "zeroconf", "asyncio"}


@pytest.mark.parametrize("line", ["--help", "join --help", "testnet run --help", "config show"])
def test_help_and_settings_need_nothing_heavy(line: str) -> None:
    code = (
        "import sys\n"
        "from farandole.testnet.cli import main\n"
        "try:\n"
        f"    main({line.split()!r})\n"
        "except SystemExit:\n"
        f"    print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.splitlines()[-1] == "[]"
