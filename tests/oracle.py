"""The oracle model: a network of integers whose every token depends on everything the cache holds.

The KV entry of position *i* is a pair: *content*, a mix of (position, token, content of position *i-1* as read back
through the block table), and *owner*, the scope that computed it. The next token is a function of all contents
read back through the table. Any aliased, stale or torn block, any off-by-one, changes every later token; any
block of a scope that the reader may not see raises. It is an `Executor`, selected like any other, and it also
answers what a request's tokens should have been (`expected_output`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.sampling_params import SamplingParams
from chatserve.scheduler.output import ModelRunnerOutput, NewSequence, SampleLogprobs, SchedulerOutput, SharedRuns

U64 = npt.NDArray[np.uint64]

_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_FACTOR, -1, 2**64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_POISON = np.uint64(0xDEADBEEFDEADBEEF)

VOCAB_SIZE = 1000
EOS = 7


class OracleError(AssertionError):
    """The cache lied: a block was read that holds the wrong content or belongs to a foreign scope."""


def _mix(values: U64) -> U64:
    mixed = values ^ (values >> np.uint64(32))
    mixed = mixed * _MIX
    result: U64 = mixed ^ (mixed >> np.uint64(29))
    return result


class _Powers:
    """Powers of the chain's factor and of its inverse, grown on demand."""

    def __init__(self) -> None:
        self.up = np.ones(1, np.uint64)
        self.down = np.ones(1, np.uint64)

    def reach(self, count: int) -> None:
        while len(self.up) < count:
            size = len(self.up)
            with np.errstate(over="ignore"):
                self.up = np.concatenate((self.up, self.up * np.uint64(pow(_FACTOR, size, 2**64))))
                self.down = np.concatenate((self.down, self.down * np.uint64(pow(_INVERSE, size, 2**64))))


_POWERS = _Powers()


def chain(previous: int, start: int, tokens: npt.NDArray[np.int32]) -> U64:
    """Contents of positions ``start…``: ``c[i] = c[i-1] * F + mix(i, token[i])`` modulo 2**64, vectorised."""
    count = len(tokens)
    _POWERS.reach(count + 1)
    with np.errstate(over="ignore"):
        positions = np.arange(start, start + count, dtype=np.uint64)
        terms = _mix(positions * np.uint64(0x100000001B3) + tokens.astype(np.uint64) + np.uint64(1))
        scaled = np.cumsum(terms * _POWERS.down[1 : count + 1], dtype=np.uint64)
        return _POWERS.up[1 : count + 1] * (np.uint64(previous) + scaled)


def next_token(contents: U64, sampling: SamplingParams, vocab_size: int = VOCAB_SIZE) -> int:
    """The token after a context with these contents (all positions weigh in)."""
    with np.errstate(over="ignore"):
        weights = np.arange(1, len(contents) + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        folded = (_mix(contents) * weights).sum(dtype=np.uint64)
        if sampling.temperature > 0:
            folded ^= _mix(np.array([sampling.seed or 0], np.uint64) + np.uint64(len(contents)))[0]
        return int(_mix(np.array([folded], np.uint64))[0] % np.uint64(vocab_size))


def expected_output(prompt: list[int], sampling: SamplingParams, count: int, eos: int | None = EOS) -> list[int]:
    """The first ``count`` tokens this model gives to ``prompt`` on a fresh server, end token included."""
    tokens = array("i", prompt)
    output: list[int] = []
    contents = chain(0, 0, np.array(tokens, np.int32))
    for _ in range(count):
        token = next_token(contents, sampling)
        output.append(token)
        past_minimum = len(output) > sampling.min_tokens
        if past_minimum and ((token == eos and not sampling.ignore_eos) or token in sampling.stop_token_ids):
            break
        fresh = chain(int(contents[-1]), len(contents), np.array([token], np.int32))
        contents = np.concatenate((contents, fresh))
    return output


class _Row:
    def __init__(self, new: NewSequence) -> None:
        self.table = np.frombuffer(new.block_table, np.int32).copy()
        self.sampling = new.sampling
        self.scopes = new.scopes


class OracleExecutor:
    """Runs plans on integer KV. Freed rows and poisoned blocks make use-after-free visible."""

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.content: U64 = np.full((num_blocks, block_size), _POISON, np.uint64)
        self.owner = np.full((num_blocks, block_size), -1, np.int32)
        self.host_content: U64 = np.full((num_host_blocks, block_size), _POISON, np.uint64)
        self.host_owner = np.full((num_host_blocks, block_size), -1, np.int32)
        self.rows: dict[int, _Row] = {}
        self.num_tokens = 0
        self.nan_tokens: frozenset[int] = frozenset()
        """Tokens that make the row running them fail, as NaN activations would."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for row in np.frombuffer(plan.freed_rows, np.int32).tolist():
            del self.rows[row]
        for new in plan.new_sequences:
            if new.row in self.rows:
                raise OracleError(f"row {new.row} is given out twice")
            self.rows[new.row] = _Row(new)
        self._change_tables(plan)
        for content, owner, cleared in (
            (self.content, self.owner, plan.clears),
            (self.host_content, self.host_owner, plan.host_clears),
        ):
            content[np.frombuffer(cleared, np.int32)] = 0
            owner[np.frombuffer(cleared, np.int32)] = -1
        self._copy(plan)
        rows = np.frombuffer(plan.rows, np.int32)
        computed = np.frombuffer(plan.num_computed, np.int32)
        num_new = np.frombuffer(plan.num_new, np.int32)
        tokens = np.frombuffer(plan.token_ids, np.int32)
        if len(set(rows.tolist())) != len(rows):
            raise OracleError("a row is scheduled twice in one step")
        if plan.shared_runs is not None:
            self._check_runs(plan.shared_runs, rows, computed)
        ends = np.cumsum(num_new)
        if (num_new < 1).any() or int(num_new.sum()) != len(tokens):
            raise OracleError("token counts and tokens of a plan disagree")
        failed = []
        written: set[int] = set()
        for index, row in enumerate(rows.tolist()):
            run = tokens[ends[index] - num_new[index] : ends[index]]
            written |= self._forward(self.rows[row], int(computed[index]), run, written)
            if self.nan_tokens and not self.nan_tokens.isdisjoint(run.tolist()):
                failed.append(index)
        sampled, logprobs = [], []
        sources = np.frombuffer(plan.sample_sources, np.int32).tolist()
        for source, row in zip(sources, np.frombuffer(plan.sample_rows, np.int32).tolist(), strict=True):
            length = int(computed[source] + num_new[source])
            state = self.rows[row]
            token = next_token(self._read(state, length), state.sampling, self.vocab_size)
            sampled.append(token)
            wanted = state.sampling.logprobs is not None
            # A made-up number that names token and position, so that a shifted or spliced list is visible.
            logprobs.append(SampleLogprobs(-float(token) - length / 1e6, b"", b"") if wanted else None)
        return ModelRunnerOutput(
            np.array(sampled, np.int32).tobytes(),
            tuple(failed),
            tuple(logprobs) if any(entry is not None for entry in logprobs) else None,
        )

    def shutdown(self) -> None:
        self.rows.clear()

    def _change_tables(self, plan: SchedulerOutput) -> None:
        rows = np.frombuffer(plan.table_rows, np.int32).tolist()
        indices = np.frombuffer(plan.table_indices, np.int32).tolist()
        blocks = np.frombuffer(plan.table_blocks, np.int32).tolist()
        for row, index, block in zip(rows, indices, blocks, strict=True):
            state = self.rows[row]
            if index == len(state.table):
                state.table = np.append(state.table, np.int32(block))
            else:
                state.table[index] = block

    def _check_runs(self, runs: SharedRuns, rows: npt.NDArray[np.int32], computed: npt.NDArray[np.int32]) -> None:
        """What is said to be shared is: the same blocks, all of their tokens computed before this step."""
        starts = np.frombuffer(runs.starts, np.int32)
        members = np.frombuffer(runs.members, np.int32)
        for i, count in enumerate(np.frombuffer(runs.blocks, np.int32).tolist()):
            group = members[starts[i] : starts[i + 1]]
            tables = {self.rows[row].table[:count].tobytes() for row in rows[group].tolist()}
            if len(tables) != 1 or len(group) < 2 or computed[group].min() < count * self.block_size:
                raise OracleError(f"rows {rows[group].tolist()} do not share {count} computed blocks")

    def _copy(self, plan: SchedulerOutput) -> None:
        device, host = (self.content, self.owner), (self.host_content, self.host_owner)
        for pairs, source, destination in (
            (plan.demotions, device, host),
            (plan.promotions, host, device),
            (plan.copies, device, device),
        ):
            moves = np.frombuffer(pairs, np.int32).reshape(-1, 2)
            sources, destinations = set(moves[:, 0].tolist()), set(moves[:, 1].tolist())
            if len(destinations) != len(moves) or (source is destination and sources & destinations):
                raise OracleError("sources and destinations of copies overlap")
            destination[0][moves[:, 1]] = source[0][moves[:, 0]]
            destination[1][moves[:, 1]] = source[1][moves[:, 0]]
            if destination is host:
                self._forget(moves[:, 0])

    def _forget(self, demoted: int | npt.NDArray[np.int32]) -> None:
        """A demoted block may be given out in the same plan; its old content must not be read again."""
        self.content[demoted] = _POISON

    def _touch(self, blocks: Iterable[int]) -> None:
        """These device blocks are about to be read or written; here, all copies are done by then."""

    def _forward(self, row: _Row, start: int, tokens: npt.NDArray[np.int32], written: set[int]) -> set[int]:
        size = self.block_size
        positions = np.arange(start, start + len(tokens))
        blocks = row.table[positions // size]
        touched = set(blocks.tolist())
        self._touch(touched)
        if touched & written:
            raise OracleError("two rows write into one block in one step")
        previous = int(self._read(row, start)[-1]) if start else 0
        self.content[blocks, positions % size] = chain(previous, start, tokens)
        self.owner[blocks, positions % size] = row.scopes[-1]
        # Whatever lay behind the written tokens is garbage now; nobody may rely on it.
        behind = (start + len(tokens)) % size
        if behind:
            self.content[blocks[-1], behind:] = _POISON
            self.owner[blocks[-1], behind:] = -1
        self.num_tokens += len(tokens)
        return touched

    def _read(self, row: _Row, length: int) -> U64:
        table = row.table[: -(-length // self.block_size)]
        self._touch(table.tolist())
        owners = np.unique(self.owner[table].reshape(-1)[:length]).tolist()
        if not set(owners) <= set(row.scopes):
            raise OracleError(f"scopes {owners} read by one that may see {row.scopes}")
        return self.content[table].reshape(-1)[:length]


def oracle_info(
    config: EngineConfig, *, num_blocks: int = 256, max_model_len: int = 2048, num_host_blocks: int = 0
) -> EngineInfo:
    """Facts of an oracle engine with the pool that ``config`` asks for."""
    blocks = config.cache.num_blocks or num_blocks
    length = config.model.max_model_len or max_model_len
    return EngineInfo(
        model=config.model.name or "oracle",
        weights_revision="oracle-1",
        vocab_size=VOCAB_SIZE,
        max_model_len=length,
        max_tokens_in_pool=blocks * config.cache.block_size + 1,
        block_size=config.cache.block_size,
        num_blocks=blocks,
        kv_bytes_per_token=12,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype="uint64",
        device="cpu",
        threads=1,
        pid=os.getpid(),
        eos_token_ids=(EOS,),
        num_host_blocks=num_host_blocks,
    )


def create_oracle_executor(config: EngineConfig) -> tuple[OracleExecutor, EngineInfo]:
    """Executor factory, named in `EngineConfig.executor`."""
    info = oracle_info(config)
    return OracleExecutor(info.num_blocks, info.block_size), info
