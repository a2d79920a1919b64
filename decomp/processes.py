"""A run of several JAX processes: joining, who is primary, deciding in one place, and leaving together.

Three environment variables make a process one of several: ``DECOMP_COORDINATOR`` (host:port, on the machine of process
0), ``DECOMP_PROCESSES`` and ``DECOMP_PROCESS`` (its number, from 0). Without them nothing of jax's distributed runtime
is touched. ``DECOMP_PATIENCE`` is the number of seconds after which a silent process is taken for dead.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from decomp import coordinator
from decomp.config.errors import UserError
from decomp.peers import News, Peers

VARIABLES = ("DECOMP_COORDINATOR", "DECOMP_PROCESSES", "DECOMP_PROCESS")
PATIENCE = "DECOMP_PATIENCE"
BUG, MISTAKE, INTERRUPTED = 1, 2, 130
LOST = 1  # exit code where another process died without a word
POLL_MS = 10_000
LOST_SIGNS = ("gloo", "nccl", "coordination_service", "coordinationservice")  # in what is raised when others are gone


class Place(NamedTuple):
    """Where the environment puts this process."""

    coordinator: str
    count: int
    index: int
    patience: float


def place() -> Place | None:
    """This process among several; None where it is the only one. UserError where the environment is half set."""
    given = {name: os.environ.get(name, "") for name in VARIABLES}
    if not any(given.values()):
        return None
    if missing := [name for name, value in given.items() if not value]:
        raise UserError(
            f"{missing[0]}: is not set, and {_first(given)} is: set {', '.join(VARIABLES)}, or none of them"
        )
    address, count, index = given.values()
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise UserError(f"DECOMP_PROCESS={index}, DECOMP_PROCESSES={count}: give a number from 0 to the count less one")
    if not (address.rpartition(":")[0] and address.rpartition(":")[2].isdecimal()):
        raise UserError(f"DECOMP_COORDINATOR={address}: give host:port, on the machine of process 0")
    return Place(address, int(count), int(index), _patience()) if int(count) > 1 else None


def _first(given: dict[str, str]) -> str:
    return next(f"{name}={value}" for name, value in given.items() if value)


def _patience() -> float:
    text = os.environ.get(PATIENCE, "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 3 <= seconds < coordinator.NEVER:
        raise UserError(f"{PATIENCE}={text}: give a number of seconds, 3 or more")
    return seconds


class Group:
    """This process as one of several, from joining to leaving."""

    def __init__(self, place: Place):
        self.place = place
        self.service = _serve(place) if place.index == 0 else None
        self.client = _connect(place)
        self.farewells: list[Callable[[str], None]] = []
        self.peers = Peers(self.client, place.index, place.count, place.patience, LOST, self.leave)
        self.meetings, self._decided, self._asked = 0, 0, 0
        self._met: dict[str, int] = {}

    def from_primary(self, make: Callable[[], Any]) -> Any:
        self._decided += 1
        key = f"decomp/decided/{self._decided}"
        if self.place.index == 0:
            made = make()
            self.client.key_value_set(key, json.dumps(made))
        return json.loads(self.get(key))

    def any_of(self, mine: str | None) -> str | None:
        self._asked += 1
        here = f"decomp/asked/{self._asked}"
        self.client.key_value_set(f"{here}/{self.place.index}", json.dumps(mine))
        all_of = [json.loads(self.get(f"{here}/{p}")) for p in range(self.place.count)]
        return next((one for one in all_of if one is not None), None)

    def get(self, key: str) -> str:
        """Waits for ``key`` as long as everybody lives; ``Peers`` ends the process otherwise."""
        while True:
            try:
                return self.client.blocking_key_value_get(key, POLL_MS)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def barrier(self, key: str, name: str, seconds: float) -> None:
        self._met[key] = self._met.get(key, 0) + 1
        here, until = f"decomp/met/{key}/{self._met[key]}/", time.monotonic() + seconds
        self.client.key_value_set(f"{here}{self.place.index}", "")
        while len(self.client.key_value_dir_get(here)) < self.place.count:
            for process, reason in self.client.key_value_dir_get(f"decomp/settle/{name}/"):
                if json.loads(reason) is not None:
                    raise RuntimeError(f"process {process.rpartition('/')[2]}: {json.loads(reason)}")
            if time.monotonic() > until:
                raise RuntimeError(f"no other process came to {key} within {seconds:.0f} s")
            time.sleep(0.05)

    def meet(self, name: str) -> None:
        """Waits until every process is here, once per name, for as long as they live."""
        self.client.key_value_set(f"decomp/meet/{name}/{self.place.index}", "")
        for index in range(self.place.count):
            self.get(f"decomp/meet/{name}/{index}")

    def part(self) -> None:
        """All have come to the same end: they go, then the primary, then the coordinator."""
        self.meet("end")
        self.peers.end()
        if self.place.index == 0:
            self.meet("gone")
        else:
            self.client.key_value_set(f"decomp/meet/gone/{self.place.index}", "")
        self.client.shutdown()
        if self.service is not None and self.service.stdin is not None:
            self.service.stdin.write(b".")
            self.service.stdin.close()
            self.service.wait(30)
        _state().client = None

    def fail(self, error: BaseException) -> None:
        """Tells the others why, and goes without waiting for them (case 34). Never returns."""
        news = describe(error)
        if is_loss(error):
            news = self.peers.news() or news  # who failed first has the reason; this is what it did to us
        elif news.code == BUG:
            traceback.print_exception(error)
        self.peers.tell(news)
        self.leave(news, shown=news.code == BUG and not is_loss(error))

    def leave(self, news: News, shown: bool = False) -> None:
        """Ends the process from any thread: the main one may wait for a collective that never comes."""
        for farewell in self.farewells:
            with contextlib.suppress(Exception):
                farewell(news.text)
        for line in () if shown else news.text.splitlines():
            print(f"decomp: {line}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(news.code)


_group: Group | None = None


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Joins the other processes, if there are any, for as long as the block lasts. Before jax looks for devices.

    An exception in the block ends this process at once, and with it all others.
    """
    global _group
    where = place()
    if where is None or _group is not None:
        yield
        return
    _group = Group(where)
    try:
        yield
        _group.part()
    except BaseException as error:
        _group.fail(error)
    finally:
        _group = None


def several() -> bool:
    return _group is not None


def index() -> int:
    return _group.place.index if _group else 0


def is_primary() -> bool:
    """Whether this process writes the run folder; true where it is the only one."""
    return index() == 0


def meet() -> None:
    """Waits until all processes are here, at places that all come to in the same order."""
    if _group is not None:
        _group.meetings += 1
        _group.meet(str(_group.meetings))


def from_primary(make: Callable[[], Any]) -> Any:
    """What ``make`` gives on the primary, as JSON carries it, on every process; the others wait.

    To be called by the main threads of all processes in the same order.
    """
    return _group.from_primary(make) if _group else make()


def any_of(mine: str | None) -> str | None:
    """On every process the same: what the first process that has something has; None where none has.

    To be called by the main threads of all processes in the same order.
    """
    return _group.any_of(mine) if _group else mine


def settle(name: str, reason: str | None, commit: Callable[[str | None], Any]) -> Any:
    """One outcome of what every process did its part of, on any thread; ``name`` is used once.

    ``reason`` says why this process failed, if it did. The primary waits for all and calls ``commit`` with the first
    reason (None: all succeeded); what that gives, as JSON carries it, is returned everywhere.
    """
    if _group is None:
        return commit(reason)
    group, count = _group, _group.place.count
    refuse(name, reason)
    if group.place.index == 0:
        reasons = [json.loads(group.get(f"decomp/settle/{name}/{p}")) for p in range(count)]
        said = [f"process {p}: {r}" if p else r for p, r in enumerate(reasons) if r is not None]
        group.client.key_value_set(f"decomp/settled/{name}", json.dumps(commit(said[0] if said else None)))
    return json.loads(group.get(f"decomp/settled/{name}"))


def barrier(key: str, name: str, seconds: float) -> None:
    """Waits, on any thread, until every process is here as often as this one.

    RuntimeError when one has told ``settle(name, ...)`` that it failed: it will not come.
    """
    if _group is not None:
        _group.barrier(key, name, seconds)


def tell_interrupted() -> None:
    """A second Ctrl-C ends this process at once; the others follow."""
    if _group is not None:
        _group.peers.tell(News(INTERRUPTED, "interrupted twice: stopped at once, unsaved"))


def refuse(name: str, reason: str | None) -> None:
    """Tells those who wait in ``barrier`` for ``name`` what ``settle`` will be told."""
    if _group is not None:
        key = f"decomp/settle/{name}/{_group.place.index}"
        _group.client.key_value_set(key, json.dumps(reason), allow_overwrite=True)


@contextlib.contextmanager
def farewell(act: Callable[[str], None]) -> Iterator[None]:
    """``act`` receives the reason before this process is ended by what befell another."""
    if _group is None:
        yield
        return
    farewells = _group.farewells
    farewells.append(act)
    try:
        yield
    finally:
        farewells.remove(act)


def describe(error: BaseException) -> News:
    """Exit code and text of what ended the main thread."""
    if isinstance(error, UserError):
        return News(MISTAKE, str(error))
    if isinstance(error, KeyboardInterrupt):
        return News(INTERRUPTED, "interrupted")
    if isinstance(error, SystemExit):
        return News(error.code if isinstance(error.code, int) else BUG, f"exit {error.code}")
    line = " ".join(str(error).split())[:300]
    if is_loss(error):
        return News(LOST, f"the connection to another process broke, so it has most likely died ({line})")
    return News(BUG, f"{type(error).__name__}: {line}")


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` is what a collective, or the coordinator, raises when another process is gone."""
    ours = isinstance(error, UserError) or not isinstance(error, Exception)
    return not ours and any(sign in str(error).lower() for sign in LOST_SIGNS)


# ---------------------------------------------------------------- jax's distributed runtime
def _state() -> Any:
    # jax.distributed.initialize runs the service inside process 0 and takes SIGTERM; its parts do neither.
    from jax._src import distributed

    return distributed.global_state


def _serve(place: Place) -> subprocess.Popen[bytes]:
    """Starts the coordinator. UserError where it cannot listen."""
    command = [sys.executable, "-P", str(Path(coordinator.__file__)), place.coordinator, str(place.count)]
    child = subprocess.Popen(
        [*command, str(2 * place.patience)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    said = child.stdout.readline().decode().strip()
    if said != "ready":
        child.communicate()
        raise UserError(f"DECOMP_COORDINATOR={place.coordinator}: cannot listen there ({said or 'it ended'})")
    return child


def _connect(place: Place) -> Any:
    """The client of the coordinator, registered with jax: its backends then span all processes."""
    runtime, state = importlib.import_module("jaxlib._jax"), _state()
    state.coordinator_address, state.num_processes, state.process_id = place.coordinator, place.count, place.index
    state.client = runtime.get_distributed_runtime_client(
        place.coordinator,
        place.index,
        init_timeout=max(10, int(5 * place.patience)),  # the others may start later
        heartbeat_timeout=coordinator.NEVER,
        shutdown_timeout=max(5, int(place.patience)),
        shutdown_on_destruction=False,
        use_compression=True,
    )
    try:
        state.client.connect()
    except RuntimeError as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(
            f"DECOMP_COORDINATOR={place.coordinator}: the DECOMP_PROCESSES={place.count} processes did not come "
            f"together ({line})"
        ) from error
    return state.client
