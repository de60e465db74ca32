"""Files of examples/kubernetes and the Dockerfiles: they fit each other, the server's options and its endpoints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine, local

from draftwing.cli import main
from draftwing.config.options import Options
from draftwing.config.sources import with_sources
from draftwing.serve.settings import read_args
from draftwing.server.app import create_app

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
FILES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
VERSION = "1.33"


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf8")))


EVERY = {(one["kind"], one["metadata"]["name"]): one for path in FILES for one in objects(path)}


def pods() -> Iterator[dict[str, Any]]:
    for (kind, _), one in EVERY.items():
        if kind == "Deployment":
            yield one["spec"]["template"]


def container(name: str) -> dict[str, Any]:
    (found,) = (one for pod in pods() for one in pod["spec"]["containers"] if one["name"] == name)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_fields_are_those_of_kubernetes(path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in objects(path):
        if one["apiVersion"] != "ray.io/v1":  # an operator's own kind
            schemas.validate(one, VERSION, strict=True)


def test_services_and_selectors_find_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods()]
    for (kind, name), one in EVERY.items():
        if kind == "Service":
            pod = next(pod for pod in pods() if one["spec"]["selector"].items() <= pod["metadata"]["labels"].items())
            ports = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports, name
        if kind == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] in labels
    arguments = container("smg")["args"]
    assert dict([arguments[arguments.index("--selector") + 1].split("=")]) in labels
    assert arguments[arguments.index("--service-discovery-port") + 1] == str(served_port())


def served_port() -> int:
    (port,) = (port["containerPort"] for port in container("server")["ports"])
    return int(port)


def test_probes_ask_what_the_server_answers() -> None:
    engine = FakeEngine()
    paths = {route.path for route in create_app(local(engine), engine.tokenizer).routes}  # type: ignore[attr-defined]
    server = container("server")
    probes = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert set(probes.values()) <= paths
    assert probes["livenessProbe"] == "/liveness" and probes["readinessProbe"] == "/readiness"
    (reported,) = (pod["metadata"]["annotations"] for pod in pods() if "annotations" in pod["metadata"])
    assert reported["prometheus.io/path"] in paths and reported["prometheus.io/port"] == str(served_port())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_options_are_those_of_the_server(path: Path) -> None:
    parser, _, _ = main._parser()
    entry = re.search(r"^ENTRYPOINT (.*)$", path.read_text(encoding="utf8"), re.MULTILINE)
    assert entry is not None
    program, *words = yaml.safe_load(entry[1])
    given = vars(parser.parse_args([*words, *container("server")["args"]]))
    given.pop("command")
    environment = dict(re.findall(r"(DRAFTWING_\w+)=(\S+)", path.read_text(encoding="utf8")))
    options = Options.from_kwargs(**with_sources(given, environment))
    assert program == "draftwing" and options.host == "0.0.0.0" and options.port == served_port()
    (pod,) = (pod for pod in pods() if pod["metadata"]["labels"] == {"app": "draftwing"})
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    sleep = int(container("server")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace >= sleep + options.drain_timeout + 10


def test_arguments_of_the_ray_application() -> None:
    config = yaml.safe_load(EVERY["RayService", "draftwing"]["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "draftwing.serve.ray:app"
    options, scaling = read_args(application["args"])
    group = EVERY["RayService", "draftwing"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert options.device == "cuda" and scaling.max_replicas == group["maxReplicas"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile(path: Path) -> None:
    """Every line is an instruction, a comment or goes on from the one before; the user and its folder are there."""
    lines = path.read_text(encoding="utf8").replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = {"FROM", "RUN", "ARG", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    assert {word[0] for word in words} <= known and words[0][0] == "FROM"
    for kind, rest in words:
        if kind == "RUN":
            assert shlex.split(rest), rest
    (health,) = (rest for kind, rest in words if kind == "HEALTHCHECK")
    assert f":{served_port()}{container('server')['livenessProbe']['httpGet']['path']}'" in health
    names = [rest for kind, rest in words if kind in ("USER", "EXPOSE")]
    assert names == ["draftwing", str(served_port())]
    mounts = container("server")["volumeMounts"]
    assert [rest for kind, rest in words if kind == "VOLUME"] == [mount["mountPath"] for mount in mounts]
