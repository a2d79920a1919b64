"""Where every array rests and every collective by name (SPEC D2-D6).

A leaf declares one semantic axis per dimension (``stack``, ``d_in``, ``C``, ...). A layout table maps each semantic
axis to an ordered tuple of mesh axes. Mesh axes of size 1 are stripped everywhere: they would emit trivial collectives
and make values varying for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from decomp import aligned
from decomp.config.errors import UserError
from decomp.mesh import DATA_AXES

Dims = tuple[tuple[str, ...], ...]

# semantic axis -> mesh axes, per layout. fsdp major in zero1: the other order costs a permute per gather.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "owner": {"stack": ("replicate",), "d_in": ("fsdp",), "d_out": ("fsdp",), "C": ("tp",), "tp": ("tp",)},
    "zero1": {"d_in": ("fsdp", "replicate"), "d_out": ("fsdp", "replicate"), "C": ("tp",), "tp": ("tp",)},
    "replicated": {},
    # the frozen target: whole in every node, split inside it
    "node": {"d_in": ("fsdp",), "d_out": ("tp",), "d_model": ("fsdp",)},
    # activations, sources and averages
    "batch": {"batch": DATA_AXES, "C": ("tp",)},
}


@dataclass(frozen=True)
class Leaf:
    """Shape and semantic axes of one array, and the layout it rests in."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    layout: str

    def dims(self, sizes: Mapping[str, int]) -> Dims:
        """Mesh axes per dimension, size-1 axes stripped."""
        table = TABLE[self.layout]
        return tuple(tuple(m for m in table.get(axis, ()) if sizes[m] > 1) if axis else () for axis in self.axes)

    def ways(self, sizes: Mapping[str, int]) -> int:
        """Devices that the array is split over."""
        return math.prod(sizes[m] for names in self.dims(sizes) for m in names)


# ---------------------------------------------------------------- waypoints: where an array passes through in a step
def copied(dims: Dims) -> Dims:
    """A compute copy: whole over ``replicate``, inside the node as it rests (SPEC D6)."""
    return tuple(tuple(m for m in names if m != "replicate") for names in dims)


def trades(dims: Dims) -> list[tuple[str, int]]:
    """(mesh axis, dim) in the order in which Newton-Schulz trades split matrix dims for a split stack (SPEC T5)."""
    return [(name, dim) for dim in (1, 2) for name in reversed(dims[dim])]


def whole_matrices(dims: Dims) -> Dims:
    """Newton-Schulz: whole matrices, the stack split over all that the array is split over."""
    return (*dims[0], *(name for name, _ in trades(dims))), (), ()


def spec(dims: Dims) -> PartitionSpec:
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in dims))


@dataclass(frozen=True)
class Axes:
    """The collectives of one mesh, each a no-op on axes of size 1. For use inside ``shard_map``."""

    sizes: Mapping[str, int]

    @classmethod
    def of(cls, mesh: Mesh) -> Axes:
        return cls(dict(mesh.shape))

    def live(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(n for n in names if self.sizes[n] > 1)

    def size(self, *names: str) -> int:
        return math.prod(self.sizes[n] for n in names)

    def index(self, names: Sequence[str]) -> Array | int:
        """Row-major position of this device along ``names``."""
        names = self.live(names)
        return lax.axis_index(names) if names else 0

    def all_gather(self, x: Array, names: Sequence[str], dim: int) -> Array:
        names = self.live(names)
        return lax.all_gather(x, names, axis=dim, tiled=True) if names else x

    def gather_weights(self, x: Array, names: Sequence[str], dim: int) -> Array:
        """``all_gather``, of blocks laid side by side in front and then moved to ``dim``.

        Gathered along an inner dim, XLA's GPU compiler would turn the whole stack that ``x`` is a row of around first,
        outside the layer scan, and hold both: for llama8b_full more than 4 GiB per device.
        """
        names = self.live(names)
        if not names or dim == 0:
            return self.all_gather(x, names, dim)
        blocks = jnp.moveaxis(lax.all_gather(x, names, axis=0), 0, dim)
        return blocks.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def psum(self, x: Any, names: Sequence[str]) -> Any:
        names = self.live(names)
        return lax.psum(x, names) if names else x

    def psum_scatter(self, x: Array, names: Sequence[str], dim: int) -> Array:
        names = self.live(names)
        return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if names else x

    def join_columns(self, x: Array, names: Sequence[str] = ("tp",)) -> Array:
        """Whole last dim from column shards, as a sum: its result is the same on every device, and typed so."""
        n = self.size(*names)
        if n == 1:
            return x
        return self.psum(self.place_columns(x, names), names)

    def place_columns(self, x: Array, names: Sequence[str] = ("tp",)) -> Array:
        """A column shard in its place of a whole last dim of zeros."""
        n, width = self.size(*names), x.shape[-1]
        if n == 1:
            return x
        whole = self.varying(jnp.zeros(x.shape[:-1] + (n * width,), x.dtype), tuple(varying_axes(x)))
        return lax.dynamic_update_slice_in_dim(whole, x, self.index(names) * width, x.ndim - 1)

    def varying(self, x: Any, names: Sequence[str]) -> Any:
        """Marks values as differing over ``names``: where their cotangents are summed, once."""
        names = self.live(names)
        return jax.tree.map(lambda a: _pvary(a, names), x) if names else x

    def zeros_like(self, x: Any, dtype: Any = None) -> Array:
        """Zeros that are typed as varying over the axes ``x`` varies over; of ``x`` only its type is read."""
        return self.varying(jnp.zeros(x.shape, dtype or x.dtype), tuple(varying_axes(x)))

    def shard(self, x: Array, names: Sequence[str], dim: int) -> Array:
        """This device's block of a whole array along ``dim``."""
        n = self.size(*names)
        if n == 1:
            return x
        width = x.shape[dim] // n
        return lax.dynamic_slice_in_dim(x, self.index(names) * width, width, dim)

    def over_replicate(self, x: Array, dims: Dims) -> Array:
        """A resting block made whole over ``replicate``, still split inside the node (SPEC D6)."""
        for dim, names in enumerate(dims):
            if "replicate" in names:
                x = self.all_gather(x, ("replicate",), dim)
        return x

    def over_node(self, x: Array, dims: Dims, *, lead: int = 1) -> Array:
        """One row of a compute copy made whole over ``fsdp``; ``lead`` leading dims of ``dims`` are gone from ``x``."""
        for dim, names in enumerate(dims[lead:]):
            if "fsdp" in names:
                x = self.gather_weights(x, ("fsdp",), dim)
        return x


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which an array, or its abstract value, is typed as varying inside ``shard_map``."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).mat
    return kind.varying if kind is not None else frozenset()


def _pvary(x: Array, names: tuple[str, ...]) -> Array:
    missing = tuple(n for n in names if n not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def resting_layout(layout: str, length: int, on_ragged: str, name: str, sizes: Mapping[str, int]) -> str:
    """``owner`` where the stack tiles ``replicate``, else the fallback inside the matrix (SPEC D3)."""
    if layout != "owner" or length % sizes["replicate"] == 0:
        return layout
    if on_ragged == "error":
        raise UserError(
            f"placement.on_ragged=error: stack {name} of {length} does not tile replicate={sizes['replicate']}; "
            "use placement.on_ragged=fallback or a mesh whose replicate divides it"
        )
    return "zero1"


def check_divides(name: str, leaf: Leaf, sizes: Mapping[str, int]) -> None:
    """Raises UserError naming the first dimension that its mesh axes do not divide."""
    for size, axis, names in zip(leaf.shape, leaf.axes, leaf.dims(sizes), strict=True):
        ways = math.prod(sizes[n] for n in names)
        if size % ways:
            raise UserError(
                f"{name}: {axis}={size} does not divide over {' x '.join(names)} = {ways} devices; "
                "use placement=replicated, or a mesh that divides it"
            )


def sharding(mesh: Mesh, leaf: Leaf) -> NamedSharding:
    return NamedSharding(mesh, spec(leaf.dims(dict(mesh.shape))))


def is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def tree_specs(tree: Any, sizes: Mapping[str, int]) -> Any:
    """PartitionSpecs of a tree of ``Leaf``."""
    return jax.tree.map(lambda leaf: spec(leaf.dims(sizes)), tree, is_leaf=is_leaf)


def tree_dims(tree: Any, sizes: Mapping[str, int]) -> Any:
    return jax.tree.map(lambda leaf: leaf.dims(sizes), tree, is_leaf=is_leaf)


def tree_shardings(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: sharding(mesh, leaf), tree, is_leaf=is_leaf)


def report(tree: Any, sizes: Mapping[str, int], waypoints: Mapping[str, Mapping[str, Dims]]) -> str:
    """The placement table: leaf, shape, layout, mesh axes per dimension, share of its bytes on each device; and the
    mesh axes of each of the ``waypoints`` by leaf."""
    rows = [("leaf", "shape", "layout", "mesh axes", "share", *waypoints)]
    seen: set[int] = set()  # a moment's Leaf is its parameter's own object: the table says so once, below
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if id(leaf) in seen and leaf.shape:
            continue
        seen.add(id(leaf))
        name, shape = path_name(path), "x".join(map(str, leaf.shape)) or "scalar"
        passes = (_axes(w[name]) if name in w else "" for w in waypoints.values())
        rows.append((name, shape, leaf.layout, _axes(leaf.dims(sizes)), f"1/{leaf.ways(sizes)}", *passes))
    note = "moments of optimizers and sources rest as their parameters and sources do"
    return "\n".join([*aligned.lines(rows), note])


def _axes(dims: Dims) -> str:
    return " ".join("+".join(d) if d else "-" for d in dims) or "-"


def audit(tree: Any, arrays: Any, sizes: Mapping[str, int]) -> None:
    """Raises RuntimeError for the first array whose bytes per device are not what its Leaf declares."""
    declared = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    for (path, leaf), array in zip(declared, jax.tree.leaves(arrays), strict=True):
        expected = array.nbytes // leaf.ways(sizes)
        found = {s.data.nbytes for s in array.addressable_shards}
        if found != {expected} or array.shape != leaf.shape:
            raise RuntimeError(
                f"{path_name(path)}: {array.shape} holds {sorted(found)} bytes per device, "
                f"the placement table says {expected}"
            )


def path_name(path: Sequence[Any]) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
