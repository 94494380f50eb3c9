"""The curve of a job: reward and staleness over the time of training, as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from redrb.launch.history import History


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_curve(path: Path, history: History, *, title: str) -> None:
    """Draw reward and staleness over time to a PNG file.

    Args:
        path: The file.
        history: Has at least one reward.
        title: Its title.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    seconds, rewards = zip(*history.rewards, strict=True)
    above.plot(seconds, rewards, marker="o", markersize=4, color="tab:blue")
    above.set(ylabel="reward")
    if all(0 <= reward <= 1 for reward in rewards):
        above.set_ylim(0, 1.02)
    above.set_title(title, loc="left")
    if history.ages:
        seconds, mean, largest = zip(*history.ages, strict=True)
        below.fill_between(seconds, largest, color="tab:orange", alpha=0.25, label="max", lw=0)
        below.plot(seconds, mean, color="tab:orange", lw=1, label="mean")
        below.legend(loc="lower right", ncols=2, frameon=False, bbox_to_anchor=(1, 0.98))
    below.set(ylabel="staleness\n(weight versions)", xlabel="seconds since training began")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
