"""The processes of a run are found, whatever their title: most laws about killed runs rest on that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import processes

# A server with an engine, in as far as they are processes: titled as Ray and vLLM do it, spawned as vLLM spawns.
SERVER = """
import multiprocessing, os, sys

def engine(pipe):
    import setproctitle
    os.environ[sys.argv[1]] = "anew"  # as libraries do on import
    setproctitle.setproctitle("VLLM::EngineCore")
    pipe.send(os.getpid())
    pipe.recv()

if __name__ == "__main__":
    import setproctitle
    setproctitle.setproctitle("ray::VLLMServer")
    ours, its = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(its,))
    child.start()
    print(os.getpid(), ours.recv(), flush=True)
    sys.stdin.read()
    ours.send("end")
    child.join()
"""


@pytest.mark.parametrize("again, titled", [("LAST", True), ("FIRST", False)])
def test_an_engine_is_found_with_and_without_its_title(again: str, titled: bool, tmp_path: Path) -> None:
    """setproctitle needs the environment's first variable as it came, and in which order Ray hands it on is chance."""
    (tmp_path / "server.py").write_text(SERVER)
    environment = {"FIRST": "1", **os.environ, "RUN_MARK": str(tmp_path), "SPT_NOENV": "1", "LAST": "1"}
    command = [sys.executable, str(tmp_path / "server.py"), again]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        server, engine = map(int, run.stdout.readline().split())
        (found,) = processes(str(tmp_path), "EngineCore")
        assert found.pid == engine and ("EngineCore" in " ".join(found.cmdline())) == titled
        assert [process.pid for process in processes(str(tmp_path), "ray::VLLMServer")] == [server]
        assert {server, engine} < {process.pid for process in processes(str(tmp_path))}, "and the resource tracker"
        run.communicate()
    assert not list(processes(str(tmp_path)))
