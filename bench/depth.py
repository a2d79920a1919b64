"""Whether a step's program grows with the target's depth: plan's program at several depths, compiled in one process.

python bench/depth.py 4,32 experiment=llama8b_full mesh=dp32 optim=muon    # depths, then overrides as for `decomp plan`

Nothing runs; the target's shape is cut to so many layers. Compared with the first depth: instructions of the optimised
program (loops counted once), seconds and CPU-seconds of tracing and compilation together. Two rounds, because machines
are noisy; CPU-seconds are less so.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace

ROUNDS = 2


def main(depths: list[int], overrides: list[str]) -> None:
    from decomp.config.compose import compose
    from decomp.plan import backend, device
    from decomp.verbs.meshes import shape_of

    cfg, compiler = compose(overrides), backend.choose("auto")
    shape = shape_of(cfg.mesh)
    backend.prepare_environment(compiler, math.prod(shape))
    import jax

    from decomp.build import known_shape, target_folder
    from decomp.plan.planner import Planner
    from decomp.plan.program import planned
    from decomp.target import pretrained

    target = known_shape(cfg.target) or pretrained.read_shape(target_folder(cfg.target))
    print(f"python bench/depth.py {','.join(map(str, depths))} {' '.join(overrides)}  # compiler: {compiler}")
    print(f"{'round':>5} {'layers':>6} {'instructions':>12} {'':>7} {'s':>8} {'':>7} {'CPU-s':>8} {'':>7}")
    for number in range(1, ROUNDS + 1):
        first: tuple[float, ...] = ()
        for depth in depths:
            planner = Planner(compiler, device.find("h200"), replace(target, n_layers=depth), lambda _: None)
            wall, cpu = time.perf_counter(), time.process_time()
            program = planner.plan(str(depth), planned(cfg), shape).program
            found = (float(program.n_instructions), time.perf_counter() - wall, time.process_time() - cpu)
            first = first or found
            ratios = [f"x {new / old:5.3f}" for new, old in zip(found, first, strict=True)]
            cells = f"{found[0]:12.0f} {ratios[0]} {found[1]:8.1f} {ratios[1]} {found[2]:8.1f} {ratios[2]}"
            print(f"{number:5} {depth:6} {cells}", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    if len(sys.argv) < 2 or not all(word.isdigit() and int(word) for word in sys.argv[1].split(",")):
        sys.exit("python bench/depth.py <depths, such as 4,32> [overrides]")
    main([int(word) for word in sys.argv[1].split(",")], sys.argv[2:])
