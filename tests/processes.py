"""The processes of a run that was started with RUN_MARK in its environment: which they are, and which of them is the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


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
