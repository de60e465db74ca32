"""Files of examples/operation: what they name is there, and the programs that read them take them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwing.config.options import Options
from draftwing.server.telemetry.metrics import SERIES

FOLDER = Path(__file__).parents[1] / "examples" / "operation"
BOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf8"))
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf8"))["groups"][0]["rules"]
METRIC = re.compile(r"\b(?:vllm|sglang|draftwing):\w+")


def expressions() -> Iterator[Any]:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for rule in RULES:
        yield pytest.param(rule["expr"], id=rule["alert"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_what_is_drawn_and_alerted_is_served(expression: str) -> None:
    served = {one.name for one in SERIES}
    names = set(METRIC.findall(expression))
    assert names and names <= served | {f"{name}_bucket" for name in served}


def test_the_dashboard() -> None:
    ids, places = set(), set()
    for panel in BOARD["panels"]:
        ids.add(panel["id"])
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
    assert len(ids) == len(places) == len(BOARD["panels"])


def test_the_unit_starts_a_server_that_drains_in_time() -> None:
    unit = (FOLDER / "draftwing.service").read_text(encoding="utf8")
    (command,) = re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    words = command.split()
    given = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    assert set(given) <= set(Options.__dataclass_fields__)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > float(given["drain_timeout"])


CHECKS = {
    "promtool": ["check", "config", "prometheus.yml"],
    "caddy": ["validate", "--config", "Caddyfile", "--adapter", "caddyfile"],
}


@pytest.mark.parametrize("program", CHECKS)
def test_programs_take_their_files(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt install {'prometheus' if program == 'promtool' else program}")
    done = subprocess.run([program, *CHECKS[program]], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt install systemd")
    unit = (FOLDER / "draftwing.service").read_text(encoding="utf8")
    (tmp_path / "draftwing.service").write_text(unit.replace("/opt/draftwing/bin/draftwing", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "draftwing.service"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "draftwing.service" not in done.stderr, done.stderr


@pytest.mark.slow
def test_nginx_takes_its_file(tmp_path: Path) -> None:
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("nginx and openssl are not installed: apt install nginx openssl")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=a -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    site = (FOLDER / "nginx.conf").read_text(encoding="utf8").replace("/etc/nginx/tls", str(tmp_path))
    site = site.replace("443", "30443")
    whole = f"pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}} http {{ access_log off;\n{site}\n}}"
    (tmp_path / "nginx.conf").write_text(whole)
    done = subprocess.run(["nginx", "-t", "-c", str(tmp_path / "nginx.conf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
