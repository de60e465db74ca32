"""A process that renders chat templates: `python -m draftwing.text.template_sandbox FD` reads jobs from a socket.

A template is foreign code. Jinja2's sandbox keeps it from this machine, but not from time and memory: one loop, or one
`'a' * 10**10`, would hold the interpreter for good. So the process limits itself, and the system ends it.
"""

from __future__ import annotations

import json
import pickle
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwing.requests.refusals import well_formed
from draftwing.text.sandbox import DONE, LIMIT, REFUSED, serve

SECONDS = 2.0  # of a processor, for one text
MEMORY = 2**30  # bytes of address space
MAX_CHARACTERS = 2**24  # of a text

_MAX_MESSAGE = 2000  # characters of an error, whose text is the template's


class Job(NamedTuple):
    """variables: of the template. None: see whether it is one."""

    source: str
    variables: dict[str, Any] | None


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a mutable set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as models saw it in training: jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class Renderer:
    """Does jobs. Keeps compiled templates: a model has one or two."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def answer(self, data: memoryview) -> tuple[bytes, str]:
        """Returns how the job ended, and the text or the error. data: a pickled `Job`."""
        try:
            job: Job = pickle.loads(data)
        except Exception as error:  # an object of a module that is not there
            return REFUSED, f"the chat template can be given plain values alone: {error}"
        try:
            if job.source not in self._compiled:
                if len(self._compiled) > 8:
                    self._compiled.clear()
                self._compiled[job.source] = self._environment.from_string(job.source)
            text = "" if job.variables is None else self._compiled[job.source].render(job.variables)
        except jinja2.TemplateSyntaxError as error:
            return REFUSED, f"the chat template has a syntax error in line {error.lineno}: {error.message}"
        except RecursionError:
            what = "the chat template is" if job.variables is None else "the messages are"
            return REFUSED, f"{what} nested too deeply for the chat template's language"
        except MemoryError:
            return LIMIT, f"takes more than {MEMORY >> 20} MiB of memory"
        # Not only TemplateError: a template may index a missing key, concatenate None, or divide by zero.
        except Exception as error:
            return REFUSED, f"the chat template refuses these messages: {error}"
        if len(text) > MAX_CHARACTERS:
            return LIMIT, f"makes more than {MAX_CHARACTERS} characters"
        return DONE, text


def main(conn: Connection) -> None:
    """Answers until the other side is gone."""
    renderer = Renderer()

    def answer(job: memoryview) -> tuple[bytes, list[bytes]]:
        kind, text = renderer.answer(job)
        return kind, [well_formed(text if kind == DONE else text[:_MAX_MESSAGE]).encode()]

    serve(conn, answer, SECONDS, MEMORY)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
