"""Seconds of a training step under two settings, in alternating processes of one sitting; their ratio is the finding.

python bench/step.py heap                     # with and without decomp.mesh.keep_heap
python bench/step.py loss.remat=true,false    # any config key with two values
python bench/step.py loss.remat=true,false -- data.batch_size=16    # overrides that both share
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

ROUNDS, STEPS = 3, 12


def measure(keep: bool, overrides: list[str]) -> None:
    """One process: prints (wall seconds, user, system, page faults) per step."""
    from decomp.config.compose import compose
    from decomp.mesh import keep_heap

    if keep:
        keep_heap()
    import jax

    from decomp import build

    trainer = build.build(compose(overrides))
    state = trainer.init_state()
    for i in range(3):
        state, metrics = trainer.step(state, trainer.data.batch(i))
    jax.block_until_ready(metrics)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for i in range(STEPS):
        state, metrics = trainer.step(state, trainer.data.batch(3 + i))
        jax.block_until_ready(metrics)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    used = [getattr(after, k) - getattr(before, k) for k in ("ru_utime", "ru_stime", "ru_minflt")]
    print(json.dumps([x / STEPS for x in (wall, *used)]))


def main(argv: list[str]) -> None:
    what, shared = argv[0], argv[argv.index("--") + 1 :] if "--" in argv else []
    if what == "heap":
        variants = {"kept": (True, shared), "returned": (False, shared)}
    else:
        key, values = what.split("=", 1)
        variants = {v: (True, [*shared, f"{key}={v}"]) for v in values.split(",")}
    found: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, given in variants.items():
            code = f"import sys; sys.path.insert(0, 'bench'); import step; step.measure(*{given!r})"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{what:>16}   wall s   user s   system s   page faults   (median of {ROUNDS} processes x {STEPS} steps)")
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name, (wall, user, system, faults) in medians.items():
        print(f"{name:>16} {wall:8.3f} {user:8.3f} {system:10.3f} {faults:13.0f}")
    first, *others = medians.values()
    print("wall, as a multiple of the first: " + ", ".join(f"{other[0] / first[0]:.3f}" for other in others))


if __name__ == "__main__":
    main(sys.argv[1:])
