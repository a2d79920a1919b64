"""decomp.exchange.names: from tensor names and shapes to a ``sites`` config (SPEC F6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange_source import PLAIN, factors

from decomp import sites as st
from decomp.config.errors import UserError
from decomp.exchange import names

MATRICES = PLAIN.matrices()
SITE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "spelled",
    [
        "model.layers.1.mlp.up_proj",
        "components.model.layers.1.mlp.up_proj",
        "components.model-layers-1-mlp-up_proj",
        "_components.model-layers-1-mlp-up_proj",
        "model._components.model-layers-1-mlp-up_proj",
        "components.model/layers/1/mlp/up_proj",
        "components.h-1-mlp-up_proj",
        "components.transformer.h.1.mlp.up_proj",
        "state.params.components.layers.1.mlp.up_proj",
    ],
)
def test_spellings_of_a_site(spelled: str) -> None:
    found = names.factors_of([f"{spelled}.V", f"{spelled}.U", "target_model.wte.weight"], MATRICES, "x")
    assert found == {(SITE, "V"): f"{spelled}.V", (SITE, "U"): f"{spelled}.U"}


def test_the_short_form_of_attention() -> None:
    found = names.factors_of(["components.h-2-attn-q_proj.V", "components.h-2-attn-q_proj.U"], MATRICES, "x")
    assert {site for site, _ in found} == {"model.layers.2.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (["lm_head.weight"], "src=x: holds no factors"),
        ([f"{SITE}.V"], f"src=x: {SITE}: has no U"),
        ([f"{SITE}.U"], f"src=x: {SITE}: has no V"),
        (["components.model-layers-1-mlp-upproj.V"], f"no matrix of the target; a name there is {SITE}"),
        (["components.h-3-mlp-up_proj.V"], "components.h-3-mlp-up_proj.V: h-3-mlp-up_proj is no matrix of the target"),
        (["components.wte.V", "components.wte.U"], "wte is no matrix of the target"),
        ([f"{SITE}.V", "components.h-1-mlp-up_proj.V", f"{SITE}.U"], f"is {SITE}.V once more"),
    ],
)
def test_names_that_do_not_fit_are_named(tensors: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        names.factors_of(tensors, MATRICES, "x")
    assert told in str(error.value)
    assert all(line.startswith("src=x: ") for line in str(error.value).splitlines())


def test_many_mistakes_are_counted() -> None:
    with pytest.raises(UserError, match=r"and 4 more") as error:
        names.factors_of([f"components.other{i}.V" for i in range(9)], MATRICES, "x")
    assert len(str(error.value).splitlines()) == 6


def shapes(**changes: Any) -> dict[names.Factor, tuple[int, ...]]:
    out = {(n[:-2], n[-1]): x.shape for n, x in factors().items()}
    return out | {(SITE, factor): shape for factor, shape in changes.items()}


def test_components_from_shapes() -> None:
    C = names.components_of(shapes(), MATRICES, "x")
    assert C[SITE] == 10 and C["model.layers.2.self_attn.k_proj"] == 6 and len(C) == 6


@pytest.mark.parametrize(
    "changes", [{"V": (9, 10)}, {"U": (10, 13)}, {"V": (10, 8)}, {"U": (11, 12)}, {"V": (2, 8, 10)}, {"V": ()}]
)
def test_a_shape_of_another_target_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"the target's matrix needs \[8, C\], \[C, 12\]$") as error:
        names.components_of(shapes(**changes), MATRICES, "x")
    assert str(error.value).startswith(f"src=x: {SITE}: has V ")


def test_the_sites_config_says_the_selection() -> None:
    C = names.components_of(shapes(), MATRICES, "x")
    cfg = names.sites_config(C, MATRICES, "x")
    assert cfg.layers == (1, 2) and cfg.kinds == ("k_proj", "up_proj", "down_proj")
    assert {s.name: s.C for s in st.select(MATRICES, cfg).sites} == C


def test_everything_is_said_shortly() -> None:
    cfg = names.sites_config({m.name: 4 for m in MATRICES}, MATRICES, "x")
    assert cfg.layers == "all" and cfg.kinds == "all" and set(cfg.C.values()) == {4}


def test_a_selection_that_is_no_product_is_refused() -> None:
    C = names.components_of(shapes(), MATRICES, "x")
    del C["model.layers.2.mlp.up_proj"]
    with pytest.raises(UserError, match=r"layers x kinds, and model.layers.2.mlp.up_proj is not there.*\(1 such\)"):
        names.sites_config(C, MATRICES, "x")


def test_C_that_differs_between_layers_is_refused_with_a_way_on() -> None:
    C = names.components_of(shapes(), MATRICES, "x") | {"model.layers.2.mlp.up_proj": 12}
    with pytest.raises(UserError, match=r"C of up_proj is 10 in layer 1 and 12 in layer 2.*pad V and U"):
        names.sites_config(C, MATRICES, "x")


def test_padding_changes_no_output() -> None:
    """The way on that the message names."""
    rng = np.random.default_rng(0)
    V, U, x = rng.standard_normal((4, 3)), rng.standard_normal((3, 5)), rng.standard_normal((2, 4))
    wide = np.pad(V, ((0, 0), (0, 2))), np.pad(U, ((0, 2), (0, 0)))
    np.testing.assert_allclose(x @ wide[0] @ wide[1], x @ V @ U)
