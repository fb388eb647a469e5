"""Stands in for `ssh`: `python remote_stand_in.py HOME ARGUMENTS` runs the command that is among the arguments in that
home folder, in a shell that prints a line first, as some do. The host "nowhere" cannot be reached. If this is killed,
the command's input ends, as over a network.
"""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO


def main() -> int:
    home, *words = sys.argv[1:]
    host, command = words[words.index("--") + 1 :]
    if host == "nowhere":
        print("ssh: Could not resolve hostname nowhere: Name or service not known", file=sys.stderr)
        return 255
    told = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"echo welcome; {command}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**told, "HOME": home},
        cwd=home,
        start_new_session=True,
        bufsize=0,
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    threading.Thread(target=_copy, args=(0, shell.stdin), daemon=True).start()
    with suppress(OSError):
        shutil.copyfileobj(shell.stdout, os.fdopen(1, "wb", 0), 2**16)
    return shell.wait()


def _copy(source: int, target: IO[bytes]) -> None:
    with suppress(OSError), target:
        while data := os.read(source, 2**16):
            while data:
                data = data[target.write(data) :]


if __name__ == "__main__":
    sys.exit(main())
