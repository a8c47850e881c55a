"""The door through which the engine process gets its executor.

Imports no torch itself: it settles what must be settled before torch is loaded, then loads it. Named in
`chatserve.engine.process`.
"""

from __future__ import annotations

import os

from chatserve.config import EngineConfig
from chatserve.engine.protocol import EngineInfo
from chatserve.scheduler.output import Executor

# How long an OpenMP thread spins at a barrier before it sleeps: about 100 µs, enough to bridge the Python between
# two operators. The default spins for milliseconds; where other processes want the same cores, a step then waits
# out the time slice of whoever displaced a thread, hundreds of times (measured: 50 times slower).
_OPENMP_SPINS = "2000"


def create_executor(config: EngineConfig) -> tuple[Executor, EngineInfo]:
    """Load the configured model, ready for its first plan.

    Raises:
        ModelLoadError: the folder holds no model we can run.
        ConfigError: settings that this model or machine cannot satisfy.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)
    from chatserve.worker.in_process import load

    return load(config)
