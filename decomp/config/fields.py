"""Dotted paths through the schema: which keys are valid somewhere, and which type stands there.

Used on both sides of the crossing: before Hydra composes (is this key known? is its value text?) and after pydantic
has validated (what is the nearest valid key?).
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from decomp.config.schema import RunConfig

Path = tuple[str | int, ...]


def dotted(path: Iterable[str | int]) -> str:
    """``("a", "b", 0)`` -> ``a.b[0]``."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like ``name``: a prefix or a near spelling."""
    names = sorted({str(v) for v in valid})
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return close[0] if close else next((v for v in names if v.startswith(name) or name.startswith(v)), None)


def hint(name: str, valid: Iterable[str]) -> str:
    """The fix for a wrong name: the nearest valid one, and all of them where they are few."""
    names = sorted({str(v) for v in valid})
    best = nearest(name, names)
    meant = f"did you mean {best}? " if best else ""
    return f"{meant}(valid: {', '.join(names)})" if 0 < len(names) <= 24 else meant.strip() or "see decomp --cfg job"


def alternatives(annotation: Any) -> list[Any]:
    """The plain types behind annotations and unions."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [a for arg in get_args(annotation) for a in alternatives(arg)]
    return [annotation]


def models(annotation: Any) -> list[type[BaseModel]]:
    return [a for a in alternatives(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]


def kinds(model: type[BaseModel]) -> tuple[str, ...]:
    """The values of a model's ``kind`` tag; empty where it has none."""
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def chosen(annotation: Any, data: Any) -> list[type[BaseModel]]:
    """The models that ``data`` can be meant for: those of its ``kind``, or all of them."""
    found = models(annotation)
    kind = data.get("kind") if isinstance(data, dict) else None
    return [m for m in found if kind in kinds(m)] or found


def step(annotation: Any, part: str | int, data: Any) -> list[Any]:
    """Annotations reached from one annotation by a key; empty if the schema has no such key."""
    out = [m.model_fields[part] for m in chosen(annotation, data) if isinstance(part, str) and part in m.model_fields]
    reached: list[Any] = [f.annotation for f in out]
    for plain in alternatives(annotation):
        if get_origin(plain) is dict and isinstance(part, str):
            reached.append(get_args(plain)[1])
        if get_origin(plain) is tuple and isinstance(part, int):
            args = [a for a in get_args(plain) if a is not Ellipsis]
            reached.append(args[min(part, len(args) - 1)])
    return reached


def annotations_at(path: Sequence[str | int], data: Any = None, root: Any = RunConfig) -> list[Any]:
    """Types that may stand at ``path``, empty if none; ``data`` (nested dicts) decides unions by their ``kind``."""
    here = [root]
    for part in path:
        here = [reached for annotation in here for reached in step(annotation, part, data)]
        data = child(data, part)
    return here


def child(data: Any, part: str | int) -> Any:
    """``data[part]``, or None where there is no such thing."""
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def at(data: Any, path: Iterable[str | int]) -> Any:
    """The value at ``path`` in nested dicts and lists; None where there is none."""
    for part in path:
        data = child(data, part)
    return data


def keys_at(path: Sequence[str | int], data: Any = None, root: Any = RunConfig) -> set[str]:
    """Valid keys under ``path``: field names, and for a mapping by name those that ``data`` has."""
    here = annotations_at(path, data, root)
    value = at(data, path)
    names = {name for annotation in here for model in chosen(annotation, value) for name in model.model_fields}
    if any(is_mapping(annotation) for annotation in here) and isinstance(value, dict):
        names |= {str(name) for name in value}
    return names


def is_mapping(annotation: Any) -> bool:
    """A mapping by name (``loss.recon``, ``optim``, ``sites.C``) rather than a model with fields."""
    return any(get_origin(plain) is dict for plain in alternatives(annotation))


def is_list(annotation: Any) -> bool:
    return any(get_origin(plain) in (tuple, list) for plain in alternatives(annotation))


def is_text(annotation: Any) -> bool:
    """Free text, which is never a number whatever it looks like (case 3)."""
    return str in alternatives(annotation)


def is_text_list(annotation: Any) -> bool:
    """A list of text that one bare word may stand for."""
    return any(get_origin(plain) in (tuple, list) and str in get_args(plain) for plain in alternatives(annotation))


def is_model_mapping(annotation: Any) -> bool:
    """A mapping by name whose items are sections of their own: losses, optimizer groups, metrics."""
    return any(get_origin(plain) is dict and models(get_args(plain)[1]) for plain in alternatives(annotation))
