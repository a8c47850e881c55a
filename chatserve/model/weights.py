"""Reads tensors of a model folder by name, memory-mapped, from one safetensors file or many shards.

Knows file formats and shapes, not what the tensors mean. A missing, misshapen or damaged tensor is a
`ModelLoadError` that names it. `chatserve.model.transformer` is the caller.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatserve.errors import ModelLoadError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Open safetensors of one folder; use as a context manager.

    Tensors stay valid after closing: each one keeps its mapping alive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for path in _files(folder):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - not a dict, iterable only by keys()
                    self._file_of[name] = file
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise ModelLoadError(f"Weights in {folder} cannot be read: {error}. Fetch the model again.") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor called ``name``, converted to ``dtype`` (no copy where it has that dtype already).

        Raises:
            ModelLoadError: missing, of another shape, or not a floating-point tensor.
        """
        if name not in self._file_of:
            raise ModelLoadError(f"Weights in {self._folder} lack the tensor {name!r}.")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"Tensor {name!r} in {self._folder} has shape {tuple(tensor.shape)}, but config.json implies {shape}."
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(f"Tensor {name!r} in {self._folder} has dtype {tensor.dtype}; expected floats.")
        return tensor.to(dtype)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a safetensors index: {error!r}.") from error
        # Only the base name: an index must not lead out of its folder.
        files = [folder / Path(str(name)).name for name in sorted(names)]
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no *.safetensors weights.")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}; the download is incomplete.")
    return files
