"""`draftwing verify`: has an answer made again from its receipt, and says whether it is the same."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.option_fields import SERVER
from draftwing.config.sources import POSITIONAL_MODEL, add_arguments
from draftwing.errors import ReceiptError

if TYPE_CHECKING:
    from draftwing.engine.receipt_replay import Replay
    from draftwing.text.tokenizer import Tokenizer


def add_verify(commands: Any) -> dict[str, Callable[[dict[str, Any]], None]]:
    """Adds the command to argparse's `commands`; returns what runs it."""
    verify = commands.add_parser(
        "verify",
        usage="draftwing verify RECEIPT [--model PATH] [options]",
        help="check the receipt of an answer",
        description="Runs the request of a receipt again, without drafts, and compares the answers. Exit code 0: it is "
        "the same; 1: it differs; 2: it cannot be checked. Options stand in place of the receipt's.",
        allow_abbrev=False,
    )
    verify.add_argument("receipt", metavar="RECEIPT", help="file with the receipt as JSON; -: standard input")
    add_arguments(verify, hidden=(SERVER,))
    return {"verify": run_verify}


def run_verify(arguments: dict[str, Any]) -> None:
    """Prints what became of it. Raises ReceiptError, ConfigError or CheckpointError where it cannot be checked, and
    SystemExit with code 1 where the answer differs."""
    from draftwing.engine.receipts import check_files, options_for, read_receipt, warnings_of

    receipt = read_receipt(_content(arguments.pop("receipt")))
    arguments.pop(POSITIONAL_MODEL, None)
    options = options_for(receipt, arguments)
    logging.getLogger("draftwing").setLevel(options.log_level.upper())
    check_files(receipt, options)
    from draftwing.engine.engine import Engine
    from draftwing.engine.receipt_replay import replay

    with contextlib.closing(Engine(options)) as engine:
        for warning in warnings_of(receipt, engine.info):
            print(f"draftwing: warning: {warning}", file=sys.stderr)
        found = replay(receipt, engine)
        print(in_words(found, len(receipt.answer.token_ids), engine.tokenizer))
    if not found.same:
        raise SystemExit(1)


def in_words(found: Replay, tokens: int, tokenizer: Tokenizer) -> str:
    """Returns one line about a replay. tokens: of the receipt's answer."""
    was, now = found.reasons
    if found.at is None:
        same = f"same: all {tokens} tokens, finish reason {was}"
        other = f"different: it ended by {was} in the receipt, by {now} now, after {tokens} tokens"
        return same if found.same else other

    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"

    line = f"different at token {found.at}: {shown(found.expected)} in the receipt, {shown(found.found)} now"
    return line if found.gap is None else f"{line}; their log probabilities differ by {abs(found.gap):.3g}"


def _content(name: str) -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff") if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ReceiptError(f"{name} cannot be read: {error}") from None
