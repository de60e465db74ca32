"""A whole server with a tiny random model: requests beside a batch, and kills while one runs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import launched
from tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.slow
LINES, KILLS = 60, 1


def begin(client: httpx.Client, url: str, bodies: dict[str, Any]) -> dict[str, Any]:
    lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    sent = client.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": sent["id"], "endpoint": url, "completion_window": "24h"}
    return dict(client.post("/v1/batches", json=asked).json())


@pytest.mark.exhaustive  # as in test_batches.py, in one process
def test_requests_are_answered_beside_100_lines_with_the_text_that_they_have_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    url = "/v1/completions"
    body = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    command = f"--model {tmp_path / 'tiny'} --max-running-requests 16 --batches-dir {tmp_path / 'kept'}"
    with launched(command) as (_, address), httpx.Client(base_url=address, timeout=60) as client:
        asked = [body | {"prompt": [3 + i, 9]} for i in range(5)]
        alone = [client.post(url, json=one).json()["choices"] for one in asked]
        batch = begin(client, url, {str(i): body | {"prompt": [1 + i % 20, 2]} for i in range(100)})
        while client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] == 0:
            time.sleep(0.005)
        assert [client.post(url, json=one).json()["choices"] for one in asked] == alone
        found = client.get(f"/v1/batches/{batch['id']}").json()
        assert found["status"] == "in_progress" and found["request_counts"]["completed"] < 100
        end = time.monotonic() + 120
        while (found := client.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
            assert time.monotonic() < end, found
            time.sleep(0.01)
        assert found["request_counts"] == {"total": 100, "completed": 100, "failed": 0}


def test_no_line_is_lost_or_answered_twice_when_the_server_is_killed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    url = "/v1/completions"
    bodies = {
        f"line {i}": {"model": "tiny", "prompt": [1 + i % 20, 2 + i % 7], "max_tokens": 20 + i % 9, "temperature": 0}
        for i in range(LINES)
    }
    draw = random.Random(5)
    command = f"--model {tmp_path / 'tiny'} --max-running-requests 8 --batches-dir {tmp_path / 'kept'}"
    batch, seen = None, [0]
    for kill in range(KILLS + 1):
        with launched(command) as (process, address), httpx.Client(base_url=address, timeout=60) as client:
            if batch is None:
                batch = begin(client, url, bodies)
            end, goal = time.monotonic() + 120, seen[-1] + draw.randint(5, LINES // (KILLS + 2))
            while True:
                found = client.get(f"/v1/batches/{batch['id']}").json()
                counts = found["request_counts"]
                if found["status"] == "completed" or (kill < KILLS and counts["completed"] >= goal):
                    break
                assert time.monotonic() < end and found["status"] in ("validating", "in_progress", "finalizing"), found
                time.sleep(0.005)
            assert counts["completed"] >= seen[-1] and counts["failed"] == 0
            seen.append(counts["completed"])
            if kill < KILLS:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                continue
            assert seen[1] < LINES  # it was killed while the batch ran
            results = [
                json.loads(line)
                for line in client.get(f"/v1/files/{found['output_file_id']}/content").text.splitlines()
            ]
            assert sorted(one["custom_id"] for one in results) == sorted(bodies)
            for one in results[:: LINES // 10]:
                direct = client.post(url, json=bodies[one["custom_id"]]).json()
                assert one["response"]["body"]["choices"] == direct["choices"]
