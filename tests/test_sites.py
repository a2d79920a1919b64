"""Selection, stack groups, slots and lanes (SPEC D1, D9, F1, F6)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import SHAPE

from decomp import sites as st
from decomp.config.errors import UserError
from decomp.config.schema import Sites

MATRICES = SHAPE.matrices()


def test_names_are_the_targets_own_tensor_paths() -> None:
    table = st.select(MATRICES, Sites(layers=(1,), kinds=("down_proj",)))
    assert [s.name for s in table.sites] == ["model.layers.1.mlp.down_proj"]


def test_slots_are_layer_major() -> None:
    table = st.select(MATRICES, Sites(C={"q_proj": 16, "o_proj": 16}))
    group = table.groups["16x16_C16"]
    ranks = [(s.matrix.layer, ["q_proj", "o_proj"].index(s.matrix.kind)) for s in group.sites]
    assert ranks == [(layer, kind) for layer in range(4) for kind in range(2)]
    assert all(s.slot == layer * 2 + kind for s, (layer, kind) in zip(group.sites, ranks, strict=True))


def test_groups_hold_equal_shapes_and_C_and_optimizer_group() -> None:
    chosen = Sites(kinds=("q_proj", "o_proj"), C={"q_proj": 8, "o_proj": 8})
    names = [m.name for m in MATRICES if m.kind in chosen.kinds]
    together = st.select(MATRICES, chosen)
    apart = st.select(MATRICES, chosen, {n: "a" if "q_proj" in n else "b" for n in names})
    assert len(together.groups) == 1
    assert sorted(apart.groups) == ["16x16_C8@a", "16x16_C8@b"]


SELECTIONS = [
    Sites(),
    Sites(layers=(0, 3)),
    Sites(layers=(1, 2), kinds=("v_proj", "up_proj", "down_proj")),
    Sites(layers=(2,), kinds="mlp"),
]


@pytest.mark.parametrize("chosen", SELECTIONS)
def test_every_site_is_read_back_through_its_run(chosen: Sites) -> None:
    """A stack filled with each site's own number gives that number in the run, layer and kind of the site."""
    table = st.select(MATRICES, chosen)
    number = {s.name: i for i, s in enumerate(table.sites)}
    groups = {g: jnp.array([number[s.name] for s in x.sites]) for g, x in table.groups.items()}
    lanes = {n: jnp.array([number[s.name] for s in x.sites]) for n, x in table.lanes.items()}
    seen = []
    for run in table.runs:
        for kind, first in run.first.items():
            by_group = st.group_rows(run, first.group, groups[first.group])
            by_lane = st.lane_rows(run, first.row, lanes[first.lane])
            for i in range(run.length):
                name = st_name(table, run.start + i, kind)
                assert int(by_group[i, first.slot - run.group_starts[first.group]]) == number[name]
                assert int(by_lane[i]) == number[name]
                seen.append(name)
    assert sorted(seen) == sorted(number)


def st_name(table: st.SiteTable, layer: int, kind: str) -> str:
    return next(s.name for s in table.sites if s.matrix.layer == layer and s.matrix.kind == kind)


def test_runs_cover_all_layers_once_and_masked_runs_begin_at_the_first_chosen() -> None:
    table = st.select(MATRICES, Sites(layers=(1, 3)))
    assert [(r.start, r.length, bool(r.first)) for r in table.runs] == [
        (0, 1, False), (1, 1, True), (2, 1, False), (3, 1, True),
    ]  # fmt: skip
    assert [r.start for r in table.masked_runs] == [1, 2, 3]
    assert len(st.select(MATRICES, Sites()).runs) == 1


def test_one_kind_may_have_different_C_in_different_layers() -> None:
    names = [m.name for m in MATRICES if m.kind == "q_proj"]
    table = st.from_sites(MATRICES, dict(zip(names, (8, 8, 16, 8), strict=True)))
    assert sorted(table.lanes) == ["q_proj@16x16_C16", "q_proj@16x16_C8"]
    assert [r.length for r in table.runs] == [2, 1, 1]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        (Sites(layers=(18,)), "sites.layers=18: the target has layers 0 to 3"),
        (Sites(kinds=("qproj",)), "sites.kinds=qproj"),
        (Sites(C={"c_fc": 8}), "sites.C.c_fc"),
        (Sites(layers=()), "no matrix is chosen"),
    ],
)
def test_mistakes_name_the_value_and_what_there_is(chosen: Sites, part: str) -> None:
    with pytest.raises(UserError, match=part):
        st.select(MATRICES, chosen)


def test_unknown_site_and_C_below_one_are_refused() -> None:
    with pytest.raises(UserError, match="no matrix of the target"):
        st.from_sites(MATRICES, {"model.layers.9.mlp.down_proj": 4})
    with pytest.raises(UserError, match="at least 1"):
        st.from_sites(MATRICES, {MATRICES[0].name: 0})


def test_table_is_stored_as_plain_values() -> None:
    table = st.select(MATRICES, Sites(layers=(0,), kinds=("k_proj",)))
    assert table.to_json()["model.layers.0.self_attn.k_proj"]["slot"] == 0
    assert np.all([isinstance(v, int | str) for row in table.to_json().values() for v in row.values()])
