"""conf/ and the shipped target travel with the package; nothing else does (issue 2, item 1)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built from a copy so that no build/ or egg-info is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("decomp", "conf", "launchers"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder a plain install leaves in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_every_yaml_and_module(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"decomp/{file.relative_to(ROOT)}" for file in (ROOT / "conf").rglob("*.yaml")}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "decomp").rglob("*.py")}
    modules |= {f"decomp/{file.relative_to(ROOT)}" for file in (ROOT / "launchers").glob("*.py")}
    builtin = {str(f.relative_to(ROOT)) for f in (ROOT / "decomp" / "target" / "builtin").rglob("*") if f.is_file()}
    assert (conf | modules | builtin) - names == set()


def test_nothing_becomes_a_top_level_name(wheel: Path):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"decomp"}


def test_an_installed_copy_finds_its_conf_from_any_folder(installed: Path, tmp_path: Path):
    code = "import decomp, sys; from decomp.__main__ import main; print(decomp.__file__); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--cfg", "job", "mesh=dp8"],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("\n", 1)
    assert first.startswith(str(installed)), "this test must look at the installed copy"
    assert "fsdp: 8" in rest
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_main(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    assert "decomp = decomp.__main__:main" in archive.read(name).decode()


def test_a_checkout_finds_its_conf(decomp_cli, tmp_path: Path):
    done = decomp_cli("--cfg", "job", timeout=60)
    assert done.returncode == 0 and "path: builtin:pycode" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_import_is_a_declared_dependency():
    """What decomp/ imports from outside is in pyproject.toml, so that a fresh environment has it."""
    import ast

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {d.split(">")[0].split("<")[0].split("[")[0].replace("-", "_") for d in project["dependencies"]}
    provided = {"hydra": "hydra_core", "orbax": "orbax_checkpoint", "yaml": "omegaconf", "pydantic_core": "pydantic"}
    imported = set()
    for file in [*(ROOT / "decomp").rglob("*.py"), *(ROOT / "launchers").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"decomp", ""}
    assert {provided.get(name, name) for name in outside} - declared == set()


def test_readme_begins_with_the_two_lines_that_do_everything():
    """The first runs the main job, the second the tests; .ci/run takes the second from there."""
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    first, second = [line for block in blocks for line in block.splitlines()[1:] if line.strip()][:2]
    assert "-m venv" in first and "pip install" in first and first.endswith("-m decomp")
    assert second == "make install test"
    assert "README.md" in (ROOT / ".ci" / "run").read_text()
