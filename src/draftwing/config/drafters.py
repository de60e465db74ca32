"""The drafters, a `DrafterSpec` for each `--speculative-algorithm`. Nothing else knows their names.

No torch: options are checked, and the command line is printed, before it is imported. So what makes a drafter is named
here as `module:function` and imported when a model is loaded. CONTRIBUTING.md says how to add a drafter.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftwing.config.aliases import ALIASES, HubModel
from draftwing.config.trees import (
    BLOCK,
    BRANCHED_BLOCK,
    LOOKUP,
    MODEL,
    SECOND_MODEL,
    SOURCES,
    TreeShape,
    checked_shape,
    max_nodes,
)
from draftwing.errors import ConfigError
from draftwing.plugins import check_class, import_attribute

HEADS = Path(__file__).parents[1] / "heads"  # HEADS/model/kind of head
MODELS = ("smollm2",)  # aliases: a checkpoint of another quantization is another target
TOKEN_MAPS = ("token_map.json", "token_map.txt", "token_map.pt")

CHAIN, LLAMA_TREE = TreeShape(3, 1, 4), TreeShape(5, 4, 16)
MATCHES, SUFFIXES = TreeShape(11, 10, 12), TreeShape(15, 4, 16)
DRAFT_MODEL, TOKEN_MAP = "speculative_draft_model_path", "speculative_token_map"
LM_HEAD = "speculative_lm_head_quantization"
WINDOW = "speculative_draft_window_size"
MEMORY_FILE = "speculative_memory"
OWN_LAYERS = "mtp"  # of `DrafterSpec.heads`: prediction layers, which may come with a model
_OPTION = "speculative_algorithm"
TOGETHER = "EAGLE3+NGRAM"  # an example of drafters that draft one tree
SECOND = "speculative_second_draft_model_path"


class Training(NamedTuple):
    """How `draftwing train` makes a head.

    name: what --algorithm calls it.  title: of the head's card.  loss: what differs from the defaults of
    `train.ttt.Loss`, or of `train.losses.BlockLoss`.
    aux_hidden_states: whether it reads hidden states of several layers of the target, and may draft from a vocabulary
    of its own; else it reads what comes after the target's final norm, and drafts from all tokens.
    block: how many tokens it writes in one forward, unless another number is asked for; 0: it writes one after the
    other.
    """

    name: str
    title: str
    loss: Mapping[str, Any]
    aux_hidden_states: bool = False
    block: int = 0


@dataclass(frozen=True)
class DrafterSpec:
    """What is to be known of a drafter before it is made.

    name: what options, logs and /server_info call it; case does not matter, nor which of the aliases is used.
    build: makes it of a `spec.drafter.DraftContext`; None where nobody drafts.
    draft_model: whether it drafts with the model of `speculative_draft_model_path`.
    same_tokenizer: whether that is a language model, which must have the target's token ids.
    options: further options that it reads; others of speculation are said to have no effect.
    tree: its trees if nothing is asked for.  llama_tree: the same for a target that is a `LlamaForCausalLM`.
    matched: whether its trees come from matches, and so have any number of nodes; else they grow level by level.
    heads: kinds of heads that it loads (`models.heads.loader`), its own first; their configs may ask for a tree.
    training: how its own kind of head is trained.
    parts: of drafters that draft one tree, such as EAGLE3+NEXTN+SUFFIX: one or two with a model, perhaps a lookup; what
    is said above is the first's.
    """

    name: str
    build: str | Callable[[Any], Any] | None = None
    aliases: tuple[str, ...] = ()
    draft_model: Literal["", "optional", "required"] = ""
    same_tokenizer: bool = False
    options: tuple[str, ...] = ()
    tree: TreeShape = CHAIN
    llama_tree: TreeShape | None = None
    matched: bool = False
    heads: tuple[str, ...] = ()
    training: Training | None = None
    parts: tuple[DrafterSpec, ...] = ()

    @property
    def own(self) -> bool:
        """Returns whether it is a user's class."""
        return callable(self.build)

    @property
    def credited(self) -> tuple[tuple[str, ...], ...]:
        """Returns whom a draft counts for, by its source (`config.trees.SOURCES`)."""
        if self.own:
            return ((self.name,),) * len(SOURCES)
        models = [part.name for part in self.parts if part.draft_model] or [self.name]
        lookup = models[0] if self.lookup is None else self.lookup.name
        names = {MODEL: models[0], SECOND_MODEL: models[-1], LOOKUP: lookup} if self.build is not None else {}
        credited = [[name for bit, name in names.items() if source & bit] for source in range(1, len(SOURCES))]
        return ("prediction",), *(tuple(dict.fromkeys(some)) for some in credited)

    @property
    def lookup(self) -> DrafterSpec | None:
        """Returns the lookup among its parts."""
        return next((part for part in self.parts if part.matched), None)

    def make(self, context: Any) -> Any:
        """Returns the `Drafter` for a `DraftContext`. Not for what has no `build`."""
        assert self.build is not None, f"nobody drafts with {self.name}"
        if not isinstance(self.build, str):
            return self.build(context)
        module, _, function = self.build.partition(":")
        return getattr(importlib.import_module(module), function)(context)


def _block_drafter(name: str, tree: TreeShape, title: str, loss: str) -> DrafterSpec:
    """Returns that of heads that write a block, which load each other's kinds, too."""
    kinds = ("dflash", "dspark", "dflash2")
    return DrafterSpec(
        name,
        "draftwing.spec.build:draft_head",
        draft_model="required",
        options=(LM_HEAD, WINDOW),
        tree=tree,
        heads=(name.lower(), *(kind for kind in kinds if kind != name.lower())),
        training=Training(name, title, {"kind": loss}, aux_hidden_states=True, block=7),
    )


DRAFTERS = (
    DrafterSpec("none"),
    DrafterSpec(
        "NGRAM",
        "draftwing.spec.build:ngram",
        options=(
            "speculative_ngram_min_match_window_size",
            "speculative_ngram_max_match_window_size",
            "speculative_ngram_min_bfs_breadth",
            "speculative_ngram_max_bfs_breadth",
            "speculative_ngram_branch_length",
            "speculative_ngram_capacity",
            MEMORY_FILE,
        ),
        tree=MATCHES,
        matched=True,
    ),
    DrafterSpec(
        "SUFFIX",
        "draftwing.spec.build:suffix",
        options=(
            "speculative_suffix_max_depth",
            "speculative_suffix_min_prob",
            "speculative_suffix_capacity",
            MEMORY_FILE,
        ),
        tree=SUFFIXES,
        matched=True,
    ),
    DrafterSpec("STANDALONE", "draftwing.spec.build:language_model", draft_model="required", same_tokenizer=True),
    DrafterSpec(
        "EAGLE",
        "draftwing.spec.build:draft_head",
        draft_model="optional",  # the prediction layers of a target draft, too
        options=(TOKEN_MAP, LM_HEAD, WINDOW),
        llama_tree=LLAMA_TREE,
        heads=("eagle", "mtp"),
        training=Training("EAGLE", "EAGLE-2 head", {"steps": 1, "tokens": 0.1, "features": 1.0, "noise": 0.2}),
    ),
    DrafterSpec(
        "EAGLE3",
        "draftwing.spec.build:draft_head",
        draft_model="required",
        options=("speculative_aux_layer_ids", LM_HEAD, WINDOW),
        llama_tree=LLAMA_TREE,
        heads=("eagle3",),
        training=Training("EAGLE3", "EAGLE-3 head", {}, aux_hidden_states=True),
    ),
    _block_drafter("DFLASH", BLOCK, "DFlash head", "kl"),
    _block_drafter("DSPARK", BRANCHED_BLOCK, "DSpark head", "tv"),
    _block_drafter("DFLASH2", BRANCHED_BLOCK, "DFlash2 head", "kl"),
    DrafterSpec(
        "NEXTN",
        "draftwing.spec.build:draft_head",
        aliases=("MTP",),
        draft_model="optional",
        options=(TOKEN_MAP, LM_HEAD, WINDOW),
        llama_tree=LLAMA_TREE,
        heads=("mtp", "eagle"),
        training=Training("MTP", "Multi-token prediction layer", {}),
    ),
    DrafterSpec(
        "FROZEN_KV_MTP",
        "draftwing.spec.build:assistant",
        aliases=("ASSISTANT",),
        draft_model="required",
        options=(LM_HEAD,),
    ),
)
NAMES = tuple(spec.name for spec in DRAFTERS)
NO_DRAFTER = DRAFTERS[0]
DEFAULT = next(spec for spec in DRAFTERS if spec.name == "EAGLE3")  # for a model whose head is included
TRAINED = {spec.training.name: spec for spec in DRAFTERS if spec.training is not None}  # by train's --algorithm


def find_drafter(asked: str | type[Any]) -> DrafterSpec:
    """Returns the drafter of this name, several of them (`EAGLE3+NGRAM`), or the user's own: `module:Class`, or the
    class itself.

    Raises ConfigError for a name that nobody has, for drafters that draft no tree together, for a class that cannot be
    imported, and for one that is no drafter.
    """
    if isinstance(asked, type):
        return _own(asked, f"{asked.__module__}:{asked.__qualname__}")
    if "+" in asked:
        return _together(asked)
    if ":" in asked:
        return _own(import_attribute(asked, _OPTION), asked)
    found = _named(asked)
    if found is None:
        raise ConfigError(
            f"{_OPTION} must be one of {', '.join(NAMES)}, several as in {TOGETHER}, or module:Class of a drafter of "
            f"your own; found {asked!r}"
        )
    return found


def _named(asked: str) -> DrafterSpec | None:
    return next((spec for spec in DRAFTERS if asked.lower() in (n.lower() for n in (spec.name, *spec.aliases))), None)


def _together(asked: str) -> DrafterSpec:
    """Returns drafters that draft one tree: with a model, with a second one, and a lookup, in any order."""
    parts = [_named(name.strip()) for name in asked.split("+")]
    models = [spec for spec in parts if spec is not None and spec.draft_model]
    lookups = [spec for spec in parts if spec is not None and spec.matched]
    two = len(models) == 2 and models[0] is not models[1] and all(spec.heads for spec in models)
    if len(models) + len(lookups) < len(parts) or len(lookups) > 1 or not (two or len(models) == len(lookups) == 1):
        able = [[spec.name for spec in DRAFTERS if getattr(spec, key)] for key in ("draft_model", "heads", "matched")]
        of_model, of_head, of_lookup = (", ".join(names) for names in able)
        raise ConfigError(
            f"{_OPTION}: expected a drafter with a model ({of_model}) and a lookup ({of_lookup}), as in {TOGETHER}, or "
            f"two different ones with a head ({of_head}), with or without a lookup; found {asked!r}"
        )
    parts_in_order = (*models, *lookups)
    return replace(
        models[0],
        name="+".join(spec.name for spec in parts_in_order),
        build="draftwing.spec.build:together",
        aliases=(),
        options=(*dict.fromkeys(name for spec in parts_in_order for name in spec.options), *([SECOND] if two else [])),
        training=None,
        parts=parts_in_order,
    )


def training(algorithm: str) -> Training:
    """Returns how the heads that `draftwing train --algorithm` names are trained. Raises ConfigError for other
    names."""
    found = TRAINED[algorithm].training if algorithm in TRAINED else None
    if found is None:
        raise ConfigError(f"algorithm must be one of {', '.join(TRAINED)}; found {algorithm!r}")
    return found


def head_drafter(kind: str) -> DrafterSpec:
    """Returns the drafter whose own heads are of this kind."""
    return next(spec for spec in DRAFTERS if spec.heads[:1] == (kind,))


def _own(cls: Any, name: str) -> DrafterSpec:
    """Returns what a user's class says of itself; see `draftwing.Drafter`, which this cannot import."""
    check_class(cls, "Drafter", ("build", "num_draft_tokens"), f"{_OPTION} {name}")
    signature = inspect.signature(cls.propose)
    try:
        signature.bind("self", "step")
    except TypeError:
        raise ConfigError(f"{_OPTION} {name}: expected propose(self, step), found propose{signature}") from None
    steps, topk, nodes = cls.num_steps, cls.topk, cls.num_draft_tokens
    if nodes is None and isinstance(steps, int) and isinstance(topk, int):
        nodes = max_nodes(steps, topk)
    return DrafterSpec(
        name,
        cls.build,
        draft_model="optional" if DRAFT_MODEL in cls.reads_options else "",
        options=tuple(cls.reads_options),
        tree=checked_shape([steps, topk, nodes], f"{_OPTION} {name}: num_steps, topk and num_draft_tokens"),
    )


# ---- heads that come with the package --------------------------------------------------------------------------------


def shipped_head(model: str, drafter: DrafterSpec) -> Path | None:
    """Returns the folder of the head for `--model model` that is part of this package, if any."""
    if model not in MODELS or not drafter.heads:
        return None
    folder = HEADS / model / drafter.heads[0]
    return folder if (folder / "config.json").is_file() else None


def published_head(model: str, drafter: DrafterSpec) -> HubModel | None:
    """Returns where the hub has a head for `--model model`, an alias, that this drafter loads."""
    if model not in ALIASES or not drafter.heads:
        return None
    return ALIASES[model].heads.get(drafter.heads[0])


def token_map_in(folder: Path) -> Path | None:
    """Returns the file of the tokens that the head in a folder may draft, if it lies there."""
    maps = (folder / name for name in TOKEN_MAPS)
    return next((file for file in maps if file.is_file()), None)
