"""What does a sync cost? The trainer's weights to 1, 2 and 4 vLLM servers, beside one copy of them in memory.

    python tests/bench/sync.py                       # the pocket policy: about 2 minutes on two cores
    python tests/bench/sync.py --model FOLDER        # another one, such as SmolLM2-135M

out      the trainer's part: weights to bytes, bytes into Ray's object store; it happens once, however many servers there are
move     what a server does but for the engine: from the object store to a file in memory
load     the engine's own part (reading the file, repacking each matrix), while other servers do the same: on a GPU this is
         another thing
copy     the same bytes copied by numpy, into memory that was touched before

Must reach: out + move at most 3 times the copy for a model of 100 MB and more; and from 1 to 2 to 4 servers the whole grows
by less, for each that is added, than the load where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import run_gsm8k  # noqa: E402
from partial_rollout import VLLMServer  # noqa: E402
from trainer import GRPOTrainer, load_policy  # noqa: E402


class Timed(VLLMServer):
    """A server that says how long its part took, and the engine's."""

    async def _load_file(self, weights: object) -> None:
        start = time.perf_counter()
        await super()._load_file(weights)
        self.load_s = time.perf_counter() - start - self.move_s

    def _write_file(self, weights: object) -> None:
        start = time.perf_counter()
        super()._write_file(weights)
        self.move_s = time.perf_counter() - start

    async def seconds(self) -> tuple[float, float]:
        """(of the move, of the load) in the last sync."""
        return self.move_s, self.load_s


async def measure(servers: list, trainer: GRPOTrainer, rounds: int) -> dict[str, float]:
    """Medians, in milliseconds."""
    import ray

    figures: dict[str, list[float]] = {name: [] for name in ("whole", "out", "move", "load", "copy")}
    other = np.zeros_like(np.frombuffer(trainer.weights(), np.uint8))
    for _ in range(rounds + 1):
        trainer.param_version += 1
        start = time.perf_counter()
        weights = np.frombuffer(trainer.weights(), np.uint8)
        ref = ray.put(weights)
        out = time.perf_counter()
        await asyncio.gather(*[server.update_weights.remote(ref, trainer.param_version) for server in servers])
        end = time.perf_counter()
        move, load = np.mean(await asyncio.gather(*[server.seconds.remote() for server in servers]), axis=0)
        copying = time.perf_counter()
        np.copyto(other, weights)
        copied = time.perf_counter()
        row = {"whole": end - start, "out": out - start, "move": move, "load": load, "copy": copied - copying}
        for name, seconds in row.items():
            figures[name].append(seconds * 1e3)
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(run_gsm8k.POCKET))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    run_gsm8k.quiet_libraries(verbose=False)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    import ray

    torch.set_num_threads(1)  # as the copy beside it has
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    trainer, missed, before = GRPOTrainer(load_policy(args.model)), False, None
    megabytes = len(trainer.weights()) / 1e6
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 128 << 20}
    actor = ray.remote(num_cpus=0, max_concurrency=100)(Timed)
    servers = [actor.remote(args.model, rank=rank, block_size=32, **options) for rank in range(max(args.servers))]
    ray.get([server.ready.remote() for server in servers])
    print(f"{args.model}: {megabytes:.0f} MB in float32")
    print("| servers | whole, ms | out | move | load | copy | (out + move) / copy |\n|---|---|---|---|---|---|---|")
    for n in args.servers:
        ms = asyncio.run(measure(servers[:n], trainer, args.rounds))
        ratio = (ms["out"] + ms["move"]) / ms["copy"]
        print(f"| {n} | {' | '.join(f'{ms[name]:.1f}' for name in ms)} | {ratio:.2f} |", flush=True)
        missed |= megabytes >= 100 and ratio > 3
        before = before or (n, ms["whole"], ms["load"])
        missed |= ms["whole"] - before[1] > (n - before[0]) * before[2]
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(missed)


if __name__ == "__main__":
    from sync import main  # by import, so that the actors find the class by name

    sys.exit(main())
