"""``component_mlp``: per component a small MLP on the one number x . V[:, c] (SPEC 3, the SPD paper's).

The numbers of a site's components lie side by side in stacks [n, C * d_gate]: a component's layers are vectors, and an
optimizer that makes matrices orthogonal has nothing to do with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from decomp.config.schema import ComponentMlp as Config
from decomp.keys import key_of, normals, site_keys
from decomp.numerics import gelu, matmul
from decomp.placement import Axes, Leaf, resting_layout
from decomp.sites import Lane, SiteTable


@dataclass(frozen=True)
class ComponentMlp:
    """The CI function of ``cfg`` for ``table``; ``component_dims`` are the mesh axes of the copies of V and U."""

    cfg: Config
    table: SiteTable
    component_dims: Any
    ax: Axes
    layout: str
    on_ragged: str = "fallback"

    @property
    def captures(self) -> frozenset[str]:
        return frozenset({"site_inputs"})

    def leaves(self) -> dict[str, Any]:
        """Leaf of every parameter, by lane."""
        return {name: self._lane_leaves(lane) for name, lane in self.table.lanes.items()}

    def _lane_leaves(self, lane: Lane) -> dict[str, Leaf]:
        n = len(lane.sites)
        layout = resting_layout(self.layout, n, self.on_ragged, lane.name, self.ax.sizes)
        width = {"w_in": self.cfg.d_gate, "b_in": self.cfg.d_gate, "w_out": self.cfg.d_gate, "b_out": 1}
        return {k: Leaf((n, lane.C * w), ("stack", "C"), layout) for k, w in width.items()}

    def init(self, seed: int, dtype: Any) -> dict[str, Any]:
        """Biases 0; w_in N(0, 2), of fan-in 1 and gain sqrt 2; w_out N(0, 1/d_gate); by site name."""
        scale = {"w_in": math.sqrt(2.0), "w_out": 1 / math.sqrt(self.cfg.d_gate)}

        def one(lane: Lane, name: str, leaf: Leaf) -> Array:
            if name not in scale:
                return jnp.zeros(leaf.shape, dtype)
            keys = site_keys(key_of(seed, "init", "ci_fn", name), [s.name for s in lane.sites])
            draws = jax.vmap(lambda k: normals(k, (lane.C, self.cfg.d_gate), dtype))(keys)
            return draws.reshape(leaf.shape) * jnp.asarray(scale[name], dtype)

        leaves = self.leaves()
        return {n: {k: one(lane, k, leaves[n][k]) for k in leaves[n]} for n, lane in self.table.lanes.items()}

    def __call__(
        self, params: Any, dims: Any, taps: Mapping[str, Array], components: Any
    ) -> dict[str, Float[Array, "n B T C"]]:
        """Pre-activations by lane; their gradient reaches V."""
        return {n: self._lane(lane, params[n], taps, components) for n, lane in self.table.lanes.items()}

    def _lane(self, lane: Lane, params: Any, taps: Mapping[str, Array], components: Any) -> Float[Array, "n B T C"]:
        V, dims = components[lane.group]["V"], self.component_dims[lane.group]["V"]
        slots = [s.slot for s in lane.sites]
        V = V if slots == list(range(V.shape[0])) else V[np.array(slots)]

        def site(_: None, xs: Any) -> tuple[None, Array]:
            x, v, p = xs
            inner = matmul(self.ax.varying(x, ("tp",)), self.ax.over_node(v, dims))
            return None, gate(inner, p)

        return jax.lax.scan(site, None, (taps[f"site_inputs/{lane.name}"], V, params))[1]


def gate(inner: Float[Array, "*batch C"], p: Mapping[str, Array]) -> Float[Array, "*batch C"]:
    """sum_d w_out[c, d] gelu(w_in[c, d] inner[c] + b_in[c, d]) + b_out[c].

    Positions are the last axis of what lies between: hidden units are few, and XLA's CPU loops run over the last axis.
    """
    C = inner.shape[-1]
    w_in, b_in, w_out = (p[k].reshape(C, -1, 1) for k in ("w_in", "b_in", "w_out"))
    hidden = gelu(w_in * inner.reshape(-1, C).T[:, None] + b_in)
    out = jnp.sum(w_out * hidden, axis=1) + p["b_out"][:, None]
    return out.T.reshape(inner.shape)
