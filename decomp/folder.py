"""A run's folder: minted once, described once, written by one process at a time (DESIGN 5).

Imports no jax, so that a login node can mint the folder of a job that runs elsewhere.
"""

from __future__ import annotations

import errno
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from omegaconf import OmegaConf

from decomp import manifest, upgrade
from decomp.config import load
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig

CONFIG = "config.yaml"
LOCK = "run.lock"
DIFF_LIMIT = 10_000_000  # characters of diff.patch; a checkout full of data is not a diff
_ENVIRONMENT = ("XLA_", "JAX_", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "OMP_NUM")


# ---------------------------------------------------------------- errors of the file system, in one line
def explain(error: OSError, path: Path, option: str = "output_dir") -> UserError:
    """What a person can do about ``error`` met while working on ``path``, which ``option`` chose."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            fix = f"free some space, or choose another disk with {option}=..."
            return UserError(f"{path}: the disk is full ({reason}): {fix}")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return UserError(f"{path}: cannot write there ({reason}): choose another folder with {option}=...")
        case errno.ENOTDIR | errno.EEXIST:
            return UserError(f"{path}: not a folder: move that file away, or choose another folder with {option}=...")
        case errno.ENOENT:
            return UserError(f"{path}: gone ({reason}): was the run folder moved or deleted?")
    return UserError(f"{path}: {reason}")


@contextmanager
def writing(path: Path, option: str = "output_dir") -> Iterator[None]:
    """Turns an operating-system error into the one line of ``explain``."""
    try:
        yield
    except OSError as error:
        raise explain(error, Path(error.filename) if error.filename else path, option) from error


def write_text(path: Path, text: str) -> None:
    """Writes all of ``text`` or leaves what was there: a full disk never leaves half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


# ---------------------------------------------------------------- the folder
def check_output(cfg: RunConfig) -> Path:
    """The absolute folder of the experiment's runs, created and shown to be writable.

    Called before anything slow is built. Raises UserError where it is a file, read-only or on a full disk.
    """
    root = Path(cfg.output_dir).expanduser().absolute() / cfg.experiment
    probe = root / f".write_test.{os.getpid()}"
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_text("a full disk takes an empty file and refuses the first byte\n")
        finally:
            probe.unlink(missing_ok=True)
    return root


def is_free(path: Path) -> bool:
    """Whether nothing is at ``path`` but perhaps an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def mint(cfg: RunConfig) -> Path:
    """Creates ``outputs/<experiment>/<run_id>``: mkdir decides who owns a name (cases 1 and 2)."""
    root = check_output(cfg)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for n in range(1, 10_000):
        folder = root / (stamp if n == 1 else f"{stamp}-{n}")
        try:
            with writing(folder):
                os.mkdir(folder)
        except UserError as error:
            if isinstance(error.__cause__, FileExistsError):
                continue
            raise
        for part in ("checkpoints", "figures", "logs"):
            with writing(folder):
                (folder / part).mkdir()
        return folder
    raise UserError(f"{root}: ten thousand runs in one second: set another output_dir")


def create(cfg: RunConfig, overrides: Sequence[str] = ()) -> Path:
    """A new run folder with everything that is known before anything is built."""
    folder = mint(cfg)
    write_config(folder, cfg)
    record_launch(folder, "run", overrides)
    return folder


def open_folder(path: str | Path, key: str = "run") -> Path:
    """The absolute run folder at ``path``, given as ``key``; UserError where there is none, or it cannot be read."""
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"{key}={path}: no such folder: give a run folder, outputs/<experiment>/<run_id>")
    try:
        there = (folder / CONFIG).is_file() and os.access(folder / CONFIG, os.R_OK)
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be read ({os.strerror(error.errno or 0)})") from error
    if there:
        return folder
    if CONFIG in names:
        raise UserError(f"{key}={path}: {CONFIG} cannot be read: permission denied")
    inside = [name for name in names if (folder / name / CONFIG).is_file()]
    hint = f"; did you mean {Path(path) / inside[-1]}?" if inside else ": give outputs/<experiment>/<run_id>"
    raise UserError(f"{key}={path}: not a run folder (it has no {CONFIG}){hint}")


# ---------------------------------------------------------------- what is written down
def write_config(folder: Path, cfg: RunConfig) -> None:
    # OmegaConf's writer quotes every text that its reader takes for a number (case 3: 1e5, 010, 12e345).
    data = {"format": manifest.FORMAT} | load.to_dict(cfg)
    write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(data)))


def read_config(folder: Path) -> RunConfig:
    """The stored configuration, validated; the only configuration a run reads (case 41). An older format's is upgraded
    by meaning (case 27)."""
    data = load.read_yaml(folder / CONFIG)
    return load.run_config(upgrade.config(data, str(folder / CONFIG)))


def record_launch(folder: Path, verb: str, overrides: Sequence[str]) -> None:
    """Appends one launch to overrides.txt and revision.txt, the folder's history; diff.patch is the latest's."""
    head = f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {verb} on {platform.node()}"
    revision, diff = checkout()
    for name, lines in (("overrides.txt", list(overrides)), ("revision.txt", revision.splitlines())):
        with writing(folder / name), (folder / name).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in (head, *lines))
    write_text(folder / "diff.patch", diff)


def run_overrides(folder: Path) -> str:
    """The command line's part of the first launch, ready to paste into a shell."""
    try:
        lines = (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    ends = [i for i, line in enumerate(lines) if line.startswith("# ")] + [len(lines)]
    return shlex.join(lines[ends[0] + 1 : ends[1]]) if len(ends) > 1 else ""


def checkout() -> tuple[str, str]:
    """Git revision and diff of the package's own checkout; ("none...", "") for an installed copy.

    A package inside a virtual environment inside somebody's repository is not that repository's: git must
    track this very file.
    """
    here = Path(__file__).resolve()
    root = here.parent.parent
    if _git(root, "ls-files", "--error-unmatch", str(here)) is None:
        return "none: the package does not lie in a git checkout of its own\n", ""
    revision = (_git(root, "rev-parse", "HEAD") or "no commit yet").strip()
    diff = _git(root, "diff", "HEAD") or ""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    if len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + f"\n[cut here: {len(diff)} characters in all]\n"
    state = "modified: see diff.patch" if diff else "clean"
    return f"{revision}\n{state}\n" + "".join(f"untracked: {name}\n" for name in untracked.splitlines()), diff


def _git(root: Path, *args: str) -> str | None:
    command = ["git", "-C", str(root), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def environment(devices: Sequence[str]) -> str:
    """environment.txt: interpreter, host, devices, flags, packages. Only names known to be harmless are copied."""
    flags = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(_ENVIRONMENT)]
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}, key=str.lower)
    head = [f"python {sys.version.split()[0]} ({sys.executable})", f"{platform.platform()} on {platform.node()}"]
    parts = {"devices": devices, "flags": flags or ["none"], "packages": packages}
    return "\n".join(head + [line for name, lines in parts.items() for line in ("", f"[{name}]", *lines)]) + "\n"
