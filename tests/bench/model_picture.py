"""How the gain over the synchronous loop grows with the tail of the lengths, and with the split of the devices: docs/model.png.

python tests/bench/model_picture.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from model import LOOPS, Engines, lognormal, step_times


def draw(path: Path) -> None:
    """How the gain over sync grows with the tail of the lengths, and with the split of 16 devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    sigmas, servers = np.linspace(0, 1.4, 8), np.arange(2, 15)

    def gain(loop: str, n: int, sigma: float) -> float:
        def run(engines: int, trainers: int, **knobs) -> float:
            group = Engines(engines, t0=0.02, t1=0.0002, group_size=8, prefill_s=1e-4)
            train = [640 / trainers] * 10  # 40 s on all 16, about as long as they generate a batch of lengths without a tail
            return step_times(group, lognormal(1024, sigma, 8192), 64, train, 2.0, **knobs)[2:-2].mean()

        return run(16, 16) / run(n, 16 - n, **LOOPS[loop])

    for loop, color in (("one-step-off", "#E69F00"), ("partial", "#009E73")):
        axes[0].plot(sigmas, [gain(loop, 10, s) for s in sigmas], "o-", color=color, label=loop)
        axes[1].plot(servers, [gain(loop, int(n), 0.8) for n in servers], "o-", color=color, label=loop)
    axes[0].set(
        xlabel="tail of the lengths: sigma of a lognormal, mean 1,024, at most 8,192", ylabel="steps per second, sync = 1"
    )
    axes[1].set(xlabel="devices that generate, of 16 (sigma 0.8); the others train")
    for axis in axes:
        axis.axhline(1, color="#333333", linewidth=1)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).resolve().parents[2] / "docs" / "model.png")
