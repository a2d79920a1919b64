"""Where arrays rest (SPEC D2 to D4), what is said about it, and that it changes no number (SPEC D8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from tiny import SHAPE

from decomp import build, components
from decomp import placement as pl
from decomp.config.errors import UserError
from decomp.config.schema import Placement
from decomp.mesh import AXES
from decomp.placement import Leaf
from decomp.state import ONE_DEVICE

SIZES = {"replicate": 4, "fsdp": 8, "tp": 2}
V = Leaf((8, 64, 32), ("stack", "d_in", "C"), "owner")
U = Leaf((8, 32, 64), ("stack", "C", "d_out"), "owner")


def specs(layout: str, sizes: dict[str, int] = SIZES) -> tuple[P, P]:
    v, u = (pl.spec(Leaf(leaf.shape, leaf.axes, layout).dims(sizes)) for leaf in (V, U))
    return v, u


def test_layouts():
    """D2, D4: owner splits the stack over replicate; zero1 splits inside the matrix, fsdp major; replicated nothing."""
    assert specs("owner") == (P("replicate", "fsdp", "tp"), P("replicate", "tp", "fsdp"))
    assert specs("zero1") == (P(None, ("fsdp", "replicate"), "tp"), P(None, "tp", ("fsdp", "replicate")))
    assert specs("replicated") == (P(None, None, None),) * 2


def test_every_device_holds_its_share():
    """D2: 1/N of the bytes on each device under owner and zero1."""
    for layout in ("owner", "zero1"):
        for leaf in (V, U):
            dims = Leaf(leaf.shape, leaf.axes, layout).dims(SIZES)
            assert math.prod(SIZES[n] for names in dims for n in names) == math.prod(SIZES.values())


def test_axes_of_one_device_are_stripped():
    assert specs("owner", {"replicate": 4, "fsdp": 1, "tp": 1}) == (P("replicate", None, None),) * 2
    assert specs("owner", {"replicate": 1, "fsdp": 1, "tp": 1}) == (P(None, None, None),) * 2


@pytest.mark.parametrize("sizes", [{"replicate": 1, "fsdp": 8, "tp": 2}, {"replicate": 1, "fsdp": 4, "tp": 1}])
def test_owner_and_zero1_coincide_with_one_node_group(sizes: dict[str, int]):
    """D2."""
    assert specs("owner", sizes) == specs("zero1", sizes)


# ---------------------------------------------------------------- D3
TABLE = build.site_table(tiny.config(sites={"layers": [0, 1, 2], "C_per_rank": 1.0}), SHAPE)


def test_a_ragged_stack_falls_back_inside_the_matrix():
    """D3: on replicate=2, 6 q and o projections tile; 3 down projections do not and rest as zero1 does."""
    found = components.leaves(TABLE, Placement(), {"replicate": 2, "fsdp": 2, "tp": 1})
    layouts = {g: {leaf.layout for leaf in pair.values()} for g, pair in found.items()}
    assert layouts == {
        "16x16_C16": {"owner"}, "16x8_C8": {"owner"}, "16x32_C16": {"owner"}, "32x16_C16": {"zero1"},
    }  # fmt: skip
    every = components.leaves(TABLE, Placement(), {"replicate": 4, "fsdp": 2, "tp": 1})
    assert {leaf.layout for pair in every.values() for leaf in pair.values()} == {"zero1"}


def test_a_ragged_stack_is_refused_on_request():
    sizes = {"replicate": 2, "fsdp": 2, "tp": 1}
    with pytest.raises(
        UserError, match=r"placement\.on_ragged=error: stack 32x16_C16 of 3 does not tile replicate=2; use"
    ):
        components.leaves(TABLE, Placement(on_ragged="error"), sizes)
    assert components.leaves(TABLE, Placement(on_ragged="error"), {**sizes, "replicate": 3, "fsdp": 1})
    assert components.leaves(TABLE, Placement(on_ragged="error", components="zero1"), sizes)


def test_a_dimension_that_does_not_divide_is_one_clear_line():
    """D3: names the array, the dimension and the way out."""
    with pytest.raises(UserError) as error:
        components.leaves(TABLE, Placement(), {"replicate": 1, "fsdp": 5, "tp": 1})
    (line,) = str(error.value).splitlines()
    assert line.startswith(
        "components 16x16_C16 V: d_in=16 does not divide over fsdp = 5 devices; use placement=replicated"
    )
    with pytest.raises(UserError, match=r"d_in=12 does not divide over fsdp x replicate = 8 devices"):
        pl.check_divides("x", Leaf((1, 12), ("stack", "d_in"), "zero1"), {"replicate": 4, "fsdp": 2, "tp": 1})
    components.leaves(TABLE, Placement(components="replicated"), {"replicate": 1, "fsdp": 5, "tp": 1})


# ---------------------------------------------------------------- report and audit
def test_report_names_leaf_shape_layout_axes_and_share():
    """A moment's leaf is its parameter's own and not listed again; a scalar is."""
    scalar, rests = Leaf((), (), "batch"), V.dims(SIZES)
    tree = {"a": {"V": V, "count": scalar}, "moments": {"V": V, "count": scalar}}
    waypoints = {"copy": {"a/V": pl.copied(rests)}, "whole": {"a/V": pl.whole_matrices(rests)}}
    *lines, note = pl.report(tree, SIZES, waypoints).splitlines()
    assert [line.split() for line in lines] == [
        ["leaf", "shape", "layout", "mesh", "axes", "share", "copy", "whole"],
        ["a/V", "8x64x32", "owner"]
        + ["replicate", "fsdp", "tp", "1/64"]
        + ["-", "fsdp", "tp"]
        + ["replicate+fsdp+tp", "-", "-"],
        ["a/count", "scalar", "batch", "-", "1/1"],
        ["moments/count", "scalar", "batch", "-", "1/1"],
    ]
    assert "moments" in note


def test_a_fallback_groups_matrices_meet_over_every_axis():
    """D3: what owner groups trade inside the node, a fallback group trades over ``replicate`` too."""
    rests = Leaf((3, 64, 32), ("stack", "d_in", "C"), "zero1").dims(SIZES)
    assert pl.trades(rests) == [("replicate", 1), ("fsdp", 1), ("tp", 2)]
    assert pl.whole_matrices(rests) == (("replicate", "fsdp", "tp"), (), ())
    assert pl.copied(rests) == ((), ("fsdp",), ("tp",))


def test_audit_catches_an_array_that_is_not_where_it_should_be():
    declared = {"w": Leaf((4, 6), ("stack", "d_in"), "owner")}
    pl.audit(declared, {"w": jnp.zeros((4, 6))}, ONE_DEVICE.sizes)
    with pytest.raises(RuntimeError, match=r"w: \(4, 6\) holds \[96\] bytes per device, the placement table says 48"):
        pl.audit(declared, {"w": jnp.zeros((4, 6))}, {"replicate": 2, "fsdp": 1, "tp": 1})
    with pytest.raises(RuntimeError, match=r"w: \(6, 4\)"):
        pl.audit(declared, {"w": jnp.zeros((6, 4))}, ONE_DEVICE.sizes)


def test_a_tree_is_placed_as_its_leaves_say():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    shardings: Any = pl.tree_shardings(mesh, {"v": V})
    assert shardings["v"].spec == P(None, None, None)


# ---------------------------------------------------------------- D8
INVARIANCE = """
import sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, tiny
from decomp import placement as pl

SITES = {"layers": [0, 1, 2], "kinds": ["q_proj", "o_proj", "down_proj"], "C": {"down_proj": 24}, "C_per_rank": 1.0}
CASES = [  # mesh, placement of components, layouts that its groups get: 6 attention matrices, 3 of the MLP
    ((1, 1, 1), "owner", {"owner"}),
    ((2, 2, 1), "owner", {"owner", "zero1"}),
    ((4, 2, 1), "owner", {"zero1"}),
    ((2, 2, 2), "zero1", {"zero1"}),
    ((2, 1, 2), "owner", {"owner", "zero1"}),
    ((2, 2, 1), "replicated", {"replicated"}),
]

def trajectory(mesh, components, layouts):
    placement = {"components": components, "ci_fn": "replicated" if components == "replicated" else "owner"}
    step, target = tiny.make(tiny.config(precision__kind="fp64", sites=SITES, placement=placement), mesh)
    assert {leaf.layout for g in step.leaves.decomposition["components"].values() for leaf in g.values()} == layouts
    s = tiny.init(step)
    pl.audit(step.leaves, s, dict(step.mesh.shape))
    s, logs = tiny.run(step, target, s, 3)
    pl.audit(step.leaves, s, dict(step.mesh.shape))
    return logs, [np.asarray(x) for x in jax.tree.leaves(s.decomposition)]

(logs, params), *others = (trajectory(*case) for case in CASES)
for case, (found, stacks) in zip(CASES[1:], others, strict=True):
    for a, b in zip(found, logs, strict=True):
        for name in b:
            if name.startswith(("loss/", "l0/", "grad_norm/")):
                assert abs(a[name] - b[name]) <= 1e-9 * abs(b[name]) + 1e-15, (case, name, a[name], b[name])
    for a, b in zip(stacks, params, strict=True):
        assert np.linalg.norm(a - b) <= 1e-9 * np.linalg.norm(b) + 1e-15, case
print("same on", len(others), "meshes")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mesh_and_placement_change_no_number(simulated: Callable[..., str]):
    """D8 and case 12: three steps in float64, losses and parameters to 1e-9; ragged groups fall back (D3)."""
    code = INVARIANCE.replace("{tests!r}", repr(str(Path(__file__).parent)))
    assert "same on 5 meshes" in simulated(code, devices=8, timeout=840)
