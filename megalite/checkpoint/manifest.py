"""`manifest.json`, the description of a checkpoint: written last, checked before use.

It holds every tensor's global name, shape and dtype, the rectangles it is stored as, the trainer's
state, the resolved config, the layout and versions, and size and sha256 of every file. Checksums
are per file, not per rectangle: each byte is hashed once while it is written (about 1.5 GB/s per
core) and once when verified, shared over the ranks.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from megalite import __version__
from megalite.checkpoint.names import MANIFEST
from megalite.errors import CheckpointError
from megalite.layout.rectangles import Rectangle, why_not_cover

FORMAT_VERSION = 1
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")

# The types that tensors are stored as, and their codes in safetensors files.
DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileEntry(_Strict):
    """The size and checksum that a shard file must have."""

    size_bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredRectangle(_Strict):
    """One stored rectangle of a global tensor: the tensor `key` of `file`, or a view of it."""

    file: str
    key: str
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]

    @property
    def box(self) -> Rectangle:
        """The rectangle's place in the global tensor."""
        return Rectangle(self.offsets, self.sizes)

    @property
    def key_shape(self) -> tuple[int, ...]:
        """The shape of the whole stored tensor."""
        return self.sizes

    def view(self, stored: Any) -> Any:
        """The rectangle in the whole stored tensor, as a view of `sizes`."""
        return stored


class TensorEntry(_Strict):
    """One global tensor and the rectangles that hold it, each element exactly once."""

    shape: tuple[Count, ...]
    dtype: str
    rectangles: tuple[StoredRectangle, ...]


class Manifest(_Strict):
    """The whole description of a checkpoint; a ValidationError if its parts contradict each other.

    `config` is the config as text or JSON, `state` the trainer's, `layout` axis name -> size.
    """

    format: Literal["megalite-checkpoint"] = "megalite-checkpoint"
    version: Literal[1] = 1
    step: Count
    versions: dict[str, str]
    layout: dict[str, int]
    config: JsonValue
    state: dict[str, JsonValue]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _check_consistency(self) -> Manifest:
        # A name must not lead out of the directory: files are opened by it.
        for name in self.files:
            if not _SAFE_NAME.fullmatch(name):
                raise ValueError(f"file {name!r} is not a plain name in the checkpoint directory")

        # Loading relies on this: every element of every tensor is stored exactly once.
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPE_CODES:
                raise ValueError(f"tensor {name}: unknown dtype {tensor.dtype!r}")
            for stored in tensor.rectangles:
                if stored.file not in self.files:
                    raise ValueError(f"tensor {name}: file {stored.file!r} is not listed")
            problem = why_not_cover(tensor.shape, [r.box for r in tensor.rectangles])
            if problem:
                raise ValueError(f"tensor {name} is not complete: {problem}")
        return self


def make_manifest(**fields: Any) -> Manifest:
    """Build and check a manifest; adds the versions. Raises CheckpointError with the problem."""
    versions = {
        "megalite": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    try:
        return Manifest(versions=versions, **fields)
    except ValidationError as error:
        raise CheckpointError(f"cannot describe the checkpoint: {_first_problem(error)}") from error


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest file's content: the description and, beside it, its sha256."""
    body = _to_json(manifest.model_dump(mode="json"))
    digest = hashlib.sha256(body).hexdigest()
    return b'{"sha256":"%s",\n"manifest":%s}\n' % (digest.encode(), body)


def read_manifest(directory: Path) -> Manifest:
    """Read and check a directory's manifest. Raises CheckpointError naming the file."""
    path = directory / MANIFEST
    try:
        return from_bytes(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a valid manifest: {_first_problem(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def manifest_hash(directory: Path) -> str:
    """The sha256 of a directory's manifest file, "" if there is none: the checkpoint's identity."""
    path = directory / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def from_bytes(data: bytes) -> Manifest:
    """Parse and check a manifest file's content. Raises ValueError or ValidationError."""
    outer = json.loads(data)
    if not isinstance(outer, dict) or outer.keys() != {"sha256", "manifest"}:
        raise ValueError("it does not hold a manifest with its checksum")
    inner = outer["manifest"]

    # The checksum and the version come before the schema: a damaged file, or one of another
    # version, would otherwise be refused for some field of it.
    body = _to_json(inner)
    if hashlib.sha256(body).hexdigest() != outer["sha256"]:
        raise ValueError("its content does not match its own sha256")
    version = inner.get("version") if isinstance(inner, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {version}; this megalite reads {FORMAT_VERSION}")
    return Manifest.model_validate_json(body)


def _to_json(document: Any) -> bytes:
    """The bytes that the checksum covers: JSON without white space, keys in the order saved."""
    return json.dumps(document, separators=(",", ":")).encode()


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
