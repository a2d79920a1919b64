"""Optimizer groups: every trainable leaf in exactly one, AdamW or stacked Muon (SPEC T1-T5).

State is plain: per group a dict of moments by leaf name. Adam's arithmetic is optax's; Muon is our own because whole
matrices have to meet inside their owner's node, which no library does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from decomp import aligned, schedule
from decomp.config.errors import UserError
from decomp.config.schema import AdamW, Muon
from decomp.placement import Axes, Dims, Leaf, spec, trades

Named = dict[str, Array]
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al., 2024


# ---------------------------------------------------------------- the group table (SPEC T3)
def group_of(cfg: Mapping[str, AdamW | Muon], name: str, aliases: Sequence[str] = ()) -> str:
    """The one group whose pattern matches ``name``. Raises UserError where none or several do."""
    names = (name, *aliases)
    found = [g for g, c in cfg.items() if any(_matches(p, n) for p in c.match for n in names)]
    if len(found) != 1:
        what = f"groups {' and '.join(found)} both match" if found else "no optimizer group matches"
        raise UserError(f"optim: {what} {name!r}; every trainable leaf needs exactly one (see optim.<group>.match)")
    return found[0]


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def group_of_sites(cfg: Mapping[str, AdamW | Muon], names: Sequence[str]) -> dict[str, str]:
    """Site name -> optimizer group; a pattern may name the site with or without ``components.``."""
    return {n: group_of(cfg, f"components.{n}", (n,)) for n in names}


@dataclass(frozen=True)
class GroupTable:
    """Which leaf belongs to which group, and whether it is a matrix stack or a vector stack."""

    cfg: Mapping[str, AdamW | Muon]
    group: Mapping[str, str]  # leaf name -> group name
    leaves: Mapping[str, Leaf]

    def names(self, group: str) -> list[str]:
        return [n for n, g in self.group.items() if g == group]

    def rule(self, name: str) -> str:
        """``muon`` for a 3-D stack of a Muon group, else ``adam``: the last two axes are the matrix (SPEC T5)."""
        is_muon = isinstance(self.cfg[self.group[name]], Muon) and len(self.leaves[name].shape) == 3
        return "muon" if is_muon else "adam"

    def report(self) -> str:
        """The table printed at start and written to optimizer_groups.txt."""
        rows = [("group", "kind", "rule", "leaf", "shape")]
        rows += [
            (g, self.cfg[g].kind, self.rule(n), n, "x".join(map(str, self.leaves[n].shape)))
            for g in self.cfg
            for n in self.names(g)
        ]
        return "\n".join(aligned.lines(rows))


def group_table(
    cfg: Mapping[str, AdamW | Muon], leaves: Mapping[str, Leaf], stack_optim: Mapping[str, str]
) -> GroupTable:
    """Assigns every leaf. ``stack_optim`` is the group of each components stack, from its sites.

    Raises UserError for an unmatched leaf, one matched twice, or an empty group.
    """
    assigned = {}
    for name in leaves:
        top, _, rest = name.partition("/")
        assigned[name] = (
            stack_optim[rest.partition("/")[0]] if top == "components" else group_of(cfg, name.replace("/", "."))
        )
    for g in cfg:
        if g not in assigned.values():
            raise UserError(
                f"optim.{g}.match={list(cfg[g].match)}: no trainable leaf matches; remove the group or mend it"
            )
    return GroupTable(cfg, assigned, leaves)


# ---------------------------------------------------------------- state and update
def init(table: GroupTable, params: Named) -> dict[str, Any]:
    """Moments per group: ``adam`` {count, mu, nu} and ``muon`` {count, mu} by leaf name."""
    out: dict[str, Any] = {}
    for g in table.cfg:
        zeros = lambda rule, g=g: {n: jnp.zeros_like(params[n]) for n in table.names(g) if table.rule(n) == rule}  # noqa: E731
        out[g] = {}
        if adam := zeros("adam"):
            out[g]["adam"] = {"count": jnp.zeros((), jnp.int32), "mu": adam, "nu": zeros("adam")}
        if muon := zeros("muon"):
            out[g]["muon"] = {"count": jnp.zeros((), jnp.int32), "mu": muon}
    return out


def state_leaves(table: GroupTable) -> dict[str, Any]:
    """Leaf of every moment: where its parameter rests."""
    out: dict[str, Any] = {}
    count = Leaf((), (), "batch")
    for g in table.cfg:
        own = lambda rule, g=g: {n: table.leaves[n] for n in table.names(g) if table.rule(n) == rule}  # noqa: E731
        out[g] = {}
        if adam := own("adam"):
            out[g]["adam"] = {"count": count, "mu": adam, "nu": adam}
        if muon := own("muon"):
            out[g]["muon"] = {"count": count, "mu": muon}
    return out


def clip(grads: Named, max_norm: float | None) -> tuple[Named, Float[Array, ""]]:
    """Scale by min(1, max_norm / (norm + 1e-6)) (SPEC T1). Returns the norm before clipping as well."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1, max_norm / (norm + 1e-6))
    return {n: g * scale for n, g in grads.items()}, norm


def update(
    table: GroupTable, mesh: Mesh, grads: Named, params: Named, state: dict[str, Any], step: Any, steps: int
) -> tuple[Named, dict[str, Any], dict[str, Array]]:
    """New parameters, new state, and per group the applied learning rate and the gradient norm before clipping."""
    new_params, new_state, logs = {}, {}, {}
    for g, cfg in table.cfg.items():
        own, logs[f"grad_norm/{g}"] = clip({n: grads[n] for n in table.names(g)}, cfg.clip)
        dtype = next(iter(own.values())).dtype
        lr = logs[f"lr/{g}"] = schedule.value(cfg.lr, step, steps, dtype)
        directions, new_state[g] = _directions(table, mesh, cfg, own, state[g])
        adam_lr = schedule.value(cfg.adam_lr, step, steps, dtype) if isinstance(cfg, Muon) else lr
        for n, d in directions.items():
            rate = lr if table.rule(n) == "muon" else adam_lr
            new_params[n] = params[n] - rate * (d + cfg.weight_decay * params[n])
    return {n: new_params[n] for n in params}, new_state, logs


def _directions(
    table: GroupTable, mesh: Mesh, cfg: AdamW | Muon, grads: Named, state: dict[str, Any]
) -> tuple[Named, dict[str, Any]]:
    out, new = {}, {}
    if "adam" in state:
        betas, eps = (cfg.betas, cfg.eps) if isinstance(cfg, AdamW) else ((0.9, 0.999), 1e-8)
        own = {n: g for n, g in grads.items() if table.rule(n) == "adam"}
        rule = optax.scale_by_adam(*betas, eps)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
            result: Any = rule.update(own, optax.ScaleByAdamState(**state["adam"]))
        directions, after = result
        out |= directions
        new["adam"] = {"count": after.count, "mu": after.mu, "nu": after.nu}
    if "muon" in state and isinstance(cfg, Muon):
        own = {n: g for n, g in grads.items() if table.rule(n) == "muon"}
        directions, new["muon"] = _muon(table, mesh, cfg, own, state["muon"])
        out |= directions
    return out, new


# ---------------------------------------------------------------- Muon (SPEC T5, D6)
def _muon(
    table: GroupTable, mesh: Mesh, cfg: Muon, grads: Named, state: dict[str, Any]
) -> tuple[Named, dict[str, Any]]:
    """Momentum with optax's bias correction, then orthogonalised matrices in their owner's node."""
    beta, count = cfg.momentum, state["count"] + 1
    mu = {n: beta * state["mu"][n] + (1 - beta) * g for n, g in grads.items()}
    t = count.astype(next(iter(grads.values())).dtype)
    power = lambda n: 1 - jnp.asarray(beta, t.dtype) ** n  # noqa: E731
    if cfg.nesterov:
        ahead = {n: beta * (mu[n] / power(t + 1)) + (1 - beta) * (g / power(t)) for n, g in grads.items()}
    else:
        ahead = {n: m / power(t) for n, m in mu.items()}
    out = {n: orthogonalize(mesh, table.leaves[n], cfg, x) * _muon_scale(cfg, x.shape) for n, x in ahead.items()}
    return out, {"count": count, "mu": mu}


def _muon_scale(cfg: Muon, shape: tuple[int, ...]) -> float:
    fan_in, fan_out = shape[-2:]
    return 0.2 * max(fan_in, fan_out) ** 0.5 if cfg.consistent_rms else max(1.0, fan_out / fan_in) ** 0.5


def orthogonalize(mesh: Mesh, leaf: Leaf, cfg: Muon, x: Float[Array, "g a b"]) -> Float[Array, "g a b"]:
    """Newton-Schulz on whole matrices: blocks meet by all_to_all inside the node, stacks never leave their owner."""
    ax = Axes.of(mesh)
    dims = leaf.dims(ax.sizes)

    def local(block: Array) -> Array:
        whole, back = _whole_matrices(ax, block.astype(cfg.ns_dtype), dims)
        return back(newton_schulz(whole, cfg.ns_steps)).astype(block.dtype)

    return jax.shard_map(local, mesh=mesh, in_specs=spec(dims), out_specs=spec(dims))(x)


def _whole_matrices(ax: Axes, x: Array, dims: Dims) -> tuple[Array, Callable[[Array], Array]]:
    """Trades split matrix dims for a split stack, padding it where it does not divide; and the way back."""
    undo: list[tuple[str, int, int]] = []
    for name, dim in trades(dims):
        k, n = x.shape[0], ax.sizes[name]
        x = jnp.pad(x, ((0, -k % n), (0, 0), (0, 0)))
        x = jax.lax.all_to_all(x, name, split_axis=0, concat_axis=dim, tiled=True)
        undo.append((name, dim, k))

    def back(y: Array) -> Array:
        for name, dim, k in reversed(undo):
            y = jax.lax.all_to_all(y, name, split_axis=dim, concat_axis=0, tiled=True)[:k]
        return y

    return x, back


def newton_schulz(x: Float[Array, "g a b"], steps: int) -> Float[Array, "g a b"]:
    """Quintic Newton-Schulz towards the orthogonal polar factor, batched over the stack (Jordan et al., 2024)."""
    a, b, c = NS_COEFFICIENTS
    flip = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if flip else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + jnp.asarray(1e-8, x.dtype))
    multiply = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def one(x: Array, _: None) -> tuple[Array, None]:
        gram = multiply(x, jnp.swapaxes(x, -1, -2))
        return a * x + multiply(b * gram + c * multiply(gram, gram), x), None

    x = jax.lax.scan(one, x, None, length=steps)[0]
    return jnp.swapaxes(x, -1, -2) if flip else x


# ---------------------------------------------------------------- names
def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """A nested dict as {"a/b/c": leaf}."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {"/".join(k.key for k in path): x for path, x in found}


def unflatten(like: Any, named: Mapping[str, Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The inverse of ``flatten``, in the structure of ``like``."""
    return jax.tree_util.tree_map_with_path(lambda p, _: named["/".join(k.key for k in p)], like, is_leaf=is_leaf)
