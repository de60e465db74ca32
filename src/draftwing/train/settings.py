"""Defines what `draftwing train` can be asked.

No torch here: settings are checked before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from draftwing.config.drafters import DEFAULT, TRAINED, DrafterSpec, Training, training
from draftwing.config.fields import check_fields, flag, option
from draftwing.config.trees import checked_shape
from draftwing.errors import ConfigError
from draftwing.tree_shape import TreeShape

DATA, GENERATE, CAPTURE, FIT, EVAL, CARD = "data", "generate", "capture", "fit", "eval", "card"
_DEFAULT = next(name for name, spec in TRAINED.items() if spec is DEFAULT)
MARKOV_HEADS = ("vanilla", "gated", "rnn")  # as `models.heads.block_config.MARKOV`
BLOCK_LOSSES = ("text", "kl", "tv", "lk_hybrid", "d_pace")  # as `train.block_loss.Kind`
_OF_BLOCKS = (
    "draft_layers", "draft_lm_head", "block_steps", "markov_head", "markov_rank", "mask_token", "block_loss", "anchors"
)  # fmt: skip
_OF_DSPARK = ("markov_head", "markov_rank")
# What a head is made like; one that is loaded is like that already.
_OF_FRESH = ("draft_layers", "draft_lm_head", "block_steps", *_OF_DSPARK, "mask_token", "ffn_size")
_HOTTEST = 100  # as `SamplingParams.temperature`


@dataclass(frozen=True)
class Settings:
    """What one run is asked for. Tuples are given with spaces on the command line; None means a default that follows
    from others."""

    seed: int = option(
        0, DATA, "seed of everything random: answers, samples, weights, batches", minimum=0, maximum=2**32 - 1
    )  # the loop makes a generator's 64 bits of it and the number of the step

    prompts: tuple[str, ...] = option(
        (), DATA, "files of prompts that the model answers: JSON lines, JSON, CSV or lines of text, also as .gz; "
        "FILE:N takes a random N", common=True,
    )  # fmt: skip
    conversations: tuple[str, ...] = option(
        (),
        DATA,
        "JSON lines of conversations (ShareGPT's or OpenAI's layout), trained on as they are",
        common=True,
    )
    regenerate: bool = option(False, DATA, "replace the answers in --conversations by the model's own")
    traffic: str | None = option(
        None, DATA, "folder of `serve --learn`: answers that clients got are learnt, from the head that is served, and "
        "the head is judged by later ones", aliases=("from",), metavar="DIR", common=True,
    )  # fmt: skip
    general_share: float = option(
        0.3, DATA, "share of general text beside traffic, which the model writes itself, prompts and answers, so that "
        "nothing is forgotten", minimum=0, maximum=0.9,
    )  # fmt: skip
    eval_prompts: tuple[str, ...] = option(
        (), DATA, "files of prompts to measure acceptance on; prompts that share 13 words in a row with them are not "
        "trained on (default: some prompts are held out)", common=True,
    )  # fmt: skip
    max_length: int = option(2048, DATA, "tokens of a conversation; longer ones are skipped", minimum=32)

    max_tokens: int = option(1024, GENERATE, "tokens of an answer", minimum=16)  # as `train.generate.MIN_ANSWER`
    answers: int = option(
        1, GENERATE, "answers to each prompt; those after the first are never greedy", minimum=1, common=True
    )
    greedy_share: float = option(
        0.5, GENERATE, "share of prompts that are answered at temperature 0", minimum=0, maximum=1
    )
    temperatures: tuple[float, ...] = option(
        (0.6, 1.0), GENERATE, "lowest and highest temperature of the others", minimum=0, maximum=_HOTTEST
    )

    algorithm: str = option(_DEFAULT, CAPTURE, "kind of head", choices=tuple(TRAINED), common=True)
    data: str | None = option(
        None, CAPTURE, "folder of another run whose answers and hidden states are used (default: --out)", common=True
    )
    online: bool = option(
        False, CAPTURE, "compute hidden states while training, for data that would not fit on the disk"
    )
    aux_layers: tuple[int, ...] = option(
        (),
        CAPTURE,
        "auxiliary hidden states that heads of several depths read, as layers before them (default: EAGLE3 2, L/2, "
        "L-3; DFLASH and DSPARK five)",
    )
    held_out: float = option(0.02, CAPTURE, "share of conversations held out to measure the loss", minimum=0, maximum=1)

    init_head: tuple[str, ...] = option(
        (), FIT, "head to start from, in place of a fresh one; the mean of several that came from one head"
    )
    draft_vocab_size: int | None = option(
        None, FIT, "tokens that heads of several depths may draft (default: EAGLE3 a quarter of the vocabulary, at "
        "most 32000; DFLASH and DSPARK all, with the target's lm_head)", minimum=64,
    )  # fmt: skip
    draft_layers: int = option(5, FIT, "layers of a head that drafts blocks", minimum=1, maximum=64)
    block_steps: int = option(0, FIT, "tokens that DFLASH and DSPARK draft at once (default: 7)", minimum=0, maximum=63)
    draft_lm_head: str = option(
        "own", FIT, "lm_head of DFLASH and DSPARK over --draft-vocab-size tokens: one that is trained, or these rows "
        "of the target's, which is not stored", choices=("own", "target"),
    )  # fmt: skip
    markov_head: str = option("vanilla", FIT, "what corrects DSPARK's tokens by those above them", choices=MARKOV_HEADS)
    markov_rank: int = option(256, FIT, "rank of that correction", minimum=1)
    mask_token: int | None = option(
        None, FIT, "token id that stands for those to be drafted (default: the highest that no text has)", minimum=0,
    )  # fmt: skip
    block_loss: str | None = option(
        None, FIT, "what a block is trained for (default: DFLASH kl, DSPARK tv)", choices=BLOCK_LOSSES
    )
    anchors: float = option(
        0.25, FIT, "share of a text's tokens that open a block in each forward", minimum=0.001, maximum=1
    )
    ffn_size: int = option(0, FIT, "width of the head's MLP (default: the target's)", minimum=0)
    epochs: float = option(
        1.0,
        FIT,
        "passes over the data; 0: train nothing and keep --init-head as it is",
        minimum=0,
        common=True,
    )
    steps: int = option(0, FIT, "steps of the optimizer, in place of epochs", minimum=0)
    minutes: float = option(
        0.0, FIT, "minutes of training, in place of epochs and steps: the learning rate follows the clock", minimum=0,
        common=True,
    )  # fmt: skip
    optimizer: str = option(
        "adamw",
        FIT,
        "muon: Muon for the matrices of the layer, AdamW for the rest",
        choices=("adamw", "muon"),
    )
    lr: float = option(
        0.0, FIT, "highest learning rate (default: 0.4 / hidden size; DFLASH and DSPARK 6e-4)", minimum=0
    )
    warmup: float = option(0.02, FIT, "share of the steps in which the learning rate rises", minimum=0, maximum=1)
    batch_tokens: int = option(8192, FIT, "tokens of one forward", minimum=1)
    accumulate: int = option(1, FIT, "forward passes per step and GPU", minimum=1)
    ttt_steps: int | None = option(
        None, FIT, "drafts per chain of the training-time test (default: 7; EAGLE: 1)", minimum=1
    )
    ttt_decay: float | None = option(
        None,
        FIT,
        "weight of each draft of a chain, relative to the one before (default: 0.8; blocks: exp(-1/4))",
        minimum=0,
    )
    target_temperature: float = option(
        1.0, FIT, "temperature of the target's distribution in the loss; below 1 for greedy traffic", minimum=0.01,
    )  # fmt: skip
    text_share: float = option(
        0.0, FIT, "share of what is learnt that is the text's own token, not the target's distribution, which knows "
        "nothing of a request's penalties; for blocks see --block-loss", minimum=0, maximum=1,
    )  # fmt: skip
    clip: float = option(0.5, FIT, "largest norm of a gradient", minimum=0)
    save_every: int = option(500, FIT, "steps after which the state is saved", minimum=1)
    eval_every: int = option(500, FIT, "steps after which held-out loss is measured", minimum=1)
    log_every: int = option(20, FIT, "steps between lines of metrics.csv", minimum=1)
    gpus: int = option(1, FIT, "GPUs (or with --device cpu processes) that generate and train", minimum=1, common=True)

    shapes: tuple[str, ...] = option(
        ("3,1,4", "5,4,16", "6,10,60"), EVAL, "trees to measure: steps, topk, draft tokens"
    )
    eval_count: int = option(80, EVAL, "most prompts of each evaluation file", minimum=1)
    eval_tokens: int = option(128, EVAL, "tokens of an answer that is measured", minimum=1)
    eval_temperatures: tuple[float, ...] = option(
        (0.0, 1.0), EVAL, "temperatures to measure at", minimum=0, maximum=_HOTTEST
    )
    eval_concurrency: int = option(8, EVAL, "requests at once", minimum=1)

    licence: tuple[str, ...] = option((), CARD, "source and licence of the data, one text per source")
    max_file_mb: int = option(5000, CARD, "largest file of the head, in MB", minimum=1)

    def check(self) -> None:
        """Raises ConfigError for values that cannot work."""
        check_fields(self)
        low, high = (*self.temperatures, *self.temperatures)[:2] if self.temperatures else (-1.0, -1.0)
        if len(self.temperatures) > 2 or not 0 <= low <= high:
            raise ConfigError(f"--temperatures: expected the lowest and the highest, found {list(self.temperatures)}")
        if not self.clip:
            raise ConfigError("--clip: expected a norm above 0, found 0, with which nothing is learnt")
        if self.held_out == 1:
            raise ConfigError("--held-out: expected less than 1, found 1, which leaves nothing to train on")
        if self.traffic is not None and (odd := self._given(("prompts", "conversations", "regenerate"))):
            raise ConfigError(f"{odd}: not with --from, whose general text the model writes itself")
        if self.regenerate and not self.conversations:
            raise ConfigError("--regenerate needs --conversations, whose answers it replaces")
        if not self.training.aux_hidden_states and (self.aux_layers or self.draft_vocab_size):
            able = " and ".join(name for name in TRAINED if training(name).aux_hidden_states)
            raise ConfigError(f"--aux-layers and --draft-vocab-size are for --algorithm {able}")
        blocks = {name for name in TRAINED if bool(training(name).block)}
        for names, algorithms, why in (
            (_OF_BLOCKS, blocks, ""),
            (("ttt_steps", "text_share"), TRAINED.keys() - blocks, ""),
            (_OF_DSPARK, {"DSPARK"}, ""),
            (("ffn_size",), TRAINED.keys() - {"MTP"}, ", a layer of the target's own shape"),
        ):
            if self.algorithm not in algorithms and (odd := self._given(names)):
                shown = " and ".join(name for name in TRAINED if name in algorithms)
                raise ConfigError(f"{odd}: for --algorithm {shown}, found {self.algorithm}{why}")
        if self.init_head and (odd := self._given(_OF_FRESH)):
            raise ConfigError(f"{odd}: for fresh heads; one of --init-head is as it was made, so leave this out")
        if self.steps and self.minutes:
            raise ConfigError(f"--steps and --minutes: expected one of them, found {self.steps} and {self.minutes}")
        if not self.trains and not self.init_head:
            raise ConfigError("--epochs 0 trains nothing, which is only for --init-head")
        trees, steps = self.trees(), self.block_steps or self.training.block
        if steps and not self.init_head and any(tree.depth > steps for tree in trees):
            raise ConfigError(
                f"--shapes: expected trees of at most {steps} steps, as many as a block has (--block-steps); found "
                f"{' '.join(self.shapes)}"
            )

    def _given(self, names: Sequence[str]) -> str:
        """Returns the flags of those that are not as they are by default."""
        return " and ".join(flag(name) for name in names if getattr(self, name) != FIELDS[name]["default"])

    @property
    def drafter(self) -> DrafterSpec:
        """Returns the drafter that runs the head."""
        return TRAINED[self.algorithm]

    @property
    def training(self) -> Training:
        """Returns how the head is made."""
        return training(self.algorithm)

    @property
    def trains(self) -> bool:
        """Tells whether there is any step of training; else the head is the mean of --init-head."""
        return bool(self.epochs or self.steps or self.minutes)

    def trees(self) -> list[TreeShape]:
        found = []
        for text in self.shapes:
            parts = text.replace(" ", "").split(",")
            if len(parts) != 3 or not all(part.isdecimal() for part in parts):
                raise ConfigError(f"--shapes: expected steps,topk,draft tokens such as 5,4,16; found {text!r}")
            found.append(checked_shape([int(part) for part in parts], "--shapes"))
        return found


FIELDS = {spec.name: {**spec.metadata, "default": spec.default} for spec in dataclasses.fields(Settings)}
