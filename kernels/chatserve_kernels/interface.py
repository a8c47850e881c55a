"""What a kernel backend offers: shapes, dtypes, units and errors.

Knows the layout of the paged KV cache and the description of one step's ragged batch. Does not know models,
requests or schedulers. Model code is written against `Backend` and `AttentionStep`; `reference` is the truth the
other backends are tested against.

Words used in shapes: T tokens of the step, n sequences of the step, H query heads, K key/value heads, D head
size, B tokens per block, L layers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatserve_kernels.random import uniforms


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Runs of blocks at the beginning of several block tables; a longer one comes after those that it continues.

    Says nothing that the tables do not say; a backend may use it to read a run once for all its sequences.

    Attributes:
        num_blocks: int32 [r] as bytes, blocks of each run, computed before this step.
        starts: int32 [r + 1] as bytes; members of run i are ``[starts[i], starts[i + 1])``.
        members: int32 as bytes, sequences of the step.
    """

    num_blocks: bytes
    starts: bytes
    members: bytes


class StepBatch(NamedTuple):
    """One step's ragged batch as a plan says it: int32 arrays as bytes, tokens of a sequence contiguous.

    Attributes:
        block_tables: int64 [rows, max_blocks], the persistent batch's; physical block of each B tokens.
        rows: int32 [n], rows of ``block_tables``, one per sequence.
        num_computed: int32 [n], tokens of each that are in the cache already.
        num_new: int32 [n], tokens of each that are computed now, at least one.
        token_ids: int32 [T], those tokens.
        sources: int32 [s], sequences whose last token's logits are wanted; ``None``: those of all T tokens, which is
            how tests see every position.
        shared_runs: what the block tables begin with in common, where that is known.
    """

    block_tables: npt.NDArray[np.int64]
    rows: bytes
    num_computed: bytes
    num_new: bytes
    token_ids: bytes
    sources: bytes | None
    shared_runs: SharedRuns | None = None


class StepLogits(NamedTuple):
    """What a step gives; may be overwritten by the next.

    Attributes:
        room: float32 [s or more, vocabulary]: see `logits`.
        best: int32 [s], the largest of each row of logits, the first of equals.
        failed: sequences of which anything that was computed was not finite. Their slots were zeroed, unless only
            their logits were not.
    """

    room: Tensor
    best: npt.NDArray[np.int32]
    failed: tuple[int, ...]

    @property
    def logits(self) -> Tensor:
        """float32 [s, vocabulary]; zeros where they were not finite."""
        return self.room[: len(self.best)]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch: decodes and prefill chunks side by side, tokens of a sequence contiguous.

    Attributes:
        query_start_loc: int64 [n + 1]; tokens of sequence i are rows ``[start[i], start[i + 1])``.
        seq_lens: int64 [n]; tokens of sequence i in the cache after this step's writes. Its last
            ``start[i + 1] - start[i]`` ones are this step's.
        block_tables: int64 [n, max_blocks]; physical block of each B tokens. Entries past
            ``ceil(seq_lens[i] / B)`` are ignored, but must be valid block ids.
        slot_mapping: int64 [T]; ``block * B + offset`` where each token's key and value go.
        shared_runs: what the block tables begin with in common, where that is known.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    shared_runs: SharedRuns | None = None


class Draws(NamedTuple):
    """Tokens to draw from rows of logits: arrays as bytes, which cost a step much less than arrays.

    Attributes:
        rows: int64 [d] of the logits.
        options: float64 [d, 4], `draw_options` of each.
        seeds, positions: uint64 [d]; each draw takes the number of `chatserve_kernels.random.uniforms` that is of its
            seed and, ``steps`` after the positions were noted, of its position and as many more.
        uniform: float64 [d] in [0, 1), taken instead where given: how tests meet both ends of a token's interval.
    """

    rows: bytes
    options: bytes
    seeds: bytes
    positions: bytes
    steps: int = 0
    uniform: bytes | None = None

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Rows [d], options [d, 4] and uniform numbers [d], writable."""
        if self.uniform is None:
            positions = np.frombuffer(self.positions, np.uint64) + np.uint64(self.steps)
            uniform = uniforms(np.frombuffer(self.seeds, np.uint64), positions)
        else:
            uniform = np.frombuffer(bytearray(self.uniform), np.float64)
        rows = np.frombuffer(bytearray(self.rows), np.int64)
        return rows, np.frombuffer(bytearray(self.options), np.float64).reshape(-1, 4), uniform


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under rows of logits.

    Attributes:
        chosen: float32 [a], of one token of each row.
        top_ids: int32 [a, k], each row's most likely tokens, best first, equal ones by id.
        top: float32 [a, k], theirs.
    """

    chosen: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]


def draw_options(temperature: float, min_p: float, top_k: int, top_p: float) -> bytes:
    """What one token of `Draws` is drawn with: float64 [4], in the order of the arguments.

    Args:
        temperature: positive.
        min_p: in [0, 1], floor relative to the most likely token; 0 for off.
        top_k: 0 for off.
        top_p: in (0, 1], 1 for off.
    """
    return struct.pack("4d", temperature, min_p, top_k, top_p)


def kv_cache_shape(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """Shape of a KV cache: [blocks, L, 2 (key, value), K, B, D].

    One block is one contiguous piece over all layers, so copying, swapping or sending it is one memcpy. In which order
    the B * D numbers of a block's head lie is the backend's own affair; a cache belongs to one backend.
    """
    return (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)


class AttentionStep(Protocol):
    """Attention of one step. Index arithmetic that all layers share is done when it is made, once.

    For each layer, in any order: `write` before `attend`.
    """

    def write(self, layer: int, key_value: Tensor) -> None:
        """Store this step's keys and values.

        Args:
            layer: in [0, L).
            key_value: [T, 2, K, D], dtype of the cache; rotary embedding already applied to the keys. May be
                strided; only the last dimension must be contiguous.
        """
        ...

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention of every token over its own sequence's cache.

        Query head h reads key/value head ``h // (H / K)``.

        Args:
            query: [T, H, D], rotary embedding already applied.
            scale: multiplies query·key before the softmax.
            window: a token at position p sees positions in (p - window, p]; ``None`` sees [0, p].

        Returns:
            [T, H * D], dtype of ``query``.
        """
        ...


class Backend(Protocol):
    """A family of kernels for one kind of device.

    Every operation treats rows (tokens, sequences) independently: a row that is not finite never touches
    another. For padding to be harmless the cache must hold finite numbers only: allocate it zeroed and zero the
    slots of a step that went wrong.
    """

    name: str

    def begin_step(self, metadata: AttentionMetadata, kv_cache: Tensor) -> AttentionStep:
        """Prepare attention for one step over ``kv_cache`` (shape of `kv_cache_shape`, contiguous)."""
        ...

    def copy_blocks(self, kv_cache: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, all layers.

        Args:
            pairs: int64 [c, 2] of (source, destination). No block is both a source and a destination, and no
                destination appears twice.
        """
        ...

    def clear_slots(self, kv_cache: Tensor, slots: Tensor) -> None:
        """Zero what single tokens wrote, all layers; slots int64, as `AttentionMetadata.slot_mapping`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019, eq. 4).

        Computed in float32, result in the dtype of ``x`` (any leading shape).
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary position embedding, in place (Su et al. 2021), in the halves convention.

        Args:
            x: [T, heads, D], last dimension contiguous.
            cos: [T, 1, D].
            sin: [T, 1, D], signed: the first half carries the minus of the rotation, so that the result is
                ``x * cos + swap_halves(x) * sin``.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for gate_up [T, 2 * F] = (gate, up) → [T, F]."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Index of each row's largest, the first of equals; of its first NaN where there is one.

        Args:
            x: float32 [s, V], contiguous.

        Returns:
            int32 [s].
        """
        ...

    def draw(self, logits: Tensor, draws: Draws) -> npt.NDArray[np.int32]:
        """Temperature, min-p, top-k, top-p, then inversion of the distribution function in order of token ids.

        Tokens are ordered by logit, equal ones by id, so exactly the right number is kept. The nucleus is the
        shortest prefix whose mass reaches ``top_p`` of the mass of the top k (Holtzman et al. 2020, eq. 2). The token
        is the first whose cumulative mass exceeds that draw's uniform number of the whole: never one of probability 0.

        Args:
            logits: float32 [s, V], contiguous; not changed. Minus infinity is a logit as any other, but the largest
                of a row must be finite: else its token is meaningless, though in range.

        Returns:
            int32 [d], one token per draw; may be overwritten by the next call.
        """
        ...

    def logprobs(
        self, logits: Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobs:
        """Log-probabilities of one token of each of these rows, and of the row's ``k`` most likely.

        Args:
            logits: float32 [s, V], contiguous, finite; not changed.
            rows: [a], of the logits.
            tokens: [a].
            k: at most V are told.
        """
        ...


def check_kv_cache(kv_cache: Tensor) -> None:
    """Raise ``ValueError`` unless ``kv_cache`` has the layout of `kv_cache_shape`."""
    if kv_cache.dim() != 6 or kv_cache.shape[2] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "kv_cache must be a contiguous tensor [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; "
            f"got shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()}."
        )
    if kv_cache.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"kv_cache must be float32, bfloat16 or float16; got {kv_cache.dtype}.")
