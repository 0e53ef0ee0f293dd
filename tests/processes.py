"""The command as tests run it; and the processes of a run with RUN_MARK in its environment: which of them is the engine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent

SMALL = ["--preset", "pocket", "--steps", "3", "--batch-size", "3", "--group-size", "4", "--eval-problems", "16"]
SMALL += ["--response-length", "96", "--save-every", "1", "--keep", "3"]


def command(*argv: str, **kwargs: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_gsm8k.py"), *SMALL, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl, times and evaluations aside."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(("time/", "eval/"))} for row in rows]


def finished(folder: Path, name: str, *argv: str) -> tuple[list[dict[str, float]], str]:
    """The metrics of a run, and what it printed."""
    run = command("--out", str(folder), "--name", name, *argv)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0 and "core_worker.cc" not in err, err  # where Ray once complained, in the first lines of a run
    return metrics_of(folder / name), out


def processes(mark: str, title: str = "") -> Iterator[psutil.Process]:
    """The living processes whose environment has RUN_MARK=mark, the run's and its children's; with a title only those that have
    it in their command line, as "ray::VLLMServer", or "EngineCore", by which an engine is found without a title as well."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get("RUN_MARK") == mark:
                if title in " ".join(process.cmdline()) or (title == "EngineCore" and is_engine(process)):
                    yield process


def is_engine(process: psutil.Process) -> bool:
    """Whether a server on Ray has spawned this process, which beside its engine has only multiprocessing's resource tracker.

    An engine cannot be told by its title alone. setproctitle finds the command line by the first variable of the environment,
    and gives up where that variable was set anew. Ray hands the environment on in an order of chance, and libraries set two of
    some fifty again (TORCHINDUCTOR_CACHE_DIR, RAY_CLIENT_MODE): one engine in 25 stays `python -c "from multiprocessing..."`.
    """
    parent = process.parent()
    return bool(parent) and "ray::VLLMServer" in " ".join(parent.cmdline()) and "spawn_main" in " ".join(process.cmdline())
