"""Where factors of other layouts lie: safetensors, an orbax tree, a PyTorch state dict. Only read, a tensor at a time.

What can be wrong with a file is found when it is opened, from headers alone.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from decomp.checkpoint import SAVE_ERRORS, item_leaves, read_leaf, short_reason
from decomp.config.errors import UserError
from decomp.target.pretrained import Tensors, read_header, read_index

Spec = tuple[tuple[int, ...], np.dtype]  # shape and dtype
TORCH = (".pth", ".pt", ".bin", ".ckpt")
_INDEX = ".safetensors.index.json"
_DAMAGE = (EOFError, LookupError, TypeError, AttributeError, pickle.UnpicklingError)
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Source(Protocol):
    """Named tensors. ``specs`` comes from headers; ``read`` holds nothing but the tensor it gives."""

    @property
    def layout(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def specs(self) -> Mapping[str, Spec]: ...
    def read(self, name: str) -> np.ndarray: ...


def fingerprint(path: Path) -> dict[str, list[int]]:
    """File -> [bytes, modification time in ns] of everything at ``path``: tells a source that has changed."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {p.relative_to(path.parent).as_posix(): [p.stat().st_size, p.stat().st_mtime_ns] for p in files}


def open_source(text: str) -> Source:
    """The source that a person names: a file, or a folder with one layout in it.

    Raises UserError for a path that is not there, is no known layout, or holds several.
    """
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise UserError(f"src={text}: no such file or folder")
    if path.is_file():
        return _open_file(path, text)
    found = _inside(path)
    if len(found) == 1:
        return _open_folder(found[0]) if found[0].is_dir() else _open_file(found[0], text)
    if found:
        names = ", ".join(str(p.relative_to(path)) for p in found[:6]) + (", ..." if len(found) > 6 else "")
        raise UserError(f"src={text}: holds several that could be meant ({names}): name one of them")
    raise UserError(
        f"src={text}: no layout is known there: give a safetensors file or its index, a PyTorch state dict "
        f"({' '.join(TORCH)}), an orbax tree (a folder with _METADATA), or a run folder of an older format"
    )


def _inside(folder: Path) -> list[Path]:
    """What a folder could mean: its index, else its files, else itself or the orbax trees below it."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    indices = [p for p in files if p.name.endswith(_INDEX)]
    tensors = indices or [p for p in files if p.suffix in (".safetensors", *TORCH)]
    if tensors or (folder / "_METADATA").is_file():
        return tensors or [folder]
    return [p.parent for depth in ("*", "*/*") for p in sorted(folder.glob(f"{depth}/_METADATA"))]


def _open_file(path: Path, text: str) -> Source:
    if path.name.endswith((".safetensors", _INDEX)):
        return SafetensorsSource(path)
    if path.suffix in TORCH:
        return TorchSource(path)
    raise UserError(f"src={text}: is none of *.safetensors, *{_INDEX}, {', '.join('*' + end for end in TORCH)}")


def _open_folder(path: Path) -> Source:
    return OrbaxSource(path)


class SafetensorsSource:
    """One file, or shards by their index."""

    layout = "safetensors"

    def __init__(self, path: Path):
        self.path = path if path.suffix == ".safetensors" else path.parent
        files = read_index(path) if path.name.endswith(_INDEX) else dict.fromkeys(read_header(path), path)
        headers = {file: read_header(file) for file in dict.fromkeys(files.values())}
        for name, file in files.items():
            if name not in headers[file]:
                raise UserError(f"{file}: lacks tensor {name}, which {path.name} places there; fetch the file again")
        self.specs = {name: _spec(file, name, *headers[file][name]) for name, file in files.items()}
        self._tensors = Tensors(files)

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


def _spec(file: Path, name: str, shape: tuple[int, ...], dtype: str) -> Spec:
    if name.endswith((".V", ".U")) and dtype not in _DTYPES:
        raise UserError(f"{file}: {name} has dtype {dtype}; factors are one of {', '.join(_DTYPES)}")
    return shape, np.dtype(_DTYPES.get(dtype, np.void))


class OrbaxSource:
    """An orbax tree; a tensor's name is its path, joined by dots."""

    layout = "orbax"

    def __init__(self, path: Path):
        self.path = path
        with _readable(path, "an orbax tree"):
            leaves = item_leaves(path)
        self._paths = {".".join(keys): keys for keys in leaves}
        self.specs = {".".join(keys): spec for keys, spec in leaves.items()}

    def read(self, name: str) -> np.ndarray:
        with _readable(self.path, "an orbax tree"):
            return read_leaf(self.path, self._paths[name], *self.specs[name])


class TorchSource:
    """A PyTorch state dict, perhaps inside another dictionary. The file is mapped, not loaded, where it allows that."""

    layout = "torch"

    def __init__(self, path: Path):
        self.path = path
        self._torch = _import_torch(path)
        self._dtypes = {getattr(self._torch, np.dtype(d).name): np.dtype(d) for d in _DTYPES.values()}
        self._whole: Mapping[str, Any] | None = None
        self.specs = {name: self._spec(name, t) for name, t in self._load().items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._load()[name].detach().contiguous()
        if tensor.dtype is self._torch.bfloat16:  # which numpy does not have
            return tensor.view(self._torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
        return tensor.numpy().copy()

    def _load(self) -> Mapping[str, Any]:
        """Maps the file anew each time: pages that were read go with the mapping."""
        if self._whole is not None:
            return self._whole
        with _readable(self.path, "a PyTorch state dict of tensors alone"):
            try:
                return dict(_tensors(self._torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)))
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
            self._whole = dict(_tensors(self._torch.load(self.path, map_location="cpu", weights_only=True)))
        return self._whole

    def _spec(self, name: str, tensor: Any) -> Spec:
        if name.endswith((".V", ".U")) and tensor.dtype not in self._dtypes:
            known = ", ".join(str(d) for d in self._dtypes)
            raise UserError(f"{self.path}: {name} has dtype {tensor.dtype}; factors are one of {known}")
        return tuple(tensor.shape), self._dtypes.get(tensor.dtype, np.dtype(np.void))


def _import_torch(path: Path) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise UserError(
            f"src={path}: a PyTorch file is read with torch, which is not installed: pip install torch (its CPU build "
            "will do), or save the state dict as safetensors"
        ) from None


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Name -> tensor of a state dict, with those around it (``{"model": state_dict, "step": 3}``)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}.{key}" if path else str(key))
    elif hasattr(value, "dtype") and hasattr(value, "detach"):
        yield path, value


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """Whatever a library raises for a damaged file, in one line."""
    try:
        yield
    except (*SAVE_ERRORS, *_DAMAGE) as error:
        raise UserError(f"src={path}: cannot be read as {what} ({short_reason(error)})") from None
