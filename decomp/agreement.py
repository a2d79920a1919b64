"""What all processes know at the same step: the largest of numbers that each has its own of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decomp import processes


class Agreement:
    """Called by every process at the same places with its own numbers, it gives the largest ones of all processes.

    With several processes it gives those of the call BEFORE: the collective of this one runs behind the step on the
    devices while the host goes on, and the result is the same on all because they read the same collective. With one
    process it gives what it was given.
    """

    def __init__(self, initial: tuple[int, ...]):
        self._before: Any = initial
        if processes.several():
            mesh = Mesh(np.array(jax.devices()), ("device",))
            self._rows = NamedSharding(mesh, PartitionSpec("device"))
            everywhere = NamedSharding(mesh, PartitionSpec())
            self._largest = jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=everywhere)
            processes.meet()  # see ``mesh.connect``
            self._before = self._reduce(initial)

    def __call__(self, *mine: int) -> tuple[int, ...]:
        if not processes.several():
            return mine
        before, self._before = self._before, self._reduce(mine)
        return tuple(int(x) for x in np.asarray(before))

    def _reduce(self, mine: tuple[int, ...]) -> jax.Array:
        row = np.asarray([mine], np.int32)
        parts = [jax.device_put(row, device) for device in jax.local_devices()]
        shape = (jax.device_count(), len(mine))
        return self._largest(jax.make_array_from_single_device_arrays(shape, self._rows, parts))
