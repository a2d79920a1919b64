"""run.lock: who writes in a run folder (case 43). A second writer is refused and told who holds it.

The file names host, boot, process and start time, and its modification time is the heartbeat. A lock of this
host is stale when its process is gone; one of another host when the heartbeat is older than ``TIMEOUT``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from decomp.config.errors import UserError
from decomp.folder import LOCK, write_text, writing

BEAT = 15.0  # seconds between heartbeats
TIMEOUT = 120.0  # seconds without a heartbeat after which another host's lock is stale


class RunLock:
    """Held from construction to ``release``. ``lost`` turns true when another process took the folder over."""

    def __init__(self, folder: Path, beat: float = BEAT, timeout: float = TIMEOUT):
        self.path = folder / LOCK
        self.lost = False
        self._me = _identity()
        with writing(self.path), _critical(folder):
            _refuse_if_held(self.path, timeout)
            write_text(self.path, json.dumps(self._me, indent=1) + "\n")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(beat,), name="run.lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Removes the lock if it is still ours; safe to call twice, and from a thread that ends the process."""
        self._done.set()
        if _read(self.path) == self._me:
            self.path.unlink(missing_ok=True)

    def _beat(self, seconds: float) -> None:
        while not self._done.wait(seconds):
            holder = _read(self.path)
            if holder != self._me:
                self.lost = not self._done.is_set()
                return
            try:
                os.utime(self.path)
            except OSError:
                continue  # a file system that stumbles for a moment: the next beat tells

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _identity() -> dict[str, object]:
    pid = os.getpid()
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": platform.node(), "boot": _boot(), "pid": pid, "birth": _birth(pid), "since": started}


def _boot() -> str:
    """Tells apart two machines of one name, and one machine before and after a reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _birth(pid: int) -> str | None:
    """Start time of a process in clock ticks, so that a reused pid is not mistaken; None: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def _read(path: Path) -> dict | None:
    try:
        holder = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) and {"host", "boot", "pid", "birth"} <= holder.keys() else None


def _refuse_if_held(path: Path, timeout: float) -> None:
    """Raises UserError if a living process holds the lock."""
    holder = _read(path)
    if holder is None and not path.exists():
        return
    age = _age(path)
    if holder is None:
        held, who = age < timeout, "a process that wrote no name"
    elif (holder["host"], holder["boot"]) == (platform.node(), _boot()):
        held, who = _birth(int(holder["pid"])) == holder["birth"], f"process {holder['pid']} on this machine"
    else:
        held, who = age < timeout, f"process {holder['pid']} on {holder['host']}"
    if held:
        since = f" since {holder['since']}" if holder and "since" in holder else ""
        raise UserError(
            f"{path.parent}: {who} writes here{since} (heartbeat {age:.0f} s ago): wait until it ends, or stop it first"
        )


def _age(path: Path) -> float:
    """Seconds since the heartbeat on the file system's own clock: two hosts' clocks need not agree."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.now")
    try:
        probe.write_text("")
        return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
    except FileNotFoundError:
        return float("inf")
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _critical(folder: Path) -> Iterator[None]:
    """One process at a time between judging a lock stale and replacing it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems without flock: the heartbeat's check of ownership remains
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
