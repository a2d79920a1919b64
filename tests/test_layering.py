"""A module imports only from rows above it (DESIGN 3), and what answers mistakes imports no jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Low to high. Modules of one row may import each other.
ROWS = (
    {"config"},
    {"schedule"},
    {"coordinator", "peers", "processes"},
    {"mesh", "aligned"},
    {"placement"},
    {"sites"},
    {"numerics", "keys"},
    {"components"},
    {"masks"},
    {"target"},
    {"ci_fn"},
    {"loss"},
    {"optim"},
    {"state"},
    {"step"},
    {"data"},
    {"eval"},
    {"folder", "lock", "manifest", "upgrade", "checkpoint", "init_from"},
    {"logger"},
    {"best"},
    {"figures"},
    {"agreement", "stop", "retry", "profiler", "trainer"},
    {"loop"},
    {"build"},
    {"invariance", "plan", "exchange"},
    {"api"},
    {"launchers"},
    {"verbs"},
    {"__main__"},
)
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
LAUNCHERS = sorted((ROOT / "decomp" / "launchers").glob("*.py"))  # a link, which rglob does not follow
FILES = sorted({*(ROOT / "decomp").rglob("*.py"), *LAUNCHERS} - {ROOT / "decomp" / "__init__.py"})


def module_of(file: Path) -> str:
    return file.relative_to(ROOT / "decomp").with_suffix("").parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """First-level modules of decomp that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "decomp":
            names = [f"decomp.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import, line {node.lineno}: spell out decomp.…"
            names = [node.module or ""]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("decomp."))


def violations(module: str, source: str) -> list[str]:
    """Imports of ``module`` that lie in rows below it."""
    return [other for other in imported(ast.parse(source)) if RANK[other] > RANK[module]]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_only_from_rows_above(file: Path):
    assert module_of(file) in RANK, f"{file.name} has no row in tests/test_layering.py and CONTRIBUTING.md"
    assert violations(module_of(file), file.read_text()) == []


def test_a_violation_is_found():
    assert violations("masks", "from decomp import loop\nimport decomp.step\nfrom decomp.keys import key") == [
        "loop",
        "step",
    ]


def test_every_row_is_in_contributing():
    table = (ROOT / "CONTRIBUTING.md").read_text()
    missing = [name for name in RANK if name.strip("_") not in table]
    assert missing == []


def test_config_imports_no_jax():
    files = sorted((ROOT / "decomp" / "config").glob("*.py"))
    code = "import sys\n" + "\n".join(f"import decomp.config.{f.stem}" for f in files if f.stem != "__init__")
    code += "\nassert not {'jax', 'optax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_a_mistake_is_answered_without_jax():
    code = (
        "import sys; sys.argv = ['decomp', 'optim.components.lr=abc']\n"
        "from decomp.__main__ import main\n"
        "assert main() == 2\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT, capture_output=True)


def test_one_door_to_orbax_and_wandb():
    """checkpoint.py alone knows orbax, logger.py alone wandb."""
    doors = {"orbax": "checkpoint", "wandb": "logger"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                door = doors.get(name.split(".")[0])
                assert door in (None, module_of(file)), f"{file}: {name} belongs to {door}.py"
