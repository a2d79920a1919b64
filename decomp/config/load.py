"""The one crossing from plain dicts to ``RunConfig``, and back.

All problems are reported at once, one line each: the dotted path, the value found there, and the fix.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from decomp.config import fields, rules
from decomp.config.errors import UserError
from decomp.config.fields import Path, dotted
from decomp.config.schema import RunConfig

REQUIRED = "is required"
PLACEHOLDERS = (1, 1.0, "text", False)
WORDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text (quote it)",
    "NoneType": "null",
    "tuple": "a list",
    "dict": "a mapping by name",
    "Curve": "a schedule {max, knots: [{at, frac, interp}]}",
}


def run_config(data: dict[str, Any], renewed: Mapping[Path, set[str]] | None = None) -> RunConfig:
    """Validates a resolved config; ``renewed`` as in ``drop_absent``.

    Raises:
      UserError: one line for every unknown key, wrong type, wrong value and broken rule in ``data``.
    """
    data = drop_absent(data, renewed)
    cfg, lines = _validated(data)
    if cfg is not None:
        lines += [_line(tuple(p.path.split(".")), None, p.fix, shown=False) for p in rules.problems(cfg)]
    else:
        lines += _rules_of_the_rest(data)
    if cfg is None or lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return cfg


def to_dict(cfg: RunConfig) -> dict[str, Any]:
    """Plain dicts, lists, numbers and text: what config.yaml holds. ``run_config(to_dict(cfg)) == cfg``."""
    return cfg.model_dump(mode="json")


def read_yaml(path: str | FilePath) -> dict[str, Any]:
    """A stored config.yaml as a dict; a UserError says what is wrong with a file that is none."""
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); name an existing file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {type(data).__name__}, not a mapping of config keys")
    return {str(key): value for key, value in data.items()}


def warnings_for(cfg: RunConfig) -> list[str]:
    """What is allowed but said aloud at start, one line each."""
    return rules.warnings(cfg)


def drop_absent(data: dict[str, Any], renewed: Mapping[Path, set[str]] | None = None) -> dict[str, Any]:
    """``data`` without the keys that another ``kind`` of a section left there.

    YAML layers are merged, so an experiment or ablation that changes a section's kind cannot remove the old kind's
    keys; it sets them to null. A person who types another kind means to replace the section: ``renewed`` names such
    sections, with the keys typed for them, which stay.
    """
    return _drop_absent(copy.deepcopy(data), [RunConfig], (), renewed or {})


def _drop_absent(value: Any, annotations: list[Any], path: Path, renewed: Mapping[Path, set[str]]) -> Any:
    if not isinstance(value, dict):
        return value
    mine = {name for a in annotations for m in fields.chosen(a, value) for name in m.model_fields}
    others = {name for a in annotations for m in fields.models(a) for name in m.model_fields} - mine
    stale = {key for key in others & set(value) if value[key] is None or key not in renewed.get(path, {key})}
    out = {}
    for key in [key for key in value if key not in stale]:
        below = [r for a in annotations for r in fields.step(a, key, value)]
        out[key] = _drop_absent(value[key], below, (*path, key), renewed)
    return out


def _validated(data: dict[str, Any]) -> tuple[RunConfig | None, list[str]]:
    try:
        return RunConfig.model_validate(data), []
    except ValidationError as error:
        found: dict[Path, ErrorDetails] = {}
        for detail in error.errors(include_url=False):
            path = _path(detail, data)
            tagged = detail["type"].startswith("union_tag") and isinstance(fields.at(data, path), dict)
            found.setdefault((*path, "kind") if tagged else path, detail)
        # A list that may also be a word is refused twice: once as a word, once item by item. The item says more.
        outer = {path[:-1] for path in found if path and isinstance(path[-1], int)}
        return None, [_line(path, data, _fix(path, d, data)) for path, d in found.items() if path not in outer]


def _path(detail: ErrorDetails, data: Any) -> Path:
    """Pydantic's location without the union tags that it puts between the keys."""
    path: list[str | int] = []
    for i, part in enumerate(detail["loc"]):
        last = i == len(detail["loc"]) - 1
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if inside or (last and detail["type"] == "missing"):
            path.append(part)
            data = fields.child(data, part)
    return tuple(path)


def _line(path: Path, data: Any, fix: str, shown: bool = True) -> str:
    if not shown or fix.startswith(REQUIRED):
        return f"{dotted(path)}: {fix}"
    return f"{dotted(path)}={_show(fields.at(data, path))}: {fix}"


def _show(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fix(path: Path, detail: ErrorDetails, data: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{REQUIRED}; give {dotted(path)}=..."
    if kind == "extra_forbidden":
        return _unknown_fix(path, data)
    if kind.startswith("union_tag") and path[-1] == "kind":
        return _kind_fix(path[:-1], data)
    if kind == "literal_error":
        return _literal_fix(path, context, data)
    return _type_fix(path, detail, data)


def _unknown_fix(path: Path, data: Any) -> str:
    name, parent = str(path[-1]), fields.at(data, path[:-1])
    elsewhere = {f for a in fields.annotations_at(path[:-1], data) for m in fields.models(a) for f in m.model_fields}
    if name in elsewhere:
        return f"is no key of kind {parent.get('kind')}; take it out with ~{dotted(path)}"
    return f"no such key; {fields.hint(name, fields.keys_at(path[:-1], data) - {name})}"


def _literal_fix(path: Path, context: dict[str, Any], data: Any) -> str:
    name, annotations = str(fields.at(data, path)), fields.annotations_at(path, data)
    valid = [v.strip("' ") for v in context.get("expected", "").replace(" or ", ", ").split(", ")]
    if sum(len(fields.alternatives(a)) for a in annotations) == 1:
        return f"no such option; {fields.hint(name, valid)}"
    best = fields.nearest(name, valid)
    return f"must be {_wanted(annotations)}" + (f"; did you mean {best}?" if best else "")


def _kind_fix(path: Path, data: Any) -> str:
    valid = {k for a in fields.annotations_at(path, data) for m in fields.models(a) for k in fields.kinds(m)}
    return f"no such kind; {fields.hint(str(fields.at(data, (*path, 'kind'))), valid)}"


def _type_fix(path: Path, detail: ErrorDetails, data: Any) -> str:
    context, annotations = detail.get("ctx", {}), fields.annotations_at(path, data)
    bounds = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    said = [f"{word} {context[key]:g}" for key, word in bounds.items() if isinstance(context.get(key), int | float)]
    if said:
        return f"must be {' and '.join(said)}"
    return f"must be {_wanted(annotations)}" if annotations else detail["msg"].lower()


def _wanted(annotations: list[Any]) -> str:
    """What a field takes, in a person's words."""
    plain = [p for a in annotations for p in fields.alternatives(a)]
    several = [p for p in plain if fields.models(p)]
    said = [f"a mapping of kind {' | '.join(k for p in several for k in fields.kinds(p))}"] if several[1:] else []
    for p in [p for p in plain if not (several[1:] and p in several)]:
        values = fields.get_args(p) if fields.get_origin(p) is fields.Literal else ()
        name = getattr(fields.get_origin(p) or p, "__name__", str(p))
        said.append(" | ".join(map(str, values)) if values else WORDS.get(name, _keys(p)))
    return " or ".join(dict.fromkeys(said))


def _keys(model: Any) -> str:
    known = isinstance(model, type) and issubclass(model, BaseModel)
    return f"a mapping with the keys {', '.join(model.model_fields)}" if known else str(model)


def _rules_of_the_rest(data: dict[str, Any]) -> list[str]:
    """Rules broken by the fields that are valid: the refused ones are replaced, and rules that read them skipped."""
    repaired, bad = copy.deepcopy(data), set[Path]()
    for _ in range(4):
        try:
            cfg = RunConfig.model_validate(repaired)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = _path(detail, repaired)
                bad.add(path)
                _repair(repaired, path, detail["type"])
            continue
        broken = [p for p in rules.problems(cfg) if not _touches(p, bad)]
        return [f"{p.path}: {p.fix}" for p in broken]
    return []


def _touches(problem: rules.Problem, bad: set[Path]) -> bool:
    read = [path + "." for path in (problem.path, *problem.reads)]
    refused = [dotted(path).partition("[")[0] + "." for path in bad]
    return any(r.startswith(b) or b.startswith(r) for r in read for b in refused)


def _repair(data: dict[str, Any], path: Path, kind: str) -> None:
    """Puts something valid, if need be nothing, where a value was refused."""
    if not path:
        return
    parent, last = fields.at(data, path[:-1]), path[-1]
    if isinstance(parent, list):
        _repair(data, path[:-1], kind)
    elif isinstance(parent, dict):
        parent.pop(last, None)
        if kind != "extra_forbidden":
            parent |= _placeholder(path, data)


def _placeholder(path: Path, data: Any) -> dict[Any, Any]:
    """{key: a plain valid value} for a field without a default; empty where leaving it out will do."""
    annotations, last = fields.annotations_at(path[:-1], data), str(path[-1])
    models = [m for a in annotations for m in fields.chosen(a, fields.at(data, path[:-1]))]
    field = next((m.model_fields[last] for m in models if last in m.model_fields), None)
    if field is None or not field.is_required():
        return {}
    plain = fields.alternatives(field.annotation)
    return {last: next((v for v in PLACEHOLDERS if type(v) in plain), {})}
