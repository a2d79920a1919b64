"""The coordination service of a run of several processes, in a process of its own.

``python -P coordinator.py ADDRESS PROCESSES GRACE`` listens and says ``ready``. It lives apart from the primary because
jax ends every process the moment the service is gone: so the others learn what became of the primary, and end with
a clear line. Its standard input says when to go: a word, soon; the end of the pipe (the primary died), after ``GRACE``
seconds. Imports nothing but jaxlib.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time

FAREWELL = 1.0  # seconds for the last ones to close their connections
NEVER = 10**6  # seconds; decomp/peers.py judges who is alive, and says so in words


def main(address: str, processes: str, grace: str) -> int:
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sign, signal.SIG_IGN)  # a launcher signals every process of a job; the run decides when it ends
    host, _, port = address.rpartition(":")
    bind = address if host in ("127.0.0.1", "localhost") else f"[::]:{port}"
    try:
        _refuse_taken(host, int(port))  # the service itself shares a port that is taken, and says nothing
        service = importlib.import_module("jaxlib._jax").get_distributed_runtime_service(
            bind, int(processes), heartbeat_timeout=NEVER
        )
    except (OSError, RuntimeError) as error:
        print(" ".join(str(error).split()) or type(error).__name__, flush=True)
        return 1
    print("ready", flush=True)
    dead = not sys.stdin.buffer.read(1)
    time.sleep(float(grace) if dead else FAREWELL)
    del service
    os._exit(0)  # without the service's own farewell, which waits for processes that may be dead


def _refuse_taken(host: str, port: int) -> None:
    loopback = host in ("127.0.0.1", "localhost")
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host if loopback else "", port))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
