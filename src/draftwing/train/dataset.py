"""Prepares the data of a run: reads it, keeps evaluation prompts out of it, and tokenizes conversations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwing.errors import ConfigError
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import (
    BadData,
    Conversation,
    Overlap,
    Prompt,
    Skipped,
    first_turns,
    held_out,
    read_conversations,
    read_prompts,
    without_overlap,
)
from draftwing.train.sequences import conversation_tokens
from draftwing.train.settings import Settings
from draftwing.train.store import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """Cleaned data: prompts to be answered, conversations as they are in tokens, first user turns of evaluation
    sets."""

    prompts: list[Prompt]
    conversations: list[Tokens]
    sets: dict[str, list[str]]
    skipped: Skipped


def read_dataset(settings: Settings, tokenizer: Callable[[], Tokenizer]) -> Dataset:
    """Reads and cleans what the settings name. tokenizer: loads it, which is only called for conversations.

    Raises ConfigError where nothing is left to train on.
    """
    skipped = Skipped()
    if not settings.prompts and not settings.conversations:
        raise ConfigError("there is nothing to train on: give --prompts or --conversations FILES")
    prompts = read_prompts(settings.prompts, skipped, settings.seed)
    talks = read_conversations(settings.conversations, skipped)
    sets = evaluation_sets(settings.eval_prompts)
    if sets:
        overlap = Overlap(text for texts in sets.values() for text in texts)
        prompts = without_overlap(prompts, overlap, skipped)
        talks = without_overlap(talks, overlap, skipped)
    else:  # some of the data is measured on instead of trained on
        items: list[Prompt | Conversation] = [*prompts, *talks]
        chosen = held_out((item.key for item in items), settings.held_out, settings.seed, "eval")
        texts = list(dict.fromkeys(item.turns[0] for item in items if item.key in chosen))
        sets = {"held out": texts} if texts else {}
        # Others may begin with what is measured. Runs of words would be too much: prompts of one file often share some.
        overlap = Overlap(texts, whole=True)
        prompts = without_overlap([prompt for prompt in prompts if prompt.key not in chosen], overlap, skipped)
        talks = without_overlap([talk for talk in talks if talk.key not in chosen], overlap, skipped)
    if settings.regenerate:
        asked = {prompt.key: prompt for prompt in prompts}
        for prompt in (talk.prompt() for talk in talks):
            if prompt.key in asked:  # conversations may differ in nothing but the answers
                skipped.note("repeated", prompt.where)
            else:
                asked[prompt.key] = prompt
        prompts, talks = list(asked.values()), []
    prompts = [dataclasses.replace(one, copy=copy) for copy in range(settings.answers) for one in prompts]
    conversations = []
    for talk in talks:
        try:
            conversations.append(conversation_tokens(talk, tokenizer(), settings.max_length))
        except BadData as error:
            skipped.note(error, talk.where)
    skipped.require(len(prompts) + len(conversations), "prompt or conversation")
    skipped.log()
    logger.info("%d prompts to answer, %d conversations as they are", len(prompts), len(conversations))
    return Dataset(prompts, conversations, sets, skipped)


def evaluation_sets(files: Sequence[str]) -> dict[str, list[str]]:
    """Returns the first user turns of each file of prompts, by the name of the set."""
    sets: dict[str, list[str]] = {}
    for file in files:
        path, broken = Path(file), Skipped()
        stem = path.name.partition(".")[0]
        name = path.parent.name if stem in ("question", "questions", "test") and path.parent.name else stem
        texts = first_turns(file, broken)
        broken.require(len(texts), f"evaluation prompt of {file}")
        sets[name if name not in sets else file] = texts
    return sets
