"""What a person types after the verb, checked against the schema and the groups before Hydra sees it.

Hydra's own answers to a mistake are many lines long and come one at a time; here each is one line with the value and
the nearest valid name. Text stays text (case 3): a name typed as ``1e5`` is quoted before Hydra can read a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException

from decomp.config import fields
from decomp.config.errors import UserError
from decomp.config.schema import RunConfig

KEY = re.compile(r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=\s]+?)(?:=(?P<value>.*))?", re.DOTALL)
GLOBAL_GROUPS = ("experiment", "ablation")


@dataclass(frozen=True)
class Vocabulary:
    """What may be typed: option names by group, and the verb's own keys with their defaults."""

    groups: Mapping[str, tuple[str, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_words(self) -> set[str]:
        return {*RunConfig.model_fields, *self.groups, *self.options} - {"verb"}


@dataclass(frozen=True)
class Typed:
    """One override: as typed, taken apart, and as Hydra is given it."""

    text: str
    prefix: str
    key: str
    raw: str | None
    hydra: str
    parsed: Override

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def value(self) -> Any:
        return self.parsed.value()


def check(texts: list[str], words: Vocabulary) -> list[Typed]:
    """Takes overrides apart; every mistake that can be told from a name alone is reported, all at once."""
    typed, lines = [], []
    for text in texts:
        try:
            typed.append(_check(text, words))
        except UserError as error:
            lines.append(str(error))
    if lines:
        raise UserError("\n".join(lines))
    return typed


def _check(text: str, words: Vocabulary) -> Typed:
    match = KEY.fullmatch(text)
    if match is None or (match["value"] is None and match["prefix"] != "~"):
        fix = f"give {text}=..." if text in words.first_words else fields.hint(text, words.first_words)
        if text in words.groups.get("verb", ()):
            fix = f"a verb is the first word: decomp {text} ..."
        raise UserError(f"{text}: is no key=value; {fix}")
    prefix, key, raw = match["prefix"], match["key"], match["value"]
    if key.startswith(("hydra.", "hydra/")):
        return Typed(text, prefix, key, raw, text, _parse(text, text))
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    _check_key(text, key, words)
    if raw is not None and _takes_text(key, raw, words):
        raw = QuotedString(raw, Quote.single).with_quotes()
    elif is_group(key, words):
        _check_option(text, key, raw, words)
    hydra = text if raw is None else f"{_hydra_prefix(prefix, key, words)}{key}={raw}"
    return _not_a_sweep(Typed(text, prefix, key, raw, hydra, _parse(text, hydra)))


def is_group(key: str, words: Vocabulary) -> bool:
    return key.partition("@")[0] in words.groups


def is_option(key: str, words: Vocabulary) -> bool:
    """A key of the verb's own, such as ``run`` or ``train.steps``."""
    return key.split(".")[0] in words.options


def _hydra_prefix(prefix: str, key: str, words: Vocabulary) -> str:
    """A field of the schema may be set whether or not the option's YAML spells it out."""
    return prefix if prefix or is_group(key, words) or is_option(key, words) else "++"


def _parse(text: str, hydra: str) -> Override:
    try:
        return OverridesParser.create().parse_override(hydra)
    except HydraException:
        raise UserError(
            f"{text}: cannot be read; write key=value, a list as key=[a,b], a mapping as key={{a: 1}}, and quote "
            "special characters: key='\"a b\"'"
        ) from None


def _check_key(text: str, key: str, words: Vocabulary) -> None:
    first, *rest = key.split(".")
    if key == "verb":
        raise UserError(f"{text}: the verb is the first word: decomp {text.partition('=')[2] or 'run'} ...")
    if is_group(key, words):
        return
    if is_option(key, words):
        _check_option_key(text, [first, *rest], words)
        return
    if first not in RunConfig.model_fields:
        raise UserError(f"{text}: no such key {first}; {fields.hint(first, words.first_words)}")
    here: list[Any] = [RunConfig]
    for depth, part in enumerate([first, *rest]):
        if part.isdigit() and any(map(fields.is_list, here)):
            name = ".".join([first, *rest][:depth])
            raise UserError(f"{text}: {name} is a list, whose items have no keys; give all of it: {name}=[...]")
        reached = [r for annotation in here for r in fields.step(annotation, part, None)]
        if not reached:
            valid = {name for a in here for m in fields.models(a) for name in m.model_fields}
            raise UserError(f"{text}: no such key {part}; {fields.hint(part, valid)}")
        here = reached


def _check_option_key(text: str, path: list[str], words: Vocabulary) -> None:
    for depth, part in enumerate(path):
        known = fields.at(words.options, path[:depth])
        if not isinstance(known, Mapping):
            raise UserError(f"{text}: {'.'.join(path[:depth])} has no keys of its own")
        if part not in known:
            raise UserError(f"{text}: no such key {part}; {fields.hint(part, known)}")


def _check_option(text: str, key: str, raw: str | None, words: Vocabulary) -> None:
    group = key.partition("@")[0]
    if raw is None or (re.search(r"[(\[,]", raw) and not raw.startswith("{")):
        return
    if raw in ("null", "") or raw.startswith("{"):
        names = sorted(fields.keys_at([group])) or list(words.groups[group])
        raise UserError(f"{text}: {group}= takes an option ({', '.join(words.groups[group])}); single values are "
                        f"{group}.{names[0]}=... and so on")  # fmt: skip
    name = raw.strip("'\"")
    if name not in words.groups[group]:
        raise UserError(f"{text}: no such option of {group}; {fields.hint(name, words.groups[group])}")


def _takes_text(key: str, raw: str, words: Vocabulary) -> bool:
    """Whether the bare word ``raw`` at ``key`` is text, and so must not be read as a number, a list or a sweep."""
    if raw[:1] in ("'", '"') or raw == "null" or "${" in raw:
        return False
    if is_group(key, words):
        # An option's name, taken as it is wherever such an option exists.
        return raw in words.groups[key.partition("@")[0]]
    if is_option(key, words):
        default = fields.at(words.options, key.split("."))
        return default is None or isinstance(default, str)
    here = fields.annotations_at(key.split("."))
    if raw[:1] in ("[", "{"):
        return any(map(fields.is_text, here)) and not any(map(fields.is_list, here))
    return any(map(fields.is_text, here)) or any(map(fields.is_text_list, here))


def _not_a_sweep(typed: Typed) -> Typed:
    if typed.parsed.is_sweep_override():
        raise UserError(f"{typed.text}: several values need -m (decomp -m {typed.text}); a list is {typed.key}=[...]")
    return typed


def check_names(typed: list[Typed], base: Mapping[str, Any]) -> None:
    """A value inside a mapping by name belongs to a name that is there; a new name is added on purpose, with +."""
    lines = []
    for item in typed:
        for depth in range(1, len(item.path)):
            here = fields.annotations_at(item.path[:depth])
            known = fields.at(base, item.path[:depth])
            deeper = any(map(fields.is_model_mapping, here)) and isinstance(known, Mapping)
            if deeper and item.prefix in ("", "~") and item.path[depth] not in known:
                where = ".".join(item.path[:depth])
                valid = fields.hint(item.path[depth], known)
                lines.append(
                    f"{item.text}: no {item.path[depth]} in {where}; {valid}; a new one is added with +{where}."
                )
    if lines:
        raise UserError("\n".join(lines))


def renewed(typed: list[Typed]) -> dict[fields.Path, set[str]]:
    """Sections for which another ``kind`` was typed, with all keys typed for them."""
    out: dict[fields.Path, set[str]] = {}
    for item in typed:
        for path, _ in _leaves(item.path, item.value):
            out.setdefault(path[:-1], set()).add(path[-1])
    return {path: keys for path, keys in out.items() if "kind" in keys}


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)


def crosses_mapping(typed: list[Typed]) -> bool:
    return any(
        fields.is_model_mapping(annotation)
        for item in typed
        for depth in range(1, len(item.path))
        for annotation in fields.annotations_at(item.path[:depth])
    )


def points(texts: list[str], words: Vocabulary) -> Iterator[list[str]]:
    """The points of a sweep: the product of every override's values, the last one fastest."""
    first, *rest = texts or [""]
    for value in _values(first, words) if texts else ():
        for others in points(rest, words) if rest else [[]]:
            yield [value, *others]
    if not texts:
        yield []


def _values(text: str, words: Vocabulary) -> Iterator[str]:
    key, _, raw = text.partition("=")
    parsed = _parse(text, text)
    if not parsed.is_sweep_override():
        yield text
    elif parsed.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        # Split as typed, so that a name such as 1e5 is still text.
        yield from (f"{key}={part}" for part in _split(raw))
    elif isinstance(parsed._value, Glob):
        yield from (f"{key}={name}" for name in parsed._value.filter(list(words.groups.get(key, ()))))
    elif parsed.is_discrete_sweep():
        yield from (f"{key}={value}" for value in parsed.sweep_string_iterator())
    else:
        raise UserError(f"{text}: an interval has no first value; list them: {key}=a,b,c")


def _split(raw: str) -> list[str]:
    """Splits at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for char in raw:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += char
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{(") - (char in ")}]")
    return [part.strip() for part in parts]
