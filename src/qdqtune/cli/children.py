"""Processes of qdqtune that this process starts. They watch a pipe, and end when this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qdqtune.cli.command import command_line
from qdqtune.cli.streams import PARENT
from qdqtune.engines.ray import NODE_LOST
from qdqtune.errors import EngineUnavailable
from qdqtune.system.interpreter import end_group, python

DRIVER = "QDQTUNE_RAY_DRIVER"
"""The environment variable that marks the child which may use Ray."""

LOST = 1
"""The exit code of a program that Ray ends because its node is lost; commands of qdqtune use other codes."""


@contextmanager
def started(
    arguments: Sequence[str], variables: Mapping[str, str], fds: Sequence[int] = (), **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start this Python with these arguments. `variables` are added to its environment, `fds` stay open in it, `how`
    are arguments of `subprocess.Popen`."""
    reads, holds = os.pipe()  # the child ends when this process closes its end, or is gone
    try:
        words = python(*arguments, **variables, **{PARENT: str(reads)})
        child = subprocess.Popen(**words, process_group=0, pass_fds=(reads, *fds), **how)
    except BaseException:
        os.close(holds)
        raise
    finally:
        os.close(reads)
    try:
        yield child
    finally:
        os.close(holds)


def is_driver() -> bool:
    """Whether this process is the child that may use Ray."""
    return os.environ.pop(DRIVER, None) is not None


def run_on_ray() -> int:
    """Run the typed command in a child, since Ray ends a program without a message when its node is lost. Returns the
    exit code.

    Raises:
        EngineUnavailable: the child was ended.
    """
    words = ("-m", "qdqtune", *command_line()[1:])
    with started(words, {DRIVER: "1"}, stdout=sys.stdout.fileno()) as run:
        while run.returncode is None:
            try:
                run.wait()
            except KeyboardInterrupt:  # a terminal interrupts this process only
                run.send_signal(signal.SIGINT)
    if run.returncode != LOST and run.returncode >= 0:
        return run.returncode
    end_group(run.pid)
    if run.returncode == LOST:
        raise EngineUnavailable(NODE_LOST)
    name = signal.Signals(-run.returncode).name
    raise EngineUnavailable(f"{name} has ended the run: the same command goes on from what was measured")
