"""Whether a draft head fits its target: a look at the first hundred steps that it drafted for, against what its card or
its kind should have. One that does not fit costs speed for as long as nobody notices, so the log says so, with the
likely cause in one sentence."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.config.options import Options
from draftwing.engine.executor import Executor
from draftwing.engine.stats import DraftCounts
from draftwing.errors import DraftwingError
from draftwing.files import load_json
from draftwing.layers.norm import RMSNorm
from draftwing.models.decoder import DecoderModel
from draftwing.models.folder import folder_tensors
from draftwing.models.heads.base import FeatureHead
from draftwing.models.heads.eagle import EagleHead
from draftwing.models.heads.mtp import MTPHead
from draftwing.spec.fit_probe import LEAST, Finding, can_probe, probe

log = logging.getLogger("draftwing")

STEPS = 100  # with drafts of the head, before it is judged
BUSY = 20  # times as many, after which it is spoken of whatever runs
FEW = 0.5  # of what should be right, below which a head does not fit
# Share of first drafts that published heads of a kind have right, of chat, where all are worst: 0.53 to 0.9.
_USUAL: dict[type[FeatureHead], float] = {EagleHead: 0.5, MTPHead: 0.6}
_OTHERS = 0.55
_ROWS = 64  # of an embedding that are compared
_BASE = re.compile(r"^base_model:\s*(?:\n\s*-\s*)?[\"']?([^\s\"'\[]+)", re.MULTILINE)


class Expected(NamedTuple):
    """share: of first drafts that should be right.  says: who says so."""

    share: float
    says: str


class HeadFit:
    """Looks at a head's counts after each step until it is judged, once."""

    def __init__(
        self, head: str, expected: Expected, counts: Callable[[], DraftCounts | None],
        texts: Callable[[], Sequence[list[int]]], cause: Callable[[Sequence[int]], str],
    ) -> None:  # fmt: skip
        """head: as the log calls it.  counts: of its drafts so far.  texts: of requests that run.  cause: says why a
        head does not fit, from a text of the target's, or from none."""
        self._head, self._expected, self._counts, self._texts, self._cause = head, expected, counts, texts, cause
        self._text: Sequence[int] = ()
        self._rate: float | None = None  # of a head that does not fit
        self.done = False

    def look(self) -> None:
        """Looks at the drafts of all steps so far."""
        counts = None if self.done else self._counts()
        if counts is None or counts.drafts < STEPS:
            return
        if self._rate is not None:
            if counts.drafts >= BUSY * STEPS:  # a server that never rests
                self._say(())
            return
        rate = counts.accepted_at[0] / counts.drafts
        if rate >= FEW * self._expected.share:
            self.done = True
            return
        self._rate = rate
        self._text = max(self._texts(), key=len, default=[])  # which goes on to grow

    def rest(self) -> None:
        """Says what was found, when there is nothing else to do: to look for a cause takes some passes of both."""
        if not self.done and self._rate is not None:
            self._say(self._text)

    def _say(self, text: Sequence[int]) -> None:
        self.done = True
        assert self._rate is not None
        log.warning(
            "%s does not fit this model: %.0f%% of its first drafts were right in %d steps, %s says %.0f%%; %s",
            self._head, 100 * self._rate, STEPS, self._expected.says, 100 * self._expected.share,
            self._cause(text),
        )  # fmt: skip


def watch_head(
    options: Options, executor: Executor, folder: Path, counts: Callable[[str], DraftCounts | None],
    texts: Callable[[], Sequence[list[int]]],
) -> HeadFit | None:  # fmt: skip
    """Returns what watches the head that an engine drafts with; None where there is none, or it is made up. folder:
    the head's.  counts: of a drafter, by its name."""
    spec, head, target, ops = options.drafter_spec, executor.head, executor.model, executor.ops
    spec = (spec.parts or (spec,))[0]
    if head is None or is_made_up(options):
        return None

    def cause(text: Sequence[int]) -> str:
        finding = Finding(0.0)
        if len(text) >= LEAST and can_probe(head, target):
            finding = probe(head, target, ops, text)
        embeddings = partial(executor.run_on_all_ranks, _embeddings)
        return likely_cause(finding, suspicions(head, folder, target, options.model, embeddings))

    name = f"the {spec.name} head in {folder}"
    return HeadFit(name, expected(folder, head), lambda: counts(spec.name), texts, cause)


def is_made_up(options: Options) -> bool:
    """Returns whether acceptance says nothing of a head: weights are random, or what is accepted is simulated."""
    return options.dummy or "simulated" in options.label


def expected(folder: Path, head: FeatureHead) -> Expected:
    """Returns what the head's own report (`draftwing train`) says of greedy text, or what its kind usually has."""
    try:
        records = load_json(folder / "eval.json")["records"]
        found = [record["positions"][0] for record in records if record["temperature"] == 0]
        return Expected(min(found), "its card")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return Expected(_USUAL.get(type(head), _OTHERS), "its kind")


def likely_cause(finding: Finding, suspicions: Sequence[str]) -> str:
    """Returns the end of a sentence."""
    if finding.better:
        return f"{finding.cause} ({finding.better:.0%} of a sample, {finding.rate:.0%} as it is)"
    for cause in (finding.cause, *suspicions):
        if cause:
            return cause
    return "it was probably trained for another model, or for other weights of this one"


@torch.inference_mode()
def _embeddings(executor: Executor) -> Tensor:
    """Returns the embeddings of all tokens, [vocab, hidden] float32, of which each rank may have some."""
    model = executor.model
    return model.embed(torch.arange(model.config.vocab_size, device=model.norm.weight.device)).float().cpu()


def suspicions(
    head: FeatureHead, folder: Path, target: DecoderModel, name: str, embeddings: Callable[[], Tensor]
) -> list[str]:  # fmt: skip
    """Returns what its files say that speaks for a cause, the surest first. embeddings: gives the target's."""
    norms = [part.weight for part in head.modules() if isinstance(part, RMSNorm)]
    found = []
    if norms and all(bool((weight == 1).all()) for weight in norms):
        found.append("its weights look untrained: all of its norms are 1")
    if folder.is_dir():
        try:
            causes = _other_tokenizer(folder, target), _other_embedding(folder, target, embeddings)
            found += [one for one in causes if one]
        except (OSError, ValueError, KeyError, DraftwingError):
            log.debug("the files of %s say nothing", folder, exc_info=True)
        base = _base(folder)
        if base is not None and not _alike(base, name):
            found.append(f"its card names {base} as its target, and this one is {name}")
    return found


def _other_tokenizer(folder: Path, target: DecoderModel) -> str:
    """Stop tokens are the tokenizer's: where a head's config names others, it was made for another one."""
    own = load_json(folder / "config.json").get("eos_token_id")
    ids = set(own if isinstance(own, list) else [own]) - {None}
    if not ids or not target.config.stop_ids or ids & set(target.config.stop_ids):
        return ""
    return f"it is for another tokenizer, which ends texts by {min(ids)} (eos_token_id of its config)"


def _other_embedding(folder: Path, target: DecoderModel, embeddings: Callable[[], Tensor]) -> str:
    """Many heads carry a frozen copy of their target's embedding; some carry random values, which say nothing."""
    for name, tensor in folder_tensors(folder):
        if not name.endswith("embed_tokens.weight") or tensor.shape != (
            target.config.vocab_size, target.config.hidden_size,
        ):  # fmt: skip
            continue
        ids = torch.linspace(0, len(tensor) - 1, _ROWS).long()
        theirs = tensor[ids].float()
        everything = embeddings()
        near = F.cosine_similarity(theirs, everything[ids]).mean().item()
        if near > 0.98:
            return ""
        nearest = (F.normalize(theirs, dim=1) @ F.normalize(everything, dim=1).t()).max(1)
        if near < 0.5 and nearest.values.mean() > 0.98:
            return "it is for another tokenizer: its copy of the embedding has the target's rows in another order"
        if near > 0.3:
            return "it was trained for other weights of this model: its copy of the embedding differs from the target's"
        return "" if float(theirs.std()) > 2 * float(everything.std()) else (
            "it was trained for another model: its copy of the embedding is not the target's"
        )  # fmt: skip
    return ""


def _base(folder: Path) -> str | None:
    """Returns the model that a head's card or config names."""
    config: dict[str, Any] = load_json(folder / "config.json")
    verifier = config.get("speculators_config") or {}
    named = (verifier.get("verifier") or {}).get("name_or_path") if isinstance(verifier, dict) else None
    if isinstance(named, str):
        return named
    try:
        match = _BASE.search((folder / "README.md").read_text(encoding="utf8", errors="replace"))
    except OSError:
        return None
    return None if match is None else match[1]


def _alike(base: str, name: str) -> bool:
    """Returns whether two names may be of one model: quantised ones have something added."""
    first, other = (re.sub(r"[^a-z0-9]", "", one.rstrip("/").rpartition("/")[2].lower()) for one in (base, name))
    return bool(first) and (first in other or other in first)
