"""Packages whose kernels are used if they are installed and a config names them.

What is missing is an error that says how to install it; nothing here falls back to another kernel.
others/apex.py and others/attention.py use the kernels.

apex means NVIDIA's, which is installed from source. The project called apex on PyPI is an unrelated
toolkit for Pyramid. So a package of that name is not enough: its folders and its compiled half,
`amp_C`, are looked for before anything of it is imported.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention

from megalite.kernels.errors import BackendError

_APEX_SOURCE = (
    "install NVIDIA's from source, https://github.com/NVIDIA/apex, with its C++ and CUDA "
    "extensions, or use an image that has it (`pip install apex` gets an unrelated project)"
)
_TORCH_IMPLS = {
    "fa3": ("FA3", "flash_attn_interface", "FlashAttention 3, the hopper/ folder of flash-attn"),
    "fa4": ("FA4", "flash_attn.cute.interface", "FlashAttention 4, `pip install flash-attn-4`"),
}


def apex_attribute(module: str, attribute: str, setting: str) -> Any:
    """An attribute of a module of NVIDIA's apex.

    setting: "NAME=VALUE" of the setting that needs it, for the message. Raises BackendError if apex
    is missing, incomplete, or the unrelated project.
    """
    _require_nvidia_apex(setting)
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # OSError: no library
        raise BackendError(
            f"{setting}: {module} of the installed apex cannot be imported ({error}); "
            f"{_APEX_SOURCE}"
        ) from error
    if not hasattr(found, attribute):
        raise BackendError(f"{setting}: {module} has no {attribute}; {_APEX_SOURCE}")
    return getattr(found, attribute)


def _require_nvidia_apex(setting: str) -> None:
    """Raise BackendError unless apex is NVIDIA's, with its extensions. Imports nothing of it."""
    spec = find_spec("apex")
    if spec is None:
        raise BackendError(f"{setting}: apex is not installed; {_APEX_SOURCE}")
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        raise BackendError(
            f"{setting}: the installed apex{_described('apex')} is not NVIDIA's but the unrelated "
            f"project of that name; uninstall it and {_APEX_SOURCE}"
        )
    if find_spec("amp_C") is None:
        raise BackendError(
            f"{setting}: the installed apex was built without its CUDA extensions (no module "
            f"amp_C); {_APEX_SOURCE}"
        )


def _described(project: str) -> str:
    """A project's version and summary in brackets; "" if it has no metadata."""
    try:
        metadata = distribution(project).metadata
    except PackageNotFoundError:
        return ""
    return f" ({metadata['Version']}: {metadata['Summary']})"


def require_flash(name: str) -> None:
    """Raise BackendError unless torch can take FA3 or FA4, and the package is there.

    Does not activate it.
    """
    impl, module, package = _TORCH_IMPLS[name]
    listed: list[str] = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    if impl not in listed or not _varlen_takes("window_size", "enable_gqa"):
        raise BackendError(
            f"kernels.attention={name}: torch {torch.__version__} cannot take {impl} into its "
            "attention; use torch 2.13 or newer, or kernels.attention=auto"
        )
    top, _, rest = module.partition(".")
    spec = find_spec(top)
    if spec is None or not _has_submodule(spec.submodule_search_locations or (), rest):
        raise BackendError(
            f"kernels.attention={name}: no module {module}; install {package}, or use "
            "kernels.attention=auto"
        )


def _varlen_takes(*names: str) -> bool:
    """True if torch's attention over packed documents exists and has these arguments."""
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return False
    return set(names) <= set(inspect.signature(varlen.varlen_attn).parameters)


def _has_submodule(places: Any, dotted: str) -> bool:
    """True if a package in `places` has a module; does not import the package."""
    if not dotted:
        return True
    path = Path(*dotted.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return any((Path(place) / file).is_file() for place in places for file in files)


def activate_flash(name: str) -> None:
    """Make torch's flash attention use FA3 or FA4 in this process. Raises BackendError."""
    impl, module, package = _TORCH_IMPLS[name]
    if torch.nn.attention.current_flash_attention_impl() == impl:
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(impl)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise BackendError(
            f"kernels.attention={name}: torch cannot take {module} into its attention ({error}); "
            f"install {package}, or use kernels.attention=auto"
        ) from error
