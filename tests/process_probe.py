"""What a process is and has got from who started it, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    about = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "parent": os.getppid(),
        "session": os.getsid(0) if os.getsid(0) != os.getpid() else "own",
        "descriptors": [number for number in range(500) if Path(f"/proc/self/fd/{number}").exists()],
        "mask": os.umask(0),
        "interrupts": str(signal.getsignal(signal.SIGINT)),
        "path": sys.path[:2],
        "is fork": "torch" in sys.modules,
        "main": sys.modules["__main__"].__name__,
        "streams": [(stream.isatty(), stream.encoding) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "warnings": sys.warnoptions,
        "input": sys.stdin.read(),
    }
    print(json.dumps(about))
    print("to the other stream", file=sys.stderr)
