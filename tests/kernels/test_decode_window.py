"""Dense windows of decoding sequences: never stale, whatever comes and goes, and really used while nothing does."""

from __future__ import annotations

import random

import pytest
import torch
from chatserve_kernels.interface import AttentionMetadata, kv_cache_shape
from chatserve_kernels.reference import ReferenceBackend
from chatserve_kernels.torch_backend import TorchBackend
from torch import Tensor

BLOCK_SIZE, KV_HEADS, HEADS, DIM, LAYERS = 4, 2, 6, 8, 2
MAX_BLOCKS = 40


class World:
    """Sequences with scattered blocks of one pool, stepped on the torch backend and on the reference at once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.backend = TorchBackend()
        self.cache = torch.zeros(kv_cache_shape(400, LAYERS, KV_HEADS, BLOCK_SIZE, DIM))
        self.mirror = self.cache.clone()
        self.free = list(range(400))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def join(self, name: int) -> None:
        self.tables[name], self.lengths[name] = [], 0

    def leave(self, name: int) -> None:
        # Most recently used blocks are handed out again first: the hardest case for stale copies.
        self.free += self.tables.pop(name)
        del self.lengths[name]

    def copy_last_block(self, name: int) -> None:
        old, new = self.tables[name][-1], self.free.pop()
        self.tables[name][-1] = new
        self.free.append(old)
        for backend, cache in ((self.backend, self.cache), (ReferenceBackend(), self.mirror)):
            backend.copy_blocks(cache, torch.tensor([[old, new]]))

    def step(self, work: dict[int, int]) -> int:
        """Run ``work[name]`` tokens of each sequence; compare all layers; returns how many groups had a window."""
        for name, count in work.items():
            self.lengths[name] += count
            while len(self.tables[name]) * BLOCK_SIZE < self.lengths[name]:
                self.tables[name].append(self.free.pop())
        tables = torch.zeros(len(work), MAX_BLOCKS, dtype=torch.int64)
        slots = []
        for i, (name, count) in enumerate(work.items()):
            tables[i, : len(self.tables[name])] = torch.tensor(self.tables[name])
            for position in range(self.lengths[name] - count, self.lengths[name]):
                slots.append(self.tables[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        counts = torch.tensor(list(work.values()))
        metadata = AttentionMetadata(
            query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
            seq_lens=torch.tensor([self.lengths[name] for name in work]),
            block_tables=tables,
            slot_mapping=torch.tensor(slots),
        )
        step = self.backend.begin_step(metadata, self.cache)
        expected = ReferenceBackend().begin_step(metadata, self.mirror)
        for layer in range(LAYERS):
            query = self._random(len(slots), HEADS, DIM)
            key_value = self._random(len(slots), 2, KV_HEADS, DIM)
            for one in (step, expected):
                one.write(layer, key_value)
            torch.testing.assert_close(
                step.attend(layer, query, 0.3, None), expected.attend(layer, query, 0.3, None), rtol=1e-4, atol=1e-4
            )
        return sum(group.window is not None for group in step.decode_groups)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


@pytest.mark.parametrize("seed", range(6))
def test_attention_is_right_while_sequences_come_and_go(seed: int) -> None:
    """Joins, prefills beside decodes, leaves with immediate reuse of blocks, copies, skipped sequences, reordering:
    at every step the result is the reference's; and windows were in use in many of them."""
    world = World(seed)
    windows = 0
    for step in range(120):
        event = world.rng.random()
        if len(world.tables) < 2 or (event < 0.1 and len(world.tables) < 7):
            world.join(step)
        elif event < 0.17:
            world.leave(world.rng.choice(list(world.tables)))
        elif event < 0.22:
            name = world.rng.choice(list(world.tables))
            if world.tables[name]:
                world.copy_last_block(name)
        names = list(world.tables)
        if event > 0.93:
            world.rng.shuffle(names)
            names = names[: world.rng.randint(1, len(names))]
        work = {name: 1 if world.lengths[name] else world.rng.randint(1, 30) for name in names}
        for name in [name for name in work if world.lengths[name] + work[name] > MAX_BLOCKS * BLOCK_SIZE]:
            del work[name]
            world.leave(name)
        if work:
            windows += world.step(work)
    assert windows > 20


def test_an_undisturbed_batch_gathers_only_once() -> None:
    """From the third step on a steady batch reads its window, past block edges and past its first capacity."""
    world = World(0)
    for name in range(3):
        world.join(name)
    assert world.step({0: 5, 1: 9, 2: 1}) == 0
    used = [world.step({0: 1, 1: 1, 2: 1}) for _ in range(100)]
    assert used == [0] + [1] * 99


def test_a_reused_block_is_not_mistaken_for_its_last_user() -> None:
    """A newcomer that gets a leaver's very blocks, with one token more than it had, reads its own tokens."""
    world = World(1)
    for name in (1, 2):
        world.join(name)
    world.step({1: 6, 2: 6})
    for _ in range(4):
        world.step({1: 1, 2: 1})
    table, length = list(world.tables[2]), world.lengths[2]
    world.leave(2)
    world.join(3)
    world.free = [block for block in world.free if block not in table] + table[::-1]
    world.step({1: 1, 3: length})
    assert world.tables[3] == table
    world.step({1: 1, 3: 1})
    world.step({1: 1, 3: 1})
