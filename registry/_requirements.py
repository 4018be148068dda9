"""Are a plugin's requirements met by what is installed? By distribution metadata: nothing is imported."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from hal._version import __version__

DISTRIBUTION = "hal-kernels"


def missing(requirement: str) -> str:
    """Why a requirement such as ``triton>=3.6,<4; sys_platform == "linux"`` is not met; empty if it is.

    A requirement whose marker is false here asks for nothing. A pre-release counts as the version it precedes says:
    3.7.0rc1 meets ``>=3.6``, and neither ``>=3.7`` nor ``<3.7``.
    """
    try:
        need = Requirement(requirement)
        wanted = need.marker is None or need.marker.evaluate()
    except (InvalidRequirement, ValueError) as e:
        return f"its requirement {requirement!r} can't be read: {str(e).splitlines()[0]}"
    if not wanted:
        return ""
    shown = requirement.partition(";")[0].strip()
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        return f"needs {shown}"
    except Exception:
        version = ""
    if not version:
        # Metadata that was left behind, or is damaged.
        return f"needs {shown}; the metadata of the installed {need.name} can't be read"
    return "" if satisfies(version, need.specifier) else f"needs {shown}; {version} is installed"


def satisfies(version: str, wanted: str | SpecifierSet) -> bool:
    """Does a version meet ``>=3.6,<4``? One that is none meets nothing, nor does anything meet what can't be read."""
    try:
        return SpecifierSet(str(wanted)).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion, TypeError):
        return False


def excludes_hal(dist: Any) -> str:
    """The requirement by which a distribution rules out this version of hal, if it does."""
    try:
        needs = [Requirement(text) for text in dist.requires or ()]
    except Exception:
        return ""
    for need in needs:
        if canonicalize_name(need.name) == DISTRIBUTION and not satisfies(__version__, need.specifier):
            return f"{DISTRIBUTION}{need.specifier}"
    return ""
