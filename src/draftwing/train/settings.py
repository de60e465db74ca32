"""Defines what `draftwing train` can be asked (`Settings`), and what a run's folder remembers of that (`Run`).

No torch here: settings are checked before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.config.adapters import AdapterPath, adapter_paths
from draftwing.config.drafters import DEFAULT, NO_DRAFTER, TRAINED, DrafterSpec, Training, training
from draftwing.config.fields import check_fields, flag, option
from draftwing.config.options import Options
from draftwing.config.trees import TreeShape, checked_shape
from draftwing.errors import ConfigError
from draftwing.files import load_json, write_json
from draftwing.learn.history import HeadHistory

DATA, GENERATE, CAPTURE, FIT, EVAL, CARD = "data", "generate", "capture", "fit", "eval", "card"
_DEFAULT = next(name for name, spec in TRAINED.items() if spec is DEFAULT)
NEW = "none"  # in place of a folder of factors: none, to begin with
MARKOV_HEADS = ("vanilla", "gated", "rnn")  # as `models.heads.config.MARKOV`
BLOCK_LOSSES = ("text", "kl", "tv", "lk_hybrid", "d_pace")  # as `train.losses.Kind`
_OF_BLOCKS = (
    "draft_layers", "draft_lm_head", "block_steps", "causal_block", "markov_head", "markov_rank", "mask_token",
    "block_loss", "anchors",
)  # fmt: skip
_OF_DSPARK = ("markov_head",)
_OF_PAIRS = ("markov_rank",)  # of tokens that follow each other
# What a head is made like; one that is loaded is like that already.
_OF_FRESH = (
    "draft_layers", "draft_lm_head", "block_steps", "causal_block", *_OF_DSPARK, *_OF_PAIRS, "mask_token", "ffn_size"
)  # fmt: skip
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
        (), DATA, "JSON lines of conversations (ShareGPT's or OpenAI's layout), trained on as they are", common=True
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
    adapter: str | None = option(
        None, DATA, "adapter (LoRA) of the model that the head is to draft for: it writes the answers and their hidden "
        "states, and the head is judged with it", metavar="NAME=PATH", common=True,
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
    default_share: float = option(
        0.0, GENERATE, "share of the others that are drawn as requests are that set nothing: with the model's own "
        "temperature, min-p and penalties", minimum=0, maximum=1,
    )  # fmt: skip

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
        "L-3; heads that draft blocks five)",
    )
    held_out: float = option(0.02, CAPTURE, "share of conversations held out to measure the loss", minimum=0, maximum=1)

    init_head: tuple[str, ...] = option(
        (), FIT, "head to start from, in place of a fresh one; the mean of several that came from one head"
    )
    init_factors: str | None = option(
        None, FIT, "folder of factors that --head-rank begins with, none: new ones (default: none, with --from those "
        "that are served)", metavar="DIR",
    )  # fmt: skip
    head_rank: int = option(
        0, FIT, "rank of factors that are trained for the rows of --adapter beside --init-head, which drafts for all "
        "others and stays as it is; 0: a whole head", minimum=0, maximum=256, common=True,
    )  # fmt: skip
    draft_vocab_size: int | None = option(
        None, FIT, "tokens that heads of several depths may draft (default: EAGLE3 a quarter of the vocabulary, at "
        "most 32000; heads that draft blocks all, with the target's lm_head)", minimum=64,
    )  # fmt: skip
    draft_layers: int = option(5, FIT, "layers of a head that drafts blocks", minimum=1, maximum=64)
    block_steps: int = option(0, FIT, "tokens that such a head drafts at once (default: 7)", minimum=0, maximum=63)
    causal_block: bool = option(False, FIT, "let rows of such a head's block see none after them, as JetSpec's do")
    draft_lm_head: str = option(
        "own", FIT, "lm_head of such a head over --draft-vocab-size tokens: one that is trained, or these rows "
        "of the target's, which is not stored", choices=("own", "target"),
    )  # fmt: skip
    markov_head: str = option("vanilla", FIT, "what corrects DSPARK's tokens by those above them", choices=MARKOV_HEADS)
    markov_rank: int = option(256, FIT, "rank of that correction, and of DFLASH2's pairs", minimum=1)
    mask_token: int | None = option(
        None, FIT, "token id that stands for those to be drafted (default: the highest that no text has)", minimum=0,
    )  # fmt: skip
    block_loss: str | None = option(
        None, FIT, "what a block is trained for (default: DFLASH and DFLASH2 kl, DSPARK tv)", choices=BLOCK_LOSSES
    )
    anchors: float = option(
        0.25, FIT, "share of a text's tokens that open a block in each forward", minimum=0.001, maximum=1
    )
    ffn_size: int = option(0, FIT, "width of the head's MLP (default: the target's)", minimum=0)
    epochs: float = option(
        1.0, FIT, "passes over the data; 0: train nothing and keep --init-head as it is", minimum=0, common=True
    )
    steps: int = option(0, FIT, "steps of the optimizer, in place of epochs", minimum=0)
    minutes: float = option(
        0.0, FIT, "minutes of training, in place of epochs and steps: the learning rate follows the clock", minimum=0,
        common=True,
    )  # fmt: skip
    optimizer: str = option(
        "adamw", FIT, "muon: Muon for the matrices of the layer, AdamW for the rest", choices=("adamw", "muon")
    )
    lr: float = option(
        0.0, FIT, "highest learning rate (default: 0.4 / hidden size; ten times that of factors; of blocks 6e-4)",
        minimum=0,
    )  # fmt: skip
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
        _ = self.adapter_path
        for broken, message in _RULES:
            if found := broken(self):
                raise ConfigError(message.format(s=self, found=found))

    def given(self, *names: str) -> str:
        """Returns the flags of those that are not as they are by default."""
        return " and ".join(flag(name) for name in names if getattr(self, name) != FIELDS[name]["default"])

    @property
    def adapter_path(self) -> AdapterPath | None:
        """Returns the adapter by its name. Raises ConfigError."""
        return None if self.adapter is None else adapter_paths([self.adapter])[0]

    @property
    def factors(self) -> Path | None:
        """Returns the folder of factors that training begins with, None: new ones."""
        return None if self.init_factors in (None, NEW) else Path(str(self.init_factors))

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

    @property
    def shown_shapes(self) -> str:
        return " ".join(self.shapes)

    def trees(self) -> list[TreeShape]:
        found = []
        for text in self.shapes:
            parts = text.replace(" ", "").split(",")
            if len(parts) != 3 or not all(part.isdecimal() for part in parts):
                raise ConfigError(f"--shapes: expected steps,topk,draft tokens such as 5,4,16; found {text!r}")
            found.append(checked_shape([int(part) for part in parts], "--shapes"))
        return found


FIELDS = {spec.name: {**spec.metadata, "default": spec.default} for spec in dataclasses.fields(Settings)}


def _out_of_order(s: Settings) -> bool:
    low, high = (*s.temperatures, *s.temperatures)[:2] if s.temperatures else (-1.0, -1.0)
    return len(s.temperatures) > 2 or not 0 <= low <= high


def _too_deep(s: Settings) -> int:
    """Returns how many tokens a fresh head drafts at once, if a tree has more steps."""
    trees, steps = s.trees(), s.block_steps or s.training.block
    return steps if steps and not s.init_head and any(tree.depth > steps for tree in trees) else 0


def _only(names: Sequence[str], algorithms: Collection[str], why: str = "") -> _Rule:
    """Refuses options that other algorithms do not have."""
    shown = " and ".join(name for name in TRAINED if name in algorithms)
    message = "{found}: for --algorithm " + shown + ", found {s.algorithm}" + why
    return lambda s: s.algorithm not in algorithms and s.given(*names), message


# What cannot work, in the order in which it is looked for: a test that gives what is found, and the message.
_Rule = tuple[Callable[[Settings], object], str]
_BLOCKS = {name for name in TRAINED if training(name).block}
_RULES: tuple[_Rule, ...] = (
    (_out_of_order, "--temperatures: expected the lowest and the highest, found {s.temperatures}"),
    (lambda s: not s.clip, "--clip: expected a norm above 0, found 0, with which nothing is learnt"),
    (lambda s: s.held_out == 1, "--held-out: expected less than 1, found 1, which leaves nothing to train on"),
    (lambda s: s.traffic is not None and s.given("prompts", "conversations", "regenerate"),
     "{found}: not with --from, whose general text the model writes itself"),
    (lambda s: s.adapter and s.traffic is not None and not s.head_rank,
     "--adapter with --from trains the adapter's own head: expected --head-rank"),
    (lambda s: s.regenerate and not s.conversations, "--regenerate needs --conversations, whose answers it replaces"),
    _only(("aux_layers", "draft_vocab_size"), {name for name in TRAINED if training(name).aux_hidden_states}),
    _only(_OF_BLOCKS, _BLOCKS),
    _only(("ttt_steps", "text_share"), TRAINED.keys() - _BLOCKS),
    _only(_OF_DSPARK, {"DSPARK"}),
    _only(_OF_PAIRS, {"DSPARK", "DFLASH2"}),
    _only(("head_rank",), TRAINED.keys() - _BLOCKS),
    (lambda s: s.head_rank and (s.adapter is None or len(s.init_head) != 1),
     "--head-rank: expected --adapter, whose rows the factors are for, and one --init-head, beside which they are"),
    (lambda s: s.head_rank and not s.trains, "--head-rank: expected some training, found --epochs 0"),
    (lambda s: s.init_factors and not s.head_rank, "--init-factors: expected --head-rank"),
    _only(("ffn_size",), TRAINED.keys() - {"MTP"}, ", a layer of the target's own shape"),
    (lambda s: s.init_head and s.given(*_OF_FRESH),
     "{found}: for fresh heads; one of --init-head is as it was made, so leave this out"),
    (lambda s: s.steps and s.minutes,
     "--steps and --minutes: expected one of them, found {s.steps} and {s.minutes}"),
    (lambda s: not s.trains and not s.init_head, "--epochs 0 trains nothing, which is only for --init-head"),
    (_too_deep, "--shapes: expected trees of at most {found} steps, as many as a block has (--block-steps); found "
     "{s.shown_shapes}"),
)  # fmt: skip


# What a run keeps for good: of a head that is trained, what may change is the saved state's matter.
_FIXED = (
    "seed", "regenerate", "max_length", "max_tokens", "answers", "greedy_share", "temperatures", "default_share",
    "algorithm", "data", "held_out", "init_head", "init_factors", "traffic", "general_share", "adapter", "head_rank",
)  # fmt: skip
TRAFFIC_FILE = "traffic.json"  # of a run from traffic: up to when, and which head was to be served when it began
# Engine options that say which model it is; the others may differ from run to run.
MODEL_OPTIONS = ("model", "revision", "tokenizer_path", "chat_template")
# What is taken with traffic where nothing is asked for: little text, gone over soon and often from a head that is
# good already, chains as long as those that are served, and short general answers: the amount of text is bounded.
_OF_TRAFFIC: dict[str, Any] = {
    "batch_tokens": 2048, "epochs": 4.0, "optimizer": "muon", "warmup": 0.1, "save_every": 20, "eval_every": 100,
    "max_tokens": 160,
}  # fmt: skip
_OF_CHAINS: dict[str, Any] = {"ttt_steps": 4}
# Factors begin with nothing: they take more and smaller steps than a head that is good already.
_OF_FACTORS: dict[str, Any] = {"batch_tokens": 768, "optimizer": "adamw"}


@dataclass(frozen=True)
class Run:
    """Settings and engine options of a run, and its folder."""

    out: Path
    settings: Settings
    options: Mapping[str, Any]
    adapter_digest: str | None = None  # of its files

    @property
    def data(self) -> Path:
        """Returns the folder of answers and features."""
        return Path(self.settings.data) if self.settings.data is not None else self.out

    def engine_options(self, **more: Any) -> dict[str, Any]:
        """Returns options for `Options.from_kwargs`, without a drafter unless one is asked for, whatever comes with the
        model, and with the weights that features are captured with."""
        defaults: dict[str, Any] = {
            "random_seed": self.settings.seed, "speculative_algorithm": NO_DRAFTER.name, "quantization": "none"
        }  # fmt: skip
        if self.settings.adapter is not None:
            # Its own draft head would draft in place of the one that is judged, and may be beside another kind.
            defaults |= {"lora_modules": (self.settings.adapter,), "max_loras": 1, "max_lora_head_rank": 0}
        return {**defaults, **self.options, **more}

    def command(self) -> str:
        """Returns what to type to make the same."""
        words = ["draftwing", "train", "--out", str(self.out)]
        changed = {name: value for name, value in vars(self.settings).items() if value != FIELDS[name]["default"]}
        for name, value in {**self.options, **changed}.items():
            words.append(flag(name))
            if value is not True:
                words += map(str, value) if isinstance(value, tuple) else [str(value)]
        return shlex.join(words)

    def save(self) -> None:
        """Writes the run to its folder."""
        content: dict[str, Any] = {"settings": dataclasses.asdict(self.settings), "options": dict(self.options)}
        if self.adapter_digest is not None:
            content["adapter_digest"] = self.adapter_digest
        write_json(self.out / "train.json", content)


def open_run(out: Path, given: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
    """Returns a new run, or the one in `out` going on: what is not given is as it was.

    given: fields of `Settings`; options: of the engine. With another run's data (`data`), what made that data is taken
    from there. Raises ConfigError for values that cannot work, and for those that would make the run another one.
    """
    given = _tuples(given)
    before = _load(out)
    source = given.get("data", before[0].get("data") if before else None)
    made = _load(Path(source)) if source is not None else None
    if source is not None and made is None:
        raise ConfigError(f"--data: {source} holds no run of `draftwing train`")
    settings, asked = dict[str, Any](), dict[str, Any]()
    for folder, found in ((source, made), (out, before)):
        if folder is None or found is None:
            continue
        if folder == out and given and not _begun(out):
            continue  # a new try
        kept, chosen = found
        if folder != out:  # only what its data is made by
            kept = {name: value for name, value in kept.items() if FIELDS[name]["group"] in (DATA, GENERATE)}
            chosen = {name: value for name, value in chosen.items() if name in MODEL_OPTIONS}
        _check_same(Path(folder), kept, chosen, given, options)
        settings, asked = settings | kept, asked | chosen
    settings, asked = {**settings, **given}, {**asked, **options}
    if settings.get("traffic") is not None:
        own = {} if Settings(**settings).training.block else _OF_CHAINS
        settings = _OF_TRAFFIC | own | (_OF_FACTORS if settings.get("head_rank") else {}) | settings
        if not settings.get("init_head"):
            settings["init_head"] = (_served_head(Settings(**settings), asked),)
    run = Run(out, Settings(**settings), asked)
    run.settings.check()
    run = dataclasses.replace(run, adapter_digest=_adapter_digest(run))
    if run.settings.traffic is not None and run.settings.init_factors is None:
        run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, init_factors=_served_factors(run)))
    Options.from_kwargs(**run.engine_options()).resolve()
    return run


def _adapter_digest(run: Run) -> str | None:
    """Returns that of the adapter's files, None: there is none. Raises ConfigError where they are others than those
    that answers or features of the run were made with."""
    adapter = run.settings.adapter_path
    if adapter is None:
        return None
    from draftwing.models.adapters.stored import stored_digest

    digest = stored_digest(adapter.path)
    for folder in {run.out, run.data}:
        made = folder / "train.json"
        before = load_json(made).get("adapter_digest", digest) if made.exists() and _begun(folder) else digest
        if before != digest:
            raise ConfigError(
                f"{folder} was made with another adapter than {adapter.path} holds now: put back the files that it was "
                "made with, or name another --out, without --data"
            )
    return digest


def _served_head(settings: Settings, options: Mapping[str, Any]) -> str:
    """Returns the head that is served with a folder of traffic: the one that was learnt from it, else that of the
    engine's options or the model's own."""
    assert settings.traffic is not None
    history = HeadHistory(Path(settings.traffic).expanduser() / "heads")
    current = history.current()
    if current is not None:
        return str(history.folder / str(current))
    asked = {"speculative_algorithm": settings.drafter.name, **options}
    chosen = Options.from_kwargs(**asked).resolve()
    found = chosen.speculative_draft_model_path
    if found is None and "mtp" in settings.drafter.heads:
        from draftwing.models.heads.own_layers import layers_to_learn  # late: it imports torch

        found = layers_to_learn(chosen)
    if found is None:
        raise ConfigError("--from: expected a head to start from: name one as --init-head, or with --algorithm MTP a "
                          "model with prediction layers")  # fmt: skip
    return found


def _served_factors(run: Run) -> str | None:
    """Returns the adapter's own head that is served with a folder of traffic: the one that was learnt from it, else
    that of the adapter's files, `NEW`: there is none; None without an adapter."""
    adapter = run.settings.adapter_path
    if adapter is None or run.adapter_digest is None or run.settings.traffic is None:
        return None
    from draftwing.models.adapters.files import folder_of

    history = HeadHistory(Path(run.settings.traffic).expanduser() / "heads")
    current, own = history.current(run.adapter_digest), folder_of(adapter.path)
    return str(history.folder / str(current)) if current is not None else str(own) if own.is_dir() else NEW


def _begun(out: Path) -> bool:
    """Tells whether there is something in the folder that settings have shaped. Of a run from traffic, whose answers
    lie elsewhere, that is which traffic it is."""
    return any(next(out.glob(name), None) for name in (TRAFFIC_FILE, "responses*", "features-*", "fit", "head"))


def _check_same(
    folder: Path,
    kept: Mapping[str, Any],
    chosen: Mapping[str, Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Raises ConfigError where a run in `folder`, made with settings `kept` and options `chosen`, is asked to be
    another one."""
    before = {name: kept[name] for name in _FIXED if name in kept}
    before |= {name: chosen.get(name, getattr(Options, name)) for name in MODEL_OPTIONS}
    asked = {**given, **options}
    for name, value in before.items():
        if asked.get(name, value) != value:
            was, now = (" ".join(map(str, one)) if isinstance(one, tuple) else one for one in (value, asked[name]))
            raise ConfigError(
                f"{folder} was made with {flag(name)} {was}, not {now}: leave it out to go on, or name another --out"
            )


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    path = folder / "train.json"
    if not path.exists():
        return None
    try:
        content = load_json(path)
        # What there was no option for then was as it is by default.
        settings = {name: content["settings"].get(name, field["default"]) for name, field in FIELDS.items()}
        return _tuples(settings), dict(content["options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name another --out") from None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are typed, or read from JSON: where several values are allowed there are lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
