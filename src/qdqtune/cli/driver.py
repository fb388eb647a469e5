"""A run on a Ray cluster has a process of its own: Ray ends a program at once, without a word, when the node that it is
connected through is lost. Who stays says what has happened, and ends what is left of a cluster that was started for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from qdqtune.cli.command import command_line
from qdqtune.cli.streams import PARENT
from qdqtune.errors import EngineUnavailable
from qdqtune.system.interpreter import python

DRIVER = "QDQTUNE_RAY_DRIVER"
"""The variable that says that this process is it."""

LOST = 1
"""How Ray ends a program; commands of qdqtune have other exit codes."""

NODE_LOST = "the Ray node that the run was connected through is lost, and the run with it"


def is_driver() -> bool:
    """Whether this process may be a driver of Ray: it can be lost."""
    return os.environ.pop(DRIVER, None) is not None


def driven() -> int:
    """Do what was typed in a process that can be lost. Gives the exit code.

    Raises:
        EngineUnavailable: it was lost.
    """
    reads, holds = os.pipe()  # it ends when this end closes, however that comes about
    asked = python("-m", "qdqtune", *command_line()[1:], **{DRIVER: "1", PARENT: str(reads)})
    run = subprocess.Popen(**asked, stdout=sys.stdout.fileno(), pass_fds=[reads], process_group=0)
    os.close(reads)
    while run.returncode is None:
        try:
            run.wait()
        except KeyboardInterrupt:  # the terminal tells this process only
            run.send_signal(signal.SIGINT)
    os.close(holds)
    if run.returncode != LOST and run.returncode >= 0:
        return run.returncode
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    ended = f"{signal.Signals(-run.returncode).name} has ended the run" if run.returncode < 0 else NODE_LOST
    raise EngineUnavailable(f"{ended}: what was measured is kept, and the same command goes on from there")
