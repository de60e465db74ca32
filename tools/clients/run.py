"""`make test-clients`: unmodified client programs against draftwing's server, each in a tool loop of three turns, with
a stream, and with an answer that is cancelled.

    python tools/clients/run.py [NAME ...] [--newest] [--model smollm2] [--page]

programs.toml says what each program is and how it is set up. Programs are installed into build/clients from PyPI and
npm, with a Node.js of their own. Without `--model` a scripted engine answers (scene.py); with it a model does, and what
counts is that an answer comes. Results go into record.json, from which `--page` writes the tables of
docs/integrations.md; what programs printed, and requests that were refused, are in build/clients/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
RECORD = HERE / "record.json"
NODE = BUILD / "node" / "node_modules" / "node" / "bin"
PROMPTS = {
    "loop": "Read the files one.txt and two.txt, one after the other, and tell me the code in each.",
    "cancel": "Tell me the long story.",
    "ask": "Say hello in one short sentence.",
}
LOOP_SECONDS, MODEL_SECONDS = 120, 180  # for one run of a program
SIZES = {"context": "200000", "output": "4096"}  # bytes: what programs are told of the scripted model
SMALL = {"context": "32768", "output": "400"}  # of the default model: more output says nothing more
STOP_SECONDS = 15  # until the engine has been told that nobody waits for the answer
CLOSED = "http://127.0.0.1:9"  # a proxy that is not there: nothing is fetched from elsewhere


class Program(NamedTuple):
    """What programs.toml says of one program."""

    name: str
    title: str
    dialect: str
    folder: str  # whose packages it uses
    npm: list[str] = []
    pypi: list[str] = []
    command: list[str] = []
    script: str = ""
    environ: dict[str, str] = {}
    quiet: dict[str, str] = {}
    files: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    replies: list[str] = []
    last: str = ""
    small: list[str] = []
    refused: str = ""

    @property
    def packages(self) -> list[str]:
        return self.npm or self.pypi


def load() -> tuple[dict[str, Program], str]:
    """All programs by name, and the version of Node.js that runs some of them."""
    tables = tomllib.loads((HERE / "programs.toml").read_text())
    node = tables.pop("node")
    programs = {}
    for name, table in tables.items():
        folder = table.pop("like", name)
        programs[name] = Program(**{"name": name, "folder": folder, **tables[folder], **table})
    return programs, node


def filled(text: str, values: dict[str, str]) -> str:
    """The text with values in place of {names}; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


# ---- install ---------------------------------------------------------------------------------------------------------


def split(package: str) -> tuple[str, str]:
    """Name and pinned version of a package, of PyPI (with its extras) or npm."""
    name, _, version = package.partition("==") if "==" in package else package.rpartition("@")
    return name, version


def npm_install(folder: Path, packages: list[str], env: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "package.json").exists():
        (folder / "package.json").write_text('{"private": true}')
    run(["npm", "install", "--no-fund", "--no-audit", "--save-exact", *packages], folder, env)


def run(command: list[str], folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


class InstallError(Exception):
    """A program cannot be had here; says what its installer said."""


def install(program: Program, newest: bool, node: str) -> Path:
    """The folder that has the program's packages. Raises InstallError."""
    folder = BUILD / program.folder / ("newest" if newest else "pinned")
    wanted = [split(package)[0] + ("@latest" if program.npm else "") for package in program.packages]
    wanted = wanted if newest else program.packages
    marker = folder / "installed.json"
    if marker.exists() and json.loads(marker.read_text()) == [wanted, node if program.npm else "", today() if newest else ""]:
        return folder
    env = {**os.environ, "PATH": f"{NODE}:{os.environ['PATH']}"}
    try:
        if program.npm:
            if not (NODE / "node").exists() or output([str(NODE / "node"), "--version"]) != f"v{node}":
                npm_install(BUILD / "node", [f"node@{node}"], env)
            npm_install(folder, wanted, env)
        else:
            run([sys.executable, "-m", "venv", str(folder / "venv")], ROOT, env)
            pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run([*pip, *(["--upgrade"] if newest else []), *wanted], ROOT, env)
    except (InstallError, subprocess.TimeoutExpired, FileNotFoundError) as error:
        raise InstallError(str(error)) from None
    marker.write_text(json.dumps([wanted, node if program.npm else "", today() if newest else ""]))
    return folder


def versions(program: Program, folder: Path) -> dict[str, str]:
    """Of the packages that are installed."""
    names = [split(package)[0] for package in program.packages]
    if program.npm:
        found = [json.loads((folder / "node_modules" / name / "package.json").read_text())["version"] for name in names]
        return dict(zip(names, found, strict=True))
    names = [re.sub(r"\[.*", "", name) for name in names]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    return dict(zip(names, output([str(folder / "venv/bin/python"), "-c", code, *names]).split(), strict=True))


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def today() -> str:
    return datetime.date.today().isoformat()


# ---- one run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(
    program: Program, folder: Path, kind: str, values: dict[str, str], files: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The program at work, with a home of its own, and what it prints; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="draftwing-clients-", ignore_cleanup_errors=True) as parent:
        home, work = Path(parent) / "home", Path(parent) / "work"
        values = {**values, "home": str(home), "work": str(work), "here": str(folder), "prompt": PROMPTS[kind]}
        home.mkdir(), work.mkdir()
        for path, text in {**program.files, **files}.items():
            path = Path(filled(path, values))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, values))
        command = [filled(word, values) for word in program.command]
        if kind == "ask":
            command += [filled(word, values) for word in program.small]
        if program.script:
            shutil.copy(HERE / "scripts" / program.script, folder)
            command = ["node" if program.npm else "python", str(folder / program.script), kind]
        with open(Path(parent) / "output", "wb") as file:
            process = subprocess.Popen(
                command, cwd=work, env=environ(program, folder, values), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield process, Path(parent) / "output"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_strays(parent)


def environ(program: Program, folder: Path, values: dict[str, str]) -> dict[str, str]:
    """Nothing of the user's: paths, a home, no way out, and what the program needs."""
    places = [folder / "venv/bin", folder / "node_modules/.bin", NODE]
    own = {
        "PATH": ":".join([*map(str, places), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": values["home"],
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "DO_NOT_TRACK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "BASE_URL": values["url"],
        "API_KEY": values["key"],
        "MODEL": values["model"],
        "PROMPT": values["prompt"],
        "DIALECT": program.dialect,
    }
    for name, value in ("https_proxy", CLOSED), ("no_proxy", "127.0.0.1,localhost"):
        own |= {name: value, name.upper(): value}
    return own | {name: filled(value, values) for name, value in {**program.environ, **program.quiet}.items()}


def end_strays(home: str) -> None:
    """Ends what a program started in sessions of their own: the processes whose environment names its home."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"={home}/".encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


def wait(condition: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met)


# ---- what has to hold ------------------------------------------------------------------------------------------------


def refusals(program: Program, seen: list[Any]) -> list[str]:
    """Requests that were not served; what a program asks for that is no endpoint of a model may be missing."""
    refused = [one for one in seen if one.status >= 400 and one.method == "POST"]
    known = program.refused or "nothing"
    return [f"{one.path}: {one.status}: {one.error}" for one in refused if known not in one.answer.decode()]


def script_of(program: Program, values: dict[str, str]) -> list[str]:
    """What the model says in its first two turns."""
    from scene import call

    calls = program.calls or [{"name": "read_file", "arguments": {"path": name}} for name in ("one.txt", "two.txt")]
    return program.replies or [f"I read a file.\n{call(one['name'], one['arguments'])}" for one in calls]


def play(program: Program, folder: Path, kind: str) -> tuple[list[str], dict[str, Any], str]:
    """One run against the scripted engine: what is wrong, what is told of it, and its log."""
    import scene

    engine = scene.Player([], program.last, not program.replies)
    files = {f"{{work}}/{name}.txt": f"{code}\n" for name, code in zip(("one", "two"), engine.codes, strict=True)}
    with scene.scripted(engine) as (url, recorder):
        values = {"url": url, "key": scene.KEY, "model": "smollm2", **SIZES}
        with started(program, folder, kind, values, files) as (process, printed):
            place = {"work": str(printed.parent / "work")}
            engine.replies = [filled(reply, place) for reply in script_of(program, values)]
            wrong = cancelled(program, engine, process) if kind == "cancel" else looped(engine, process, printed)
            log = printed.read_text(errors="replace")
    seen = recorder.seen
    wrong += refusals(program, seen)
    if not any(one.stream and one.status == 200 for one in seen):
        wrong.append("no answer was streamed")
    told = {"ignored": sorted({name for one in seen for name in one.ignored.split(", ") if name})}
    return wrong, told, log + "\n" + "\n".join(map(str, seen))


def looped(engine: Any, process: subprocess.Popen[bytes], printed: Path) -> list[str]:
    """What is wrong with a loop of three turns."""
    if not wait(lambda: process.poll() is not None, LOOP_SECONDS):
        return [f"it did not end within {LOOP_SECONDS} s"]
    wrong = [f"exit code {process.returncode}"] if process.returncode else []
    if engine.turns != {0, 1, 2}:
        wrong.append(f"turns of the loop: {sorted(engine.turns)}")
    # Programs wrap lines and colour words.
    words = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.read_text(errors="replace")).split())
    if engine.answer not in words:
        wrong.append("it did not print the answer")
    return wrong


def cancelled(program: Program, engine: Any, process: subprocess.Popen[bytes]) -> list[str]:
    """What is wrong where an answer is cancelled: by Ctrl-C, or by the script itself."""
    wait(lambda: engine.streaming() or engine.aborted or process.poll() is not None, LOOP_SECONDS)
    if not (engine.streaming() or engine.aborted):
        return ["the long answer did not begin"]
    if program.command and process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    if not wait(lambda: engine.aborted and not engine.running, STOP_SECONDS):
        return [f"the engine still writes {STOP_SECONDS} s after the cancel"]
    if not wait(lambda: process.poll() is not None, STOP_SECONDS):
        return ["it did not end after the cancel"]
    return [f"exit code {process.returncode}"] if program.script and process.returncode else []


def ask(program: Program, folder: Path, model: str, url: str, recorder: Any) -> tuple[list[str], dict[str, Any], str]:
    """One question to a model: what is wrong, what is told of it, and the log."""
    import scene

    recorder.seen.clear()
    values = {"url": url, "key": scene.KEY, "model": model, **SMALL}
    files = {f"{{work}}/{name}.txt": "nothing\n" for name in ("one", "two")}
    with started(program, folder, "ask", values, files) as (process, printed):
        ended = wait(lambda: process.poll() is not None, MODEL_SECONDS)
        log = printed.read_text(errors="replace")
    seen = list(recorder.seen)
    wrong = refusals(program, seen)
    wrong += [] if ended else [f"it did not end within {MODEL_SECONDS} s"]
    wrong += [f"exit code {process.returncode}"] if ended and process.returncode else []
    if not any(one.done and one.status == 200 and one.method == "POST" for one in seen):
        wrong.append("no answer was completed")
    return wrong, {"answers": sum(one.done and one.method == "POST" for one in seen)}, log + "\n".join(map(str, seen))


# ---- all of them -----------------------------------------------------------------------------------------------------


def result(program: Program, newest: bool, node: str, server: Any, model: str | None) -> dict[str, Any]:
    """Installs and runs one program; what the record has of it."""
    told: dict[str, Any] = {"date": today()}
    try:
        folder = install(program, newest, node)
    except InstallError as error:
        return {**told, "wrong": {"install": str(error)[-2000:]}}
    told |= {"versions": versions(program, folder), "node" if program.npm else "python": node if program.npm else "{}.{}.{}".format(*sys.version_info)}
    told["wrong"] = {}
    for kind in ("ask",) if model else ("loop", "cancel"):
        wrong, more, log = ask(program, folder, model, *server) if model else play(program, folder, kind)
        told |= more
        if wrong:
            told["wrong"][kind] = "\n".join(wrong)[:2000]
        path = BUILD / "logs" / f"{program.name}-{'newest' if newest else 'pinned'}-{kind}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*wrong, "", log]))
    return told


def main() -> None:
    programs, node = load()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of programs.toml (all)")
    parser.add_argument("--newest", action="store_true", help="the newest versions of the registries")
    parser.add_argument("--model", help="that answers, e.g. smollm2; else a scripted engine does")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    args = parser.parse_args()
    if unknown := set(args.names) - set(programs):
        parser.error(f"no such programs: {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = []
    if not args.page:
        import scene

        way = "model" if args.model else "newest" if args.newest else "pinned"
        with scene.real(args.model) if args.model else contextlib.nullcontext() as server:
            for name in args.names or programs:
                told = result(programs[name], args.newest, node, server, args.model)
                print(f"{name} {', '.join(told.get('versions', {}).values())}:", told["wrong"] or "works", flush=True)
                failed += [name] if told["wrong"] else []
                record.setdefault(name, {})[way] = told
                RECORD.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(f"not as they should: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
