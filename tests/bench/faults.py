"""Is anything lost when parts fail? Real runs on real Ray and vLLM, with faults from outside; a table of what became of them.

    python tests/bench/faults.py                      # all of them: about 15 minutes on two cores
    python tests/bench/faults.py --only "engine killed" "disk full"

A run that is to survive must end with status 0 and the curve of the run that nothing happened to: the same rewards, lengths and
staleness in each step. One that is to end must say why in one line, and leave a checkpoint with which --resume reaches that
curve. No process, no folder of Ray's and no file in /dev/shm may be left. "disk full" needs to be root, for a tmpfs of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from processes import processes  # noqa: E402

SMALL = ["--preset", "pocket", "--steps", "6", "--batch-size", "4", "--group-size", "4", "--eval-problems", "8"]
SMALL += ["--response-length", "128", "--save-every", "1", "--server-timeout-s", "15"]


# Moments that cannot be met from outside are met by the program itself, which then does to its own actors what others do.
HEAD = """
import asyncio, os, signal, sys, one_step_off, psutil, run_gsm8k, trainer

def find(name):
    living = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [p.pid for p in living if "ray::" in "".join(p.cmdline()) and name in "".join(p.cmdline())][-1]
"""
TAIL = """
sys.exit(run_gsm8k.main())
"""
PROGRAMS = {
    "training raises": """
update = trainer.GRPOTrainer.update
def broken(self, rollouts):
    if self.param_version == 2:
        raise FloatingPointError("step 2: the loss of sample x is not finite")
    return update(self, rollouts)
trainer.GRPOTrainer.update = broken
""",
    "server killed while paused, partial": """
cancel, calls = one_step_off.OneStepOffAgentLoopManager.cancel, []
async def cancel_and_kill(self):
    await cancel(self)
    calls.append(1)
    if len(calls) == 2:
        os.kill(find("VLLMServer"), signal.SIGKILL)
one_step_off.OneStepOffAgentLoopManager.cancel = cancel_and_kill
""",
    "one of two workers killed at the start of a batch": """
dispatch, calls = one_step_off.OneStepOffAgentLoopManager._dispatch, []
def dispatch_and_kill(self, prompts):
    calls.append(find("AgentLoopWorker"))  # before the batch is out, since it takes a while
    result = dispatch(self, prompts)
    if len(calls) == 4:  # the first is the evaluation
        os.kill(calls[-1], signal.SIGKILL)
    return result
one_step_off.OneStepOffAgentLoopManager._dispatch = dispatch_and_kill
""",
    "server killed in a sync": """
sync = run_gsm8k.Run.sync
async def sync_and_kill(self):
    syncing = asyncio.ensure_future(sync(self))
    if self.trainer.param_version == 2:
        await asyncio.sleep(0.015)  # a sync takes 80 ms
        assert not syncing.done()
        os.kill(find("VLLMServer"), signal.SIGKILL)
    await syncing
run_gsm8k.Run.sync = sync_and_kill
""",
}


class Run:
    """The command, marked by an environment variable, so that its processes can be found."""

    all: ClassVar[list[Run]] = []

    def __init__(self, folder: Path, name: str, *argv: str, program: Sequence[str] = (str(ROOT / "run_gsm8k.py"),)) -> None:
        self.all.append(self)
        self.folder, self.mark = folder / name, f"{folder}/{name}"
        command = [sys.executable, *program, *SMALL, "--out", str(folder), "--name", name, *argv]
        self.temporary = Path(tempfile.mkdtemp(prefix="f-"))  # of its own, and with a short name: Ray's sockets are in it
        environment = os.environ | {"RUN_MARK": self.mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        # torch's cache of compiled code is meant to stay.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )

    def signal(self, title: str, number: int) -> None:
        """Sends a signal to the one process with that title."""
        process = next(processes(self.mark, title), None)
        ended = f"status {self.process.poll()} after {len(self.curve())} steps"
        assert process, f"no process {title!r} among {list(processes(self.mark))}, {ended}"
        process.send_signal(number)

    def wait_for_step(self, step: int, limit_s: float = 240) -> None:
        """Until that many steps are in metrics.jsonl."""
        end, metrics = time.monotonic() + limit_s, self.folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= step):
            assert time.monotonic() < end, f"no step {step} within {limit_s} s"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)

    def finish(self, limit_s: float = 400) -> tuple[int, str]:
        """(status, output)."""
        out, _ = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out

    def curve(self) -> list[tuple[float, ...]]:
        """What must be equal, step by step."""
        names = "reward", "response_length/mean", "staleness/mean", "staleness/max"
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        return [tuple(row[name] for name in names) for row in rows]


def killer(title: str, number: int = signal.SIGKILL) -> Callable[[Run], None]:
    """A fault that sends a signal to the process with that title."""
    return lambda run: run.signal(title, number)


# name: (mode, what happens, a part of what the run must say of it, the status that it must end with)
FAULTS: dict[str, tuple[str, Callable[[Run], None], str, int]] = {
    "worker killed": ("one-step-off", killer("ray::AgentLoopWorker"), "", 0),
    "one of two workers killed": ("one-step-off", killer("ray::AgentLoopWorker"), "", 0),
    "one of two workers killed at the start of a batch": ("one-step-off", lambda run: None, "", 0),
    "server killed": ("one-step-off", killer("ray::VLLMServer"), "was started again", 0),
    "server killed, partial": ("partial", killer("ray::VLLMServer"), "was started again", 0),
    "server killed while paused, partial": ("partial", lambda run: None, "was started again", 0),
    "server killed in a sync": ("one-step-off", lambda run: None, "was started again", 0),
    "engine killed": ("one-step-off", killer("EngineCore"), "was started again", 0),
    "engine killed, sync": ("sync", killer("EngineCore"), "was started again", 0),
    "engine hangs": ("one-step-off", killer("EngineCore", signal.SIGSTOP), "did not answer within 15 s", 0),
    "training raises": ("one-step-off", lambda run: None, "step 2: the loss of sample x is not finite", 1),
    "SIGTERM": ("one-step-off", lambda run: run.process.terminate(), "interrupted", 130),
    "Ctrl-C": ("partial", lambda run: os.killpg(run.process.pid, signal.SIGINT), "interrupted", 130),  # as a terminal does
}


FLAGS = {name: ["--workers", "2"] for name in FAULTS if name.startswith("one of two")}


def inject(name: str, folder: Path, rng: random.Random) -> tuple[Run, int, str, float]:
    """One run with one fault after its second step, at any moment until its fifth. Returns (run, status, output, seconds from
    the fault to the end)."""
    mode, fault, _, _ = FAULTS[name]
    program = {"program": ("-c", HEAD + PROGRAMS[name] + TAIL)} if name in PROGRAMS else {}
    run = Run(folder, name.replace(" ", "-").replace(",", ""), "--mode", mode, *FLAGS.get(name, []), **program)
    run.wait_for_step(2 if program else rng.randint(2, 4))  # by steps, since by a clock the run might be over
    if not program:
        time.sleep(rng.uniform(0, 0.3))
    start = time.monotonic()
    fault(run)
    status, out = run.finish()
    return run, status, out, time.monotonic() - start


def left_behind(run: Run, before: set[Path]) -> list[str]:
    """Processes and files of a run that has ended, after a moment of grace."""
    for _ in range(50):
        files = [*run.temporary.iterdir(), *(shared_memory() - before)]
        left = [f"pid {process.pid}" for process in processes(run.mark)] + [str(path) for path in files]
        if not left:
            return []
        time.sleep(0.1)
    return left


def shared_memory() -> set[Path]:
    """The files in shared memory."""
    return set(Path("/dev/shm").iterdir())


def disk_full(folder: Path) -> str:
    """A disk that fills up during a save. Returns what is wrong, or nothing."""
    mount = folder / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=26m", "tmpfs", str(mount)], check=True)
    try:
        run = Run(mount, "full", "--keep", "9")
        status, out = run.finish()
        last = out.strip().splitlines()[-1]
        print(f"    {last}")
        if status != 1 or "No space left on device" not in last or "Traceback" in out:
            return f"status {status}: {last}"
        kept = sorted((run.folder / "checkpoints").glob("*"))
        if any(path.name.startswith(".writing") for path in kept) or not kept:
            return f"left {kept}"
        subprocess.run(["mount", "-o", "remount,size=200m", str(mount)], check=True)
        resumed = Run(mount, "full", "--resume", "--keep", "9")
        status, out = resumed.finish()
        return "" if status == 0 and len(resumed.curve()) == 6 else f"resumed: status {status}: {out}"
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def metrics_full(folder: Path, curve: list) -> str:
    """A metrics.jsonl that takes no more lines. Returns what is wrong, or nothing."""
    run = Run(folder, "metrics", "--mode", "one-step-off")
    run.wait_for_step(2)
    metrics, aside = run.folder / "metrics.jsonl", run.folder / "aside"
    metrics.rename(aside)
    metrics.symlink_to("/dev/full")
    status, out = run.finish()
    last = out.strip().splitlines()[-1]
    print(f"    {last}")
    if status != 1 or "No space left on device" not in last or "--resume" not in last or "Traceback" in out:
        return f"status {status}: {last}"
    aside.replace(metrics)
    resumed = Run(folder, "metrics", "--resume")
    status, out = resumed.finish()
    return "" if status == 0 and resumed.curve() == curve else f"resumed: status {status}: {out}"


def two_at_once(folder: Path, curve: list) -> str:
    """Two runs on one machine at the same time: both run."""
    runs = [Run(folder, f"twin-{i}", "--mode", "one-step-off") for i in range(2)]
    for run in runs:
        status, out = run.finish()
        if status or run.curve() != curve:
            return f"status {status}: {out}"
    return ""


def main() -> int:
    """The command; exit status 1 where something is lost."""
    others: dict[str, Callable[[], str]] = {
        "disk full": lambda: disk_full(folder),
        "disk full, metrics.jsonl": lambda: metrics_full(folder, curve_of("one-step-off")),
        "two runs at once": lambda: two_at_once(folder, curve_of("one-step-off")),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[*FAULTS, *others], choices=[*FAULTS, *others], metavar="FAULT")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    rng, wrong = random.Random(args.seed), 0
    curves: dict[str, list] = {}
    print("| fault | status | ended after, s | the curve | left behind |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)

        def curve_of(mode: str) -> list:
            if mode not in curves:
                whole = Run(folder, f"whole-{mode}", "--mode", mode)
                status, out = whole.finish()
                assert status == 0, out
                curves[mode] = whole.curve()
            return curves[mode]

        for name in args.only:
            if name in FAULTS:
                mode, _, says, expected = FAULTS[name]
                whole, before, again = curve_of(mode), shared_memory(), 0
                run, status, out, seconds = inject(name, folder, rng)
                left = left_behind(run, before)
                if expected:  # it was ended: go on
                    again, text = Run(folder, run.folder.name, "--resume").finish()
                    out += text
                # In partial mode a restart changes what is finished first, so the number of steps is all that is sure.
                same = run.curve() == whole if mode != "partial" else len(run.curve()) == len(whole)
                problem = status != expected or again or says not in out or "Traceback" in out or not same or left
                print(
                    f"| {name} | {status} | {seconds:.1f} | {'same' if same else 'DIFFERS'} | {left or 'nothing'} |", flush=True
                )
                for line in out.splitlines():
                    if ("server 0" in line and "on cpu" not in line) or line.startswith(("error", "interrupted")):
                        print(f"    {line}", flush=True)
                if problem:
                    print(out, flush=True)
            else:
                curve_of("one-step-off")
                before, earlier = shared_memory(), len(Run.all)
                problem = others[name]()
                left = [what for run in Run.all[earlier:] for what in left_behind(run, before)]
                print(f"| {name} | | | {problem or 'as it should be'} | {left or 'nothing'} |", flush=True)
                problem = problem or left
            wrong += bool(problem)
    return int(wrong > 0)


def clean_up() -> None:
    """Whatever has failed: no process and no folder stays."""
    for run in Run.all:
        for process in processes(run.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(run.temporary, ignore_errors=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        clean_up()
