"""Makes a token map (spec/token_map.py): counts the tokens of a corpus and keeps the most frequent."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwing.errors import ConfigError, RequestError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import Skipped, entries, role_and_content

logger = logging.getLogger(__name__)


class TokenMapReport(NamedTuple):
    """documents: texts and conversations counted.  counted: their tokens.  kept: ids written.  coverage: share of the
    counted tokens that are among those written."""

    documents: int
    counted: int
    kept: int
    coverage: float


def write_token_map(files: Sequence[str | Path], tokenizer: Tokenizer, size: int, out: str | Path) -> TokenMapReport:
    """Writes the `size` most frequent token ids of `files` to `out`, most frequent first, the lower id of equals.

    files: `.jsonl` with one text or conversation a line ({"text": ...}, {"messages": [{"role", "content"}]} or
    {"conversations": [{"from", "value"}]}), `.json` with a list of such, or plain text, a document each.
    out: `.pt` (a list, as torch.save writes it), `.json`, or text with an id a line.

    Ids that end an answer are always among them: a drafter that cannot propose them drafts past every end.
    A corpus of fewer different tokens gives a shorter list. Raises ConfigError for files that cannot be read.
    """
    out = Path(out)
    if size < 1:
        raise ConfigError(f"size of a token map: expected at least 1, found {size}")
    counts: Counter[int] = Counter()
    documents = 0
    for file in files:
        for document in _documents(Path(file)):
            counts.update(_encode(document, tokenizer))
            documents += 1
    counted = counts.total()
    if not counted:
        raise ConfigError(f"no text to count in {', '.join(map(str, files)) or 'no files'}")
    ending = sorted(tokenizer.stop_ids)
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    kept = set(ending) | set([i for i in ranked if i not in tokenizer.stop_ids][: max(size - len(ending), 0)])
    ids = sorted(kept, key=lambda i: (-counts[i], i))
    _write(ids, out)
    report = TokenMapReport(documents, counted, len(ids), sum(counts[i] for i in ids) / counted)
    if report.kept < size:
        logger.warning("the corpus has %d different tokens; the token map is shorter than %d", report.kept, size)
    share = 100 * report.coverage
    logger.info("token map %s: %d tokens, %.2f%% of %d in %d documents", out, report.kept, share, counted, documents)
    return report


def _encode(document: str | list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document)
    try:
        return tokenizer.encode_chat(document, add_generation_prompt=False)
    except RequestError:  # no chat template, or one that refuses this order of roles: the words still count
        return tokenizer.encode("\n".join(str(message["content"]) for message in document))


def _documents(path: Path) -> Iterator[str | list[dict[str, Any]]]:
    if path.suffix not in (".jsonl", ".json"):
        try:
            yield path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return
    skipped = Skipped()
    for where, entry in entries(path, skipped):
        yield _document(entry, where)
    for reason, (where, *_) in skipped.examples.items():
        raise ConfigError(f"{path} cannot be read: {reason} ({where})")


def _document(entry: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(entry, dict):
        turns = entry.get("text", entry.get("messages", entry.get("conversations")))
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            found = map(role_and_content, turns)
            return [{"role": role or "user", "content": content or ""} for role, content in found]
        entry = turns
    if isinstance(entry, str):
        return entry
    raise ConfigError(f"{where}: expected a text, or an object with text, messages or conversations")


def _write(ids: list[int], out: Path) -> None:
    try:
        with out.open("wb") as file:
            if out.suffix in (".pt", ".pth", ".bin"):
                import torch

                torch.save(ids, file)
            else:
                text = json.dumps(ids) if out.suffix == ".json" else "\n".join(map(str, ids))
                file.write(f"{text}\n".encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
