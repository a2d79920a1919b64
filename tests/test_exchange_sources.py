"""decomp.exchange.sources: tensors of other layouts, read one at a time and never touched."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_source import factors, frozen, orbax, safetensors, same, sharded, torch_names

from decomp.config.errors import UserError
from decomp.exchange.sources import Source, fingerprint, open_source

BF16: Any = ml_dtypes.bfloat16
SITE = "model.layers.1.mlp.up_proj"


def read_all(source: Source, prefix: str = "") -> dict[str, np.ndarray]:
    out = {name.removeprefix(prefix): source.read(name) for name in source.specs if name.endswith((".V", ".U"))}
    for name, x in out.items():
        assert source.specs[prefix + name] == (x.shape, x.dtype)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_safetensors(tmp_path: Path, dtype: Any) -> None:
    tensors = factors(dtype=dtype)
    for src in (safetensors(tmp_path / "a.safetensors", tensors), sharded(tmp_path / "s", tensors)):
        before = frozen(src)
        assert same(read_all(open_source(str(src))), tensors)
        assert frozen(src) == before


def test_an_orbax_tree_wherever_it_lies_below(tmp_path: Path) -> None:
    tensors = factors()
    src = orbax(tmp_path / "run" / "7" / "default", tensors)
    before = frozen(src)
    for path in (src, src.parent, src.parent.parent):
        source = open_source(str(path))
        assert same(read_all(source, "components."), tensors) and "step" in source.specs
    assert frozen(src) == before


def test_several_orbax_trees_are_listed(tmp_path: Path) -> None:
    for step in ("7", "9"):
        orbax(tmp_path / step / "default", factors((1,)))
    with pytest.raises(UserError, match=r"several that could be meant \(7/default, 9/default\): name one"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pytorch_state_dict(tmp_path: Path, dtype: str, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = torch_names(factors(dtype=kind))
    as_int = {name: torch.from_numpy(x.view(f"i{kind.itemsize}").copy()) for name, x in tensors.items()}
    state = {name: x.view(getattr(torch, dtype)) for name, x in as_int.items()}
    torch.save(state | {"n": 3}, tmp_path / "m.pth", _use_new_zipfile_serialization=zipped)
    before = frozen(tmp_path / "m.pth")
    source = open_source(str(tmp_path))
    assert source.layout == "torch"
    assert same(read_all(source), tensors)
    assert frozen(tmp_path / "m.pth") == before


def test_a_state_dict_inside_another_dictionary(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"components.a.V": torch.ones(2, 3)}, "step": 3}, tmp_path / "m.pt")
    assert list(open_source(str(tmp_path / "m.pt")).specs) == ["model.components.a.V"]


class Code:
    """What a pickle must not run."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_a_pickle_with_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.save({"components.a.V": Code()}, tmp_path / "m.pth")
    with pytest.raises(UserError, match="cannot be read as a PyTorch state dict of tensors alone") as error:
        open_source(str(tmp_path / "m.pth"))
    assert "\n" not in str(error.value) and not (tmp_path / "made-by-a-pickle").exists()


def test_without_torch_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pth").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="read with torch, which is not installed: pip install torch") as error:
        open_source(str(tmp_path / "m.pth"))
    assert "\n" not in str(error.value)


def test_torch_is_imported_for_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert open_source(str(safetensors(tmp_path / "a.safetensors", factors()))).layout == "safetensors"


def _truncated(path: Path) -> Path:
    safetensors(path / "a.safetensors", factors())
    os.truncate(path / "a.safetensors", 500)
    return path


def _without_a_shard(path: Path) -> Path:
    sharded(path / "s", factors())
    (path / "s" / "old-1.safetensors").unlink()
    return path / "s"


def _wrong_index(path: Path) -> Path:
    sharded(path / "s", factors())
    index = path / "s" / "old.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"other.V": "old-0.safetensors"}}))
    return path / "s"


def _integers(path: Path) -> Path:
    return safetensors(path / "a.safetensors", {f"{SITE}.V": np.ones((8, 2), np.int32)})


def _damaged_orbax(path: Path) -> Path:
    (orbax(path / "tree", factors()) / "_METADATA").write_text("{")
    return path / "tree"


def _no_zip(path: Path) -> Path:
    pytest.importorskip("torch")
    (path / "m.pth").write_bytes(b"no state dict")
    return path / "m.pth"


def _text(path: Path) -> Path:
    (path / "notes.txt").write_text("hello")
    return path / "notes.txt"


def _two_files(path: Path) -> Path:
    for name in "ab":
        safetensors(path / f"{name}.safetensors", factors())
    return path


BAD = {
    "no such": (lambda p: p / "nothing", "no such file or folder"),
    "an empty folder": (lambda p: p, "no layout is known there: give a safetensors file"),
    "a text": (_text, "is none of"),
    "two files": (_two_files, r"several that could be meant \(a.safetensors, b.safetensors\)"),
    "truncated": (_truncated, "truncated or damaged"),
    "a shard is gone": (_without_a_shard, "old-1.safetensors: missing"),
    "a wrong index": (_wrong_index, "lacks tensor other.V"),
    "integers": (_integers, "has dtype I32; factors are one of"),
    "damaged orbax": (_damaged_orbax, "cannot be read as an orbax tree"),
    "damaged torch": (_no_zip, "cannot be read as a PyTorch state dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line(tmp_path: Path, name: str) -> None:
    make, told = BAD[name]
    src = make(tmp_path)
    with pytest.raises(UserError, match=told) as error:
        open_source(str(src))
    assert "\n" not in str(error.value)


def test_a_changed_source_is_known(tmp_path: Path) -> None:
    src = sharded(tmp_path / "s", factors())
    before = fingerprint(src)
    assert fingerprint(src) == before and len(before) == 3
    os.utime(src / "old-0.safetensors", ns=(0, 0))
    assert fingerprint(src) != before
