"""Another machine to reach by SSH: a folder of this one, through a stand-in or a real server."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from processes import family, until
from runs import environment

STAND_IN = Path(__file__).parent / "remote_stand_in.py"
SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@dataclass(frozen=True)
class Far:
    """The folder of the other machine, with its Python and its temporary files; the path on which the program is that
    reaches it; and its name."""

    folder: Path
    path: str
    name: str = "board"

    @property
    def on(self) -> str:
        """What `on` is set to."""
        return f"{self.name}:{self.folder / 'far' / 'python'}"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def left(self) -> list[object]:
        """Processes and files of ours there."""
        return [*map(words_of, family(self.temporary)), *self.temporary.iterdir()]

    def clean(self) -> None:
        """Wait until nothing is left there."""
        try:
            until(lambda: not self.left(), 20.0)
        except AssertionError:
            raise AssertionError(self.left()) from None

    def engines(self) -> list[int]:
        """The workers there, without the processes that they leave to end them."""
        found = [pid for pid in family(self.temporary) if b"qdqtune.engines.remote" in words_of(pid)]
        return [pid for pid in found if parent_of(pid) not in found]

    def ways(self) -> list[int]:
        """The processes of `ssh` on this machine."""
        found = [pid for pid in _all() if b"\0exec " in words_of(pid) and self._is_named(pid)]
        return [pid for pid in found if parent_of(pid) not in found]

    def _is_named(self, pid: int) -> bool:
        return os.fsencode(self.folder) in words_of(pid)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _written(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def stand_in(folder: Path) -> Iterator[Far]:
    """A machine behind the stand-in."""
    far = _far(folder)
    words = shlex.join([sys.executable, "-I", str(STAND_IN), str(folder)])
    _written(folder / "bin" / "ssh", f'#!/bin/sh\nexec {words} "$@"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", far.path)
        yield far


@contextmanager
def server(folder: Path) -> Iterator[Far]:
    """A machine behind a server of SSH that runs here."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no server of SSH is installed")
    far = _far(folder)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\nPidFile {folder}/pid\n"
    )
    (folder / "ssh_config").write_text(
        f"Host board\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\n"
    )
    _written(folder / "bin" / "ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server of root separates privileges
    running = subprocess.Popen([SSHD, "-D", "-f", folder / "sshd_config", "-E", folder / "log"])
    try:
        until(lambda: running.poll() is not None or _answers(port))
        if running.poll() is not None:
            pytest.skip(f"the server of SSH does not start: {(folder / 'log').read_text()[-200:]}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", far.path)
            yield far
    finally:
        running.terminate()
        running.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _far(folder: Path) -> Far:
    for name in ("far", "tmp", "bin"):
        (folder / name).mkdir()
    told = {"PYTHONPATH": environment()["PYTHONPATH"], "TMPDIR": str(folder / "tmp")}
    same = ("PYTHONPYCACHE", "OPENBLAS_")  # the latter choose how products are rounded, which is to be equal there
    told |= {name: value for name, value in os.environ.items() if name.startswith(same)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in told.items())
    _written(folder / "far" / "python", f'#!/bin/sh\n{exports}exec {shlex.quote(sys.executable)} "$@"\n')
    return Far(folder, os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]))


WAYS = {"stand-in": stand_in, "server": server}
