"""What the HTTP server costs besides the engine: CPU time of both processes while many clients stream.

    python benchmarks/server_cpu.py --out result.json [--clients 64] [--tokens 128]

Starts `draftwing serve` with one engine thread, lets `--clients` clients stream one answer each through
`/v1/chat/completions`, and compares the CPU seconds that the kernel counted for the server's process, all of its
threads, with those of the engine's. CPU time hardly depends on what else the machine does; the throughput does. The
clients run in this process, and cost neither. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftwing.utils import Process, launch_server_cmd, terminate_process, wait_for_server

HOST = "127.0.0.1"


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process: fields 14 and 15 of proc_pid_stat(5)."""
    # The name, field 2, may hold spaces and brackets: count from its end.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_of(server: Process) -> int:
    """The process id of the engine's, one of the server's children."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    (engine,) = (child for child in children if b"engine.process" in Path(f"/proc/{child}/cmdline").read_bytes())
    return int(engine)


def stream(port: int, number: int, tokens: int) -> tuple[int, int]:
    """One answer of exactly `tokens` tokens; (completion tokens, events)."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me a fact about the number {number}, and a story about it."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.7,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        events = [line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()
    return json.loads(events[-1])["usage"]["completion_tokens"], len(events)


def load(port: int, clients: int, tokens: int) -> list[tuple[int, int]]:
    """As many streams at once as there are clients."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda number: stream(port, number, tokens), range(clients)))


def measure(server: Process, port: int, clients: int, tokens: int) -> dict[str, Any]:
    processes = {"server": server.pid, "engine": engine_of(server)}
    load(port, min(clients, 4), 8)  # first use of everything
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    start = time.monotonic()
    done = load(port, clients, tokens)
    seconds = time.monotonic() - start
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    made = sum(count for count, _ in done)
    return {
        "clients": clients,
        "completion_tokens": made,
        "events": sum(events for _, events in done),
        "seconds": round(seconds, 3),
        "throughput": round(made / seconds, 1),
        "server_cpu_s": round(spent["server"], 3),
        "engine_cpu_s": round(spent["engine"], 3),
        "overhead_share": round(spent["server"] / spent["engine"], 4),
        "server_us_per_token": round(spent["server"] / made * 1e6, 1),
        "engine_us_per_token": round(spent["engine"] / made * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--serve", default="", help="more options of the server, as one string")
    parser.add_argument("--out", type=Path, help="write the JSON to a file, too")
    args = parser.parse_args()
    server, port = launch_server_cmd(
        f"python -m draftwing.launch_server --model {shlex.quote(args.model)} --num-threads 1 "
        f"--max-running-requests {args.clients} --log-level warning --speculative-algorithm none {args.serve}",
        HOST,
    )
    try:
        wait_for_server(f"http://{HOST}:{port}", process=server)
        result = measure(server, port, args.clients, args.tokens)
    finally:
        terminate_process(server)
    record = {"machine": platform.processor() or platform.machine(), "model": args.model, **result}
    print(json.dumps(record, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
