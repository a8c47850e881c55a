"""Where each token of a step lies, as tensors: what networks that run operator by operator need.

Knows batches and block tables, no weights. `chatserve.model.transformer` is the caller; the compiled kernels do the
same inside their one call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from chatserve_kernels.interface import AttentionMetadata, StepBatch

_Int64 = npt.NDArray[np.int64]


def lay_out(batch: StepBatch, block_size: int) -> tuple[_Int64, AttentionMetadata]:
    """Positions [T] and attention metadata of a step."""
    rows, num_computed, num_new = int64(batch.rows), int64(batch.num_computed), int64(batch.num_new)
    starts: _Int64 = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(num_new, out=starts[1:])
    positions = np.arange(starts[-1]) + np.repeat(num_computed - starts[:-1], num_new)
    seq_lens = num_computed + num_new
    tables = batch.block_tables[rows, : -(-int(seq_lens.max()) // block_size)]
    block, offset = np.divmod(positions, block_size)
    slots = tables[np.repeat(np.arange(len(rows)), num_new), block] * block_size + offset
    return positions, AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots),
        shared_runs=batch.shared_runs,
    )


def int64(data: bytes) -> _Int64:
    """int32 values, ready to index with."""
    return np.frombuffer(data, dtype="<i4").astype(np.int64)
