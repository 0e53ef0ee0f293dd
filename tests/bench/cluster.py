"""A machine is lost: three simulated nodes, two vLLM servers and two workers on them. Does the run go on?

    python tests/bench/cluster.py                    # about 4 minutes on two cores

Ray's own cluster utility starts a head and two more nodes on this machine, and the run joins them by --ray-address. After its
second step one of the nodes that have a vLLM server is killed, with all that is on it. The run must end with status 0 and the
curve of a run of the same two servers that nothing happened to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--preset", "pocket", "--steps", "6", "--batch-size", "6", "--group-size", "4", "--eval-problems", "8"]
SMALL += ["--response-length", "128", "--save-every", "0", "--rollout-servers", "2", "--workers", "2"]


def start(folder: Path, name: str, address: str) -> subprocess.Popen:
    """The run, on the cluster at `address`."""
    command = [sys.executable, str(ROOT / "run_gsm8k.py"), *SMALL, "--out", str(folder), "--name", name]
    return subprocess.Popen([*command, "--ray-address", address], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def curve(folder: Path) -> list[tuple[float, ...]]:
    """What must be equal, step by step."""
    names = "reward", "response_length/mean", "staleness/mean"
    return [tuple(json.loads(line)[name] for name in names) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def node_with_server(nodes: list) -> tuple[object, str]:
    """A node (not the head) on which a vLLM server is, and the server's title."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    for process in psutil.process_iter(["ppid", "cmdline"]):
        title = "".join(process.info["cmdline"] or ())
        if "VLLMServer" in title and process.info["ppid"] in raylets:
            return raylets[process.info["ppid"]], title
    raise RuntimeError("no server is on any of these nodes")


def main() -> int:
    """The command; exit status 1 where something is lost."""
    os.environ["RAY_worker_niceness"] = "0"
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        try:
            nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
            whole = start(folder, "whole", cluster.address)
            out, _ = whole.communicate(timeout=600)
            assert whole.returncode == 0, out
            run, metrics = start(folder, "lost", cluster.address), folder / "lost" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.05)
            node, title = node_with_server(nodes)
            print(f"killed: the node with {title.strip()}", flush=True)
            lost_at = time.monotonic()
            cluster.remove_node(node, allow_graceful=False)
            out, _ = run.communicate(timeout=600)
            same = run.returncode == 0 and curve(folder / "lost") == curve(folder / "whole")
            print("\n".join(line for line in out.splitlines() if line.startswith(("vLLM server", "error"))))
            print(f"status {run.returncode}, ended {time.monotonic() - lost_at:.0f} s after it")
            print(f"the curve is {'that of the run that nothing happened to' if same else 'ANOTHER'}")
            if not same:
                print(out)
            return int(not same)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
