"""What pyproject.toml cannot say: folders at the top level that are installed inside the package."""

from pathlib import Path

from setuptools import find_packages, setup

# conf/ and launchers/ are pages of the repository, but must never become top-level names of an installation. In a
# checkout, decomp/launchers is a link to the second, so that the package is whole without an installation.
INSIDE = {f"decomp.{name}": name for name in ("conf", "launchers") if Path(name).is_dir()}

setup(
    packages=find_packages(include=["decomp", "decomp.*"], exclude=list(INSIDE)) + list(INSIDE),
    package_dir=INSIDE,
    package_data={"decomp.conf": ["**/*.yaml"], "decomp.target": ["builtin/**"]},
    include_package_data=False,
)
