"""The code of a run, copied into its folder: what is edited after submission changes nothing (DESIGN 5)."""

from __future__ import annotations

import shutil
from pathlib import Path

import decomp
from decomp.config.compose import conf_dir
from decomp.folder import writing

CODE = "code"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def freeze(folder: Path) -> Path:
    """Copies the package with conf/ and launchers/ inside, as an installation has them, to ``folder``/code.

    Returns the folder to put first on PYTHONPATH. UserError for a disk that does not take it.
    """
    code = folder / CODE
    parts = {"": Path(decomp.__file__).parent, "conf": conf_dir(), "launchers": Path(__file__).parent}
    with writing(code):
        for name, source in parts.items():
            shutil.copytree(source, code / "decomp" / name, ignore=LEFT_OUT, dirs_exist_ok=True)
    return code
