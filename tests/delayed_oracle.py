"""The oracle model with copies between the tiers that take their time.

A worker may overlap a plan's demotions and promotions with its other work, as a copy engine of a GPU does. What
`BlockCopies` promises leaves it this freedom, and this executor takes all of it, at random: a demotion happens when
its source is about to be written, its destination is about to be read, or the plan ends; a promotion when its
destination is about to be read or written, or the plan ends; or either at any moment before. Nothing else waits for
them. Every block that comes back is compared with the checksum taken when it was sent away.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

import numpy as np

from chatserve.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.oracle import OracleError, OracleExecutor


class DelayedOracleExecutor(OracleExecutor):
    """See the module.

    Attributes:
        num_late: copies that ran after the forward had begun.
        num_forced: of these, those that something had to wait for.
        num_checked: promoted blocks whose checksum was compared.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_host_blocks: int, seed: int) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.num_late = 0
        self.num_forced = 0
        self.num_checked = 0
        self._random = random.Random(seed)
        self._demotions: dict[int, int] = {}
        """Device block → host block, not yet copied."""
        self._promotions: dict[int, int] = {}
        """Device block → host block it waits for."""
        self._demoted_to: dict[int, int] = {}
        """Host block → device block, of the demotions not yet copied."""
        self._sums: dict[int, int] = {}
        """Host block → checksum of what was sent there."""
        self._forward_begun = False

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._forward_begun = False
        output = super().execute(plan)
        while self._demotions or self._promotions:
            self._run_one()
        return output

    def _copy(self, plan: SchedulerOutput) -> None:
        for host in np.frombuffer(plan.host_clears, np.int32).tolist():
            self._sums.pop(host, None)
        for device, host in _pairs(plan.demotions):
            self._demotions[device] = host
            self._demoted_to[host] = device
            self._sums[host] = _checksum(self.content[device], self.owner[device])
        for device, host in ((device, host) for host, device in _pairs(plan.promotions)):
            self._promotions[device] = host
        if len(self._demotions) != len(self._demoted_to) or len(self._promotions) * 8 != len(plan.promotions):
            raise OracleError("two copies of a plan have one destination, or one source is demoted twice")
        for source, destination in _pairs(plan.copies):
            self._touch((source, destination))
            self.content[destination] = self.content[source]
            self.owner[destination] = self.owner[source]
        self._let_time_pass()
        self._forward_begun = True

    def _touch(self, blocks: Iterable[int]) -> None:
        """These device blocks are about to be read or written: what concerns them cannot wait any longer."""
        for block in blocks:
            waited = (block in self._promotions) + (block in self._demotions)
            self.num_forced += waited
            self._promote(block)
            self._demote(block)
        self._let_time_pass()

    def _let_time_pass(self) -> None:
        while (self._demotions or self._promotions) and self._random.random() < 0.2:
            self._run_one()

    def _run_one(self) -> None:
        waiting = [*self._demotions, *self._promotions]
        block = self._random.choice(waiting)
        self._demote(block)
        self._promote(block)

    def _demote(self, device: int) -> None:
        host = self._demotions.pop(device, None)
        if host is None:
            return
        del self._demoted_to[host]
        self.num_late += self._forward_begun
        self.host_content[host] = self.content[device]
        self.host_owner[host] = self.owner[device]
        self._forget(device)

    def _promote(self, device: int) -> None:
        host = self._promotions.pop(device, None)
        if host is None:
            return
        self._demote(device)  # written below
        if host in self._demoted_to:
            self._demote(self._demoted_to[host])  # read below
        self.num_late += self._forward_begun
        if _checksum(self.host_content[host], self.host_owner[host]) != self._sums.get(host):
            raise OracleError(f"host block {host} does not hold what was sent there")
        self.num_checked += 1
        self.content[device] = self.host_content[host]
        self.owner[device] = self.host_owner[host]


def _pairs(pairs: bytes) -> list[tuple[int, int]]:
    return [(a, b) for a, b in np.frombuffer(pairs, np.int32).reshape(-1, 2).tolist()]


def _checksum(content: np.ndarray, owner: np.ndarray) -> int:
    return zlib.crc32(owner.tobytes(), zlib.crc32(content.tobytes()))
