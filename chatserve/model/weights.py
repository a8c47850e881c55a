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
BLOCKS_FILE = "quantized.safetensors"

# Formats of stored blocks, and the bytes of one, which holds this many values of a row.
_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
_BLOCK_VALUES = 32


class Checkpoint:
    """Open safetensors of one folder; use as a context manager.

    Tensors stay valid after closing: each one keeps its mapping alive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._blocks: Any = None
        self._block_names: dict[str, str] = {}
        try:
            if (folder / BLOCKS_FILE).is_file():
                self._blocks = self._stack.enter_context(safe_open(folder / BLOCKS_FILE, framework="pt"))
                for name in self._blocks.keys():  # noqa: SIM118 - not a dict, iterable only by keys()
                    matrix, _, kind = name.rpartition(".")
                    self._block_names[matrix] = kind
            for path in _files(folder):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - as above
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

    @property
    def has_blocks(self) -> bool:
        """Whether any matrix is also there in the quantised format it was published in."""
        return bool(self._block_names)

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, Tensor] | None:
        """Format and uint8 blocks [rows, bytes per row] of the matrix ``name``; ``None`` where only values are kept.

        Raises:
            ModelLoadError: blocks that do not make a matrix of that shape.
        """
        kind = self._block_names.get(name)
        if kind not in _BLOCK_BYTES:
            return None
        blocks: Tensor = self._blocks.get_tensor(f"{name}.{kind}")
        expected = (shape[0], shape[1] // _BLOCK_VALUES * _BLOCK_BYTES[kind])
        if tuple(blocks.shape) != expected or shape[1] % _BLOCK_VALUES or blocks.dtype != torch.uint8:
            raise ModelLoadError(
                f"Blocks of {name!r} in {self._folder / BLOCKS_FILE} are {tuple(blocks.shape)}, expected {expected}."
            )
        return kind, blocks


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
        files = sorted(path for path in folder.glob("*.safetensors") if path.name != BLOCKS_FILE)
    if not files:
        raise ModelLoadError(f"{folder} has no *.safetensors weights.")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}; the download is incomplete.")
    return files
