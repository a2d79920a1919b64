"""A disk of a few megabytes: a tmpfs where the test may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """Mounts ``size`` (``2m``) at ``folder``; skips the test where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount(8)")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=10, check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fills the disk to the last byte, then gives ``leave`` bytes back. Returns the file that takes the space."""
    path = folder / "ballast"
    size = 0
    with path.open("wb", buffering=0) as file:
        try:
            while written := file.write(b"x" * 4096):
                size += written
        except OSError:
            pass
        file.truncate(max(0, size - leave))
    return path
