"""Stands in for `ssh` and `adb`: `python remote_stand_in.py HOME PROGRAM ARGUMENTS` runs the command that is among the
arguments in that home folder, in a shell that prints a line first, as some do. The host "nowhere" cannot be reached. If
this is killed, the command's input ends, as over a network.
"""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

NOT_FOUND = {
    "ssh": ["ssh: Could not resolve hostname nowhere: Name or service not known"],
    "adb": ["* daemon not running; starting now at tcp:5037", "* daemon started successfully",
            "adb: device 'nowhere' not found"],
}  # fmt: skip


def main() -> int:
    home, program, *words = sys.argv[1:]
    if program == "adb":
        host, command = _of_adb(words)
    else:
        host, command = words[words.index("--") + 1 :]
    if host == "nowhere":
        print(*NOT_FOUND[program], sep="\n", file=sys.stderr)
        return 1 if program == "adb" else 255
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


def _of_adb(words: list[str]) -> tuple[str, str]:
    """The serial number and the command: the shell takes no terminal, so that bytes pass as they are."""
    *chosen, shell, raw, command = words
    assert (shell, raw) == ("shell", "-T")
    if not chosen:
        return "", command
    option, serial = chosen
    assert option == "-s"
    return serial, command


def _copy(source: int, target: IO[bytes]) -> None:
    with suppress(OSError), target:
        while data := os.read(source, 2**16):
            while data:
                data = data[target.write(data) :]


if __name__ == "__main__":
    sys.exit(main())
