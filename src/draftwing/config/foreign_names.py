"""Names of options that SGLang, vLLM, llama.cpp and Ollama have and this server has not, and what to do about each.

Users bring their commands along. An option of SGLang's has no effect, which is logged once, or asks for what this
version cannot give, which is refused with what to do instead. An option of the others is refused, because its value may
be in another unit.
"""

from __future__ import annotations

import difflib
import logging
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unsupported:
    """kind: of the value, bool for a flag without one.  neutral: values that ask for nothing."""

    kind: type[Any]
    why: str
    neutral: tuple[Any, ...] = ()


def _unsupported(reasons: Mapping[str, Mapping[str, Any]]) -> dict[str, Unsupported]:
    return {
        name: Unsupported(kind, why, tuple(group.get("neutral", ())))
        for why, group in reasons.items()
        for kind in (bool, int, float, str)
        for name in group.get(kind.__name__, "").split()
    }


def _each(table: Mapping[str, str]) -> dict[str, str]:
    """Returns each of the names with what stands before them."""
    return {name: answer for answer, names in table.items() for name in names.split()}


_TABLES = tomllib.loads((Path(__file__).parent / "foreign_names.toml").read_text(encoding="utf8"))
NO_EFFECT, REFUSED = _unsupported(_TABLES["no_effect"]), _unsupported(_TABLES["refused"])
FOREIGN = NO_EFFECT | REFUSED
OURS, OF_REQUESTS = _each(_TABLES["ours"]), _each(_TABLES["of_requests"])  # our name of the same option or field
WITHOUT_COUNTERPART = _each(_TABLES["without_counterpart"])  # why there is none, and what to do
SHORT: Mapping[str, str] = _TABLES["short"]  # short options of llama.cpp and vLLM, and their long names
COMMANDS = _each(_TABLES["commands"])  # of other programs, and what to do


def take(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what remains when foreign options are taken out, logged or refused (ConfigError)."""
    for name, value in values.items():
        foreign = FOREIGN.get(name)
        # A flag that is off, like a None, was not asked for.
        if foreign is None or value is None or value is False or value in foreign.neutral:
            continue
        if name in REFUSED:
            raise ConfigError(f"--{name.replace('_', '-')} is not supported: {foreign.why}")
        logger.warning("--%s has no effect: %s", name.replace("_", "-"), foreign.why)
    return {name: value for name, value in values.items() if name not in FOREIGN}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns options that SGLang's environment variables ask for."""
    options: dict[str, Any] = {}
    if _true(environ, "SGLANG_ENABLE_SPEC_V2"):
        logger.warning("SGLANG_ENABLE_SPEC_V2 is read as --enable-overlap; any --speculative-eagle-topk works with it")
        options["enable_overlap"] = True
    if _true(environ, "SGLANG_NGRAM_FORCE_GREEDY_VERIFY"):
        logger.warning(
            "SGLANG_NGRAM_FORCE_GREEDY_VERIFY has no effect: %s. For greedy text, send temperature 0",
            FOREIGN["speculative_use_rejection_sampling"].why,
        )
    length = environ.get("SGLANG_SIMULATE_ACC_LEN", "").strip()
    if length:
        try:
            value = float(length)
        except ValueError:
            raise ConfigError(f"SGLANG_SIMULATE_ACC_LEN: expected a number, found {length!r}") from None
        if value > 0:  # SGLang's default is -1
            logger.warning("SGLANG_SIMULATE_ACC_LEN is read as --simulate-accept-length %s", length)
            options["simulate_accept_length"] = value
    return options


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


_WORD, _WHOLE = 0.75, 0.93  # how alike a word and its slip are, and names without their dashes

PREFIXES = ("OLLAMA_", "LLAMA_ARG_")  # of environment variables that are options of Ollama's and llama.cpp's servers


def instead(name: str, options: Collection[str], typed: Callable[[str], str] = repr) -> str:
    """Returns what to do about a name that is none of the `options`; empty where that is not known. typed: how options
    are written where the name stood."""
    for ours in (name, OURS.get(name), OF_REQUESTS.get(name)):
        if ours is not None and ours in options:
            return f"here it is {typed(ours)}"
    if name in OF_REQUESTS:
        return f"it is no option of this server but a field of each request, {OF_REQUESTS[name]!r}"
    if name in WITHOUT_COUNTERPART:
        return WITHOUT_COUNTERPART[name]
    meant = slip(name, [option for option in options if option not in FOREIGN])
    return f"the nearest option is {typed(meant)}" if meant else ""


def slip(name: str, options: Collection[str]) -> str | None:
    """Returns the option that was meant by a name with a spelling slip. Another word is none: it may ask for another
    thing."""

    def near(one: str, other: str, least: float) -> bool:
        return difflib.SequenceMatcher(None, one, other).ratio() >= least

    for option in difflib.get_close_matches(name, options, n=3):
        words = zip_longest(name.split("_"), option.split("_"), fillvalue="")
        joined = name.replace("_", ""), option.replace("_", "")
        if all(near(*pair, _WORD) for pair in words) or near(*joined, _WHOLE):
            return option
    return None


def of_others(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, str]:
    """Returns environment variables that other servers read, and the name of our option for each. options: ours."""
    known, found = set(options), {}
    for variable in environ:
        for prefix in PREFIXES:
            name = variable.removeprefix(prefix).lower()
            ours = OURS.get(name, name)
            if variable.startswith(prefix) and ours in known:
                found[variable] = ours
    return found
