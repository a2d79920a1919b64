"""From overrides to a validated ``RunConfig`` by way of Hydra.

Nothing of Hydra's is shown to a person: a mistake is one line each. With HYDRA_FULL_ERROR=1 the exception behind it is
raised as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from decomp.config import fields, load, overrides
from decomp.config.errors import UserError
from decomp.config.overrides import GLOBAL_GROUPS, Typed, Vocabulary
from decomp.config.schema import RunConfig

VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """Where conf/ lies: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml lies neither in {package} nor beside it: the installation is broken")


def group_options(extra: tuple[Path, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Option names by group, those of ``extra`` config folders included."""
    groups: dict[str, set[str]] = {}
    for folder in (conf_dir(), *extra):
        for file in folder.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {name: tuple(sorted(options)) for name, options in sorted(groups.items())}


def verbs() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in (conf_dir() / "verb").glob("*.yaml")))


@dataclass(frozen=True)
class Command:
    """A verb with its own options and the overrides of the config, as typed.

    Attributes:
      options: the keys of conf/verb/<verb>.yaml with the person's values; a UserError if a required one is missing.
      overrides: everything else, for overrides.txt and for ``config`` and ``recompose``.
    """

    verb: str = "run"
    texts: tuple[str, ...] = ()
    config_dirs: tuple[Path, ...] = ()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        defaults = load.read_yaml(conf_dir() / "verb" / f"{self.verb}.yaml")
        return Vocabulary(group_options(self.config_dirs), defaults)

    @cached_property
    def typed(self) -> list[Typed]:
        return overrides.check(list(self.texts), self.vocabulary)

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        return tuple(t.text for t in self.typed if t.path[0] not in self.vocabulary.options)

    @cached_property
    def options(self) -> dict[str, Any]:
        mine = [t.hydra for t in self.typed if t.path[0] in self.vocabulary.options]
        with _as_user_errors():
            cfg = self._hydra(mine)
            missing = [key for key in OmegaConf.missing_keys(cfg) if key.split(".")[0] in self.vocabulary.options]
            if missing:
                raise UserError("\n".join(f"{key}: is required; give {key}=..." for key in sorted(missing)))
            values = _plain(cfg)
        return {key: values[key] for key in self.vocabulary.options}

    def config(self) -> RunConfig:
        """Composes and validates; a UserError lists every problem."""
        typed = self._config_overrides()
        data = self._composed(typed)
        return load.run_config(self._without_options(data), overrides.renewed(typed))

    def hydra_texts(self) -> list[str]:
        """What was typed in the form for Hydra's own command line (``--cfg``, ``--info``), once it composes."""
        self._composed(self.typed)
        return [f"verb={self.verb}", *(t.hydra for t in self.typed)]

    def _composed(self, typed: list[Typed]) -> dict[str, Any]:
        with _as_user_errors():
            if overrides.crosses_mapping(typed):
                groups = [t.hydra for t in typed if overrides.is_group(t.key, self.vocabulary)]
                overrides.check_names(typed, _plain(self._hydra(groups)))
            return _plain(self._hydra([t.hydra for t in typed]))

    def recompose(self, stored: dict[str, Any]) -> RunConfig:
        """A stored config with this command's overrides: a group replaces its subtree, a value is set at its path.

        Raises:
          UserError: for ``experiment=`` and ``ablation=``, which are recipes for a new run, and for every problem of
            the result.
        """
        typed = self._config_overrides()
        refused = [t.text for t in typed if t.key in GLOBAL_GROUPS]
        if refused:
            raise UserError(f"{', '.join(refused)}: a stored run keeps its recipe; set single values or other groups")
        overrides.check_names(typed, stored)
        with _as_user_errors():
            data = OmegaConf.create(self._with_groups(stored, typed))
            for item in typed:
                if not overrides.is_group(item.key, self.vocabulary):
                    _set(data, item)
            plain = _plain(data)
        return load.run_config(plain, overrides.renewed(typed))

    def _config_overrides(self) -> list[Typed]:
        return [t for t in self.typed if t.path[0] not in self.vocabulary.options]

    def _with_groups(self, stored: dict[str, Any], typed: list[Typed]) -> dict[str, Any]:
        groups = [t for t in typed if overrides.is_group(t.key, self.vocabulary)]
        if not groups:
            return stored
        recipe = stored.get("experiment")
        known = recipe in self.vocabulary.groups["experiment"]
        composed = _plain(self._hydra([*([f"experiment='{recipe}'"] if known else []), *(t.hydra for t in groups)]))
        return stored | {t.key: composed[t.key] for t in groups}

    def _hydra(self, texts: list[str]) -> DictConfig:
        """One composition; the result still has Hydra's own node cut off and every interpolation unresolved."""
        extra = [f"hydra.searchpath=[{','.join(f'file://{d.resolve()}' for d in self.config_dirs)}]"]
        chosen = [f"verb={self.verb}", *texts, *(extra if self.config_dirs else [])]
        GlobalHydra.instance().clear()
        with initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE, job_name="decomp"):
            cfg = hydra_compose(config_name="config", overrides=chosen, return_hydra_config=True)
        with open_dict(cfg):
            cfg.experiment = cfg.hydra.runtime.choices.get("experiment") or "custom"
            del cfg["hydra"]
        return cfg

    def _without_options(self, data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in self.vocabulary.options}


def compose(texts: list[str] | None = None, verb: str = "run") -> RunConfig:
    """The validated config of ``decomp <verb> <texts>``."""
    return Command(verb, tuple(texts or ())).config()


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolved plain dicts. A ``???`` is left out, so that it is refused as missing with everything else."""
    for key in OmegaConf.missing_keys(cfg):
        parent, _, last = key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        with open_dict(node):
            del node[last]
    data = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _set(data: DictConfig, item: Typed) -> None:
    """Applies one value override the way Hydra does."""
    if item.prefix != "~":
        OmegaConf.update(data, item.key, item.value, merge=True, force_add=True)
        return
    parent = OmegaConf.select(data, ".".join(item.path[:-1])) if item.path[1:] else data
    if parent is None or item.path[-1] not in parent:
        raise UserError(f"{item.text}: there is no {item.key} to take out")
    del parent[item.path[-1]]


@contextmanager
def _as_user_errors() -> Iterator[None]:
    """Hydra's and OmegaConf's exceptions as one line: a mistake in what was typed or in a YAML file."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise UserError(_one_line(error)) from None


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    lines = [line.strip() for line in f"{cause}".splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("full_key:", "object_type=", "See http", "Search path"))]
    text = " ".join(said) or type(cause).__name__
    where = f"{fields.dotted((key,))}: " if key and key not in text else ""
    return f"{where}{text} (HYDRA_FULL_ERROR=1 shows where)"
