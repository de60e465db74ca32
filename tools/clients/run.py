"""`make test-clients`: unmodified client programs against draftwing's server, each in a tool loop of three turns, with
a stream, and with an answer that is cancelled; into some a picture is pasted.

    python tools/clients/run.py [NAME ...] [--newest] [--model smollm2] [--page]

programs.toml says what each program is and how it is set up. Programs are installed into build/clients from PyPI and
npm, with a Node.js of their own. Without `--model` a scripted engine answers (scene.py); with it a model does, and what
counts is that an answer comes. Results go into record.json, from which `--page` writes the tables of
docs/integrations.md; what programs printed, and requests that were refused, are in build/clients/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page
import terminal
from programs import BUILD, HERE, NODE, InstallError, Program, filled, install, load, today, versions

PROMPTS = {
    "loop": "Read the files one.txt and two.txt, one after the other, and tell me the code in each.",
    "cancel": "Tell me the long story.",
    "picture": "Look at picture.png and tell me what is in it.",
    "paste": "What is in the picture?",
    "ask": "Say hello in one short sentence.",
}
AGAIN = "Are you sure?"  # the next turn, in a terminal
LOOP_SECONDS, MODEL_SECONDS = 120, 200  # for one run of a program
STALL_SECONDS = 20  # without a token of an answer, on a busy machine
SIZES = {"context": "200000", "output": "4096"}  # bytes: the scripted model's limits for programs
SMALL = {"context": "32768", "output": "400"}  # of the default model: more output says nothing more
KEY_SECONDS = 10  # until a terminal shows what a key does, on a busy machine
STOP_SECONDS = 15  # until the engine knows that nobody waits for the answer
CLOSED = "http://127.0.0.1:9"  # a proxy that is not there: nothing is fetched from elsewhere


# ---- one run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(
    program: Program, folder: Path, kind: str, values: dict[str, str], files: dict[str, str | bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The program at work, with a home of its own, and what it prints; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="draftwing-clients-", ignore_cleanup_errors=True) as parent:
        home, work = Path(parent) / "home", Path(parent) / "work"
        values = {**values, "home": str(home), "work": str(work), "prompt": PROMPTS[kind]}
        home.mkdir(), work.mkdir()
        for path, text in {**program.files, **program.fixtures, **files}.items():
            path = Path(filled(path, values))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else filled(text, values).encode())
        command = [filled(word, values) for word in words_of(program, kind)]
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


def words_of(program: Program, kind: str) -> list[str]:
    """Of the command."""
    if kind == "paste":
        return terminal.inside(program.terminal["command"])
    more = {"ask": program.small, "picture": program.shows}.get(kind, ())
    extra = [*more, *program.alone]
    return [word for one in program.command for word in (extra if one == "{alone}" else [one])]


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
        "DISPLAY": values.get("display", ""),
        "TMUX_TMPDIR": values["home"],
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
    unknown = [one for one in refused if not any(known in one.answer.decode() for known in program.refused)]
    return [f"{one.path}: {one.status}: {one.error}" for one in unknown]


def script_of(program: Program, kind: str = "loop") -> list[str]:
    """What the model says in its first turns."""
    from scene import call

    if kind == "paste":
        return []
    if kind == "picture":
        return [call(program.looks["name"], program.looks["arguments"])] if program.looks else []
    calls = program.calls or [{"name": "read_file", "arguments": {"path": name}} for name in ("one.txt", "two.txt")]
    return program.replies or [f"I read a file.\n{call(one['name'], one['arguments'])}" for one in calls]


def play(program: Program, folder: Path, kind: str) -> tuple[list[str], dict[str, Any], str]:
    """One run against the scripted engine: what is wrong, what is reported of it, and its log."""
    import scene

    seeing = kind in ("picture", "paste")
    engine = scene.Viewer() if seeing else scene.Player([], program.last or "{answer}", not program.replies)
    files: dict[str, str | bytes] = {"{work}/picture.png": scene.PICTURE}
    files |= {f"{{work}}/{name}.txt": f"{code}\n" for name, code in zip(("one", "two"), engine.codes, strict=True)}
    copied = terminal.clipboard(scene.PICTURE) if kind == "paste" else contextlib.nullcontext("")
    with copied as display, scene.scripted(engine) as (url, recorder):
        values = {"url": url, "key": scene.KEY, "model": "smollm2", "display": display, **SIZES}
        with started(program, folder, kind, values, files) as (process, printed):
            place = {"work": str(printed.parent / "work")}
            engine.replies = [filled(reply, place) for reply in script_of(program, kind)]
            if kind == "paste":
                shown = terminal.Terminal(printed.parent / "home")
                wrong = pasted(program, engine, shown)
                printed.write_text(shown.screen())
            else:
                wrong = cancelled(program, engine, process) if kind == "cancel" else looped(engine, process, printed)
            log = printed.read_text(errors="replace")
    seen = recorder.seen
    wrong += refusals(program, seen)
    if not any(one.stream and one.status == 200 for one in seen):
        wrong.append("no answer was streamed")
    facts = {"ignored": sorted({name for one in seen for name in one.ignored.split(", ") if name})}
    return wrong, facts, log + "\n" + "\n".join(map(str, seen))


def looped(engine: Any, process: subprocess.Popen[bytes], printed: Path) -> list[str]:
    """What is wrong with a loop of three turns."""
    if not wait(lambda: process.poll() is not None, LOOP_SECONDS):
        return [f"it did not end within {LOOP_SECONDS} s"]
    wrong = [f"exit code {process.returncode}"] if process.returncode else []
    wrong += engine.faults()
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


def pasted(program: Program, engine: Any, shown: terminal.Terminal) -> list[str]:
    """What is wrong where a picture is pasted from the clipboard, and asked about in two turns."""
    if not wait(lambda: program.terminal["ready"] in shown.screen(), LOOP_SECONDS):
        return ["it shows no prompt"]
    for _ in range(3):  # a key that comes before it reads keys is lost
        shown.press("C-v")
        if taken := wait(lambda: "[Image #1]" in shown.screen(), KEY_SECONDS):
            break
    if not taken:
        return ["it took no picture from the clipboard"]
    for turn, question in enumerate((PROMPTS["paste"], AGAIN), 1):
        shown.type(question)
        wait(lambda text=question: text in shown.screen(), KEY_SECONDS)
        time.sleep(1)  # a key right behind others is part of what is pasted
        shown.press("Enter")
        if not wait(lambda count=turn: shown.screen().count(engine.answer) >= count, LOOP_SECONDS):
            return [f"turn {turn}: it does not show the answer"]
    seen = sum(bool(request.images) for request in engine.requests)
    return [*engine.faults(), *([] if seen >= 2 else ["the second turn was without the picture"])]


def ask(program: Program, folder: Path, model: str, url: str, recorder: Any) -> tuple[list[str], dict[str, Any], str]:
    """One question to a model: what is wrong, what is reported of it, and the log."""
    import scene

    recorder.seen.clear()
    values = {"url": url, "key": scene.KEY, "model": model, **SMALL}
    files: dict[str, str | bytes] = {f"{{work}}/{name}.txt": "nothing\n" for name in ("one", "two")}
    with started(program, folder, "ask", values, files) as (process, printed):
        ended = wait(lambda: process.poll() is not None, MODEL_SECONDS)
        seen, log = list(recorder.seen), printed.read_text(errors="replace")
    wrong = refusals(program, seen)
    answers = [one for one in seen if one.stream and one.status == 200]
    # A model that small may not find an end.
    cut = not ended and any(time.monotonic() - one.newest < STALL_SECONDS for one in answers)
    facts = {"answers": len(answers), "cut": cut}
    if ended:
        if process.returncode and program.form:
            facts["useless"] = True
        elif process.returncode:
            wrong.append(f"exit code {process.returncode}")
        wrong += [] if any(one.done for one in answers) else ["no answer was completed"]
    elif not cut:
        wrong.append(f"it did not end within {MODEL_SECONDS} s")
    return wrong, facts, log + "\n".join(map(str, seen))


# ---- all of them -----------------------------------------------------------------------------------------------------


def result(program: Program, newest: bool, node: str, server: Any, model: str | None) -> dict[str, Any]:
    """Installs and runs one program; what the record has of it."""
    facts: dict[str, Any] = {"date": today()}
    try:
        folder = install(program, newest, node)
    except InstallError as error:
        return {**facts, "wrong": {"install": str(error)[-2000:]}}
    language = {"node": node} if program.npm else {"python": platform.python_version()}
    facts |= {"versions": versions(program, folder), **language, "wrong": {}}
    kinds = ["ask"] if model else ["loop", "cancel"]
    if not model and (program.shows or program.looks):
        kinds.append("picture")
        facts["pictures"] = True
    if not model and program.terminal and not (lacks := terminal.missing()):
        kinds.append("paste")
        facts["pasted"] = True
    elif not model and program.terminal:
        print(f"{program.name}: nothing is pasted, which needs {', '.join(lacks)}", flush=True)
    for kind in kinds:
        wrong, more, log = ask(program, folder, model, *server) if model else play(program, folder, kind)
        facts |= more
        if wrong:
            facts["wrong"][kind] = "\n".join(wrong)[:2000]
        path = BUILD / "logs" / f"{program.name}-{'newest' if newest else 'pinned'}-{kind}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*wrong, "", log]))
    return facts


def keep(name: str, way: str, facts: dict[str, Any]) -> None:
    """Puts a result into the record."""
    record = json.loads(page.RECORD.read_text()) if page.RECORD.exists() else {}
    record.setdefault(name, {})[way] = facts
    page.RECORD.write_text(json.dumps(record, indent=1) + "\n")


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
    failed = []
    if not args.page:
        import scene

        way = "model" if args.model else "newest" if args.newest else "pinned"
        with scene.real(args.model) if args.model else contextlib.nullcontext() as server:
            for name in args.names or programs:
                facts = result(programs[name], args.newest, node, server, args.model)
                print(f"{name} {', '.join(facts.get('versions', {}).values())}:", facts["wrong"] or "works", flush=True)
                failed += [name] if facts["wrong"] else []
                keep(name, way, facts)
    page.write()
    sys.exit(f"not as they should: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
