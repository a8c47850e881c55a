"""Draws one run of `benchmarks.serving`: when tokens came, and how long people waited. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from benchmarks._load import Outcome, Summary


class PlotError(RuntimeError):
    """No plot can be made; the message says what to do."""


def pyplot() -> ModuleType:
    """matplotlib's interface, drawing into files.

    Raises:
        PlotError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("A plot needs matplotlib: pip install 'chatserve[bench]'.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(outcome: Outcome, path: Path, title: str) -> None:
    """Throughput over time, and the distributions of first-token and inter-token times, as one picture.

    Raises:
        PlotError: matplotlib is not installed.
    """
    plt = pyplot()
    summary = Summary(outcome)
    figure, (over_time, first, gaps) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    figure.suptitle(title)

    width = max(summary.seconds / 60, 0.05)
    edges = np.arange(0.0, summary.seconds + width, width)
    arrivals = [when - outcome.began for reply in outcome.replies for when in reply.times]
    counts, _ = np.histogram(arrivals, edges)
    over_time.stairs(counts / width * summary.tokens_per_event, edges, fill=True, alpha=0.6)
    over_time.set(xlabel="seconds", ylabel="tokens per second", title="Throughput", xlim=(0, summary.seconds))

    for axis, values, name in ((first, summary.ttfts, "Time to first token"), (gaps, summary.itls, "Inter-token time")):
        milliseconds = np.sort(values) * 1e3
        axis.plot(milliseconds, np.arange(1, len(milliseconds) + 1) / max(1, len(milliseconds)), drawstyle="steps-post")
        axis.set(xlabel="milliseconds", ylabel="share at most", title=name, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
