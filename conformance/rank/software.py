"""The software that a rank has loaded: torch, the packages of its target, and their shared libraries."""

from __future__ import annotations

import hashlib
import importlib
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from shardlaw.conformance.law.target import BACKENDS
from shardlaw.conformance.rank.context import RankContext


def loaded_software(here: RankContext, modules: Iterable[str]) -> dict[str, Any]:
    """Versions and hashes of what this rank has loaded. ``modules`` are those that its target names."""
    names = sorted({module.partition(".")[0] for module in modules} - {"torch", ""})
    found = {name: _describe_package(name) for name in names}
    homes = tuple(str(home) for home, _ in found.values())
    libraries = [file for file in _mapped_libraries() if file.startswith(homes) or any(word in Path(file).name for word in BACKENDS)]
    return {
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "packages": {name: text for name, (_, text) in found.items()},
        "libraries": {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in libraries},
    }


def _describe_package(name: str) -> tuple[Path, str]:
    """The folder or file of a package, and its version with the sha256 of its sources."""
    file = Path(importlib.import_module(name).__file__ or "")
    home = file.parent if file.name == "__init__.py" else file
    sources = sorted(home.rglob("*.py")) if home.is_dir() else [home]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(str(source.relative_to(home)).encode() + b"\0" + source.read_bytes() + b"\0")
    owners = packages_distributions().get(name, [])
    return home, f"{version(owners[0]) if owners else 'not installed'} sha256 {digest.hexdigest()}"


def _mapped_libraries() -> list[str]:
    """The files of shared libraries that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return sorted(file for file in files if Path(file).is_file())
