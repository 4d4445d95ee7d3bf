"""What a process is and has got from who started it, as JSON; or, with an argument, an end of that kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "words":
            sys.exit("it failed")
        case "abort":
            os.abort()
        case "raise":
            raise ValueError("it failed")
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "child":
            ended = subprocess.run([sys.executable, "-m", "tests.process_probe", "exit", "5"], check=False)
            sys.exit(ended.returncode + 1)
    mask = os.umask(0)
    about = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "parent": os.getppid(),
        "group": os.getpgid(0) if os.getpgid(0) != os.getpid() else "own",
        "session": os.getsid(0) if os.getsid(0) != os.getpid() else "own",
        "descriptors": [number for number in range(500) if Path(f"/proc/self/fd/{number}").exists()],
        "mask": mask,
        "interrupts": str(signal.getsignal(signal.SIGINT)),
        "path": sys.path[0],
        "is fork": "torch" in sys.modules,
        "main": sys.modules["__main__"].__name__,
        "is terminal": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "encodings": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "warnings": sys.warnoptions,
        "input": sys.stdin.read(),
    }
    print(json.dumps(about))
    print("to the other stream", file=sys.stderr)
