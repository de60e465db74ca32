"""How `Options` resolve: what excludes each other, and what follows from other options, the device and the models.

`Options.resolve` and `Options.for_engine` call what is here. No torch: see `config.options`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.aliases import ALIASES
from draftwing.config.choices import HARMONY_PARSERS
from draftwing.config.devices import Defaults, check_device
from draftwing.config.drafters import (
    DEFAULT,
    DRAFT_MODEL,
    DRAFTERS,
    NO_DRAFTER,
    TOKEN_MAP,
    DrafterSpec,
    find_drafter,
    head_drafter,
    published_head,
    shipped_head,
    token_map_in,
)
from draftwing.config.fields import flag
from draftwing.config.trees import TREE, Given, grown_shape, matched_shape
from draftwing.errors import ConfigError
from draftwing.tree_shape import TreeShape

if TYPE_CHECKING:
    from draftwing.config.options import Options

logger = logging.getLogger(__name__)
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)

OPPOSITES = (("enable_overlap", "disable_overlap_schedule"), ("enable_mixed_chunk", "disable_mixed_chunk"))
IDLE_WITHOUT_CUDA = ("cuda_graph_max_bs", "enable_torch_compile", "torch_compile_max_bs")


def resolved(options: Options) -> Options:
    """Does as `Options.resolve`, of options whose values are each in range."""
    check_device(options.device)
    for one, other in OPPOSITES:
        if getattr(options, one) and getattr(options, other):
            raise ConfigError(f"{one} and {other} exclude each other; give one of them")
    if options.root_path is not None and not _ROOT_PATH.fullmatch(options.root_path):
        raise ConfigError(f"root_path must be a path such as /llm; found {options.root_path!r}")
    if options.processors and options.tp_size > 1:
        raise ConfigError(f"cpu_affinity and tp_size {options.tp_size} exclude each other; leave one of them out")
    if options.learn_while_idle and options.learn is None:
        raise ConfigError("learn_while_idle needs learn, the folder of what is learnt from")
    if options.chunked_prefill_size == 0:
        raise ConfigError("chunked_prefill_size must be at least 1, or -1 for no limit; found 0")
    parsers = {"reasoning_parser": options.reasoning_parser, "tool_call_parser": options.tool_call_parser}
    if len({name in HARMONY_PARSERS for name in parsers.values() if name is not None}) > 1:
        found = ", ".join(f"{key} = {name!r}" for key, name in parsers.items())
        raise ConfigError(f"gpt-oss writes reasoning and calls in one format; found {found}: give both or one of them")
    fraction = options.mem_fraction_static
    if options.max_total_tokens is not None and fraction is not None:
        logger.warning("--max-total-tokens sets the size of the KV cache; --mem-fraction-static has no effect")
        fraction = None
    seed = secrets.randbits(31) if options.random_seed is None else options.random_seed
    options = dataclasses.replace(options, mem_fraction_static=fraction, random_seed=seed)
    return _speculation(options)


# ---- the device and the models ---------------------------------------------------------------------------------------


def for_engine(options: Options, defaults: Defaults, architecture: str, carried: TreeShape | None) -> Options:
    """Does as `Options.for_engine`."""
    rows = options.max_running_requests or defaults.max_running_requests
    if defaults.graph_size:
        sizes: dict[str, Any] = {"cuda_graph_max_bs": min(options.cuda_graph_max_bs or defaults.graph_size, rows)}
    else:
        sizes = _without_effect(options, IDLE_WITHOUT_CUDA, "without CUDA")
    sizes["max_running_requests"] = rows
    sizes["chunked_prefill_size"] = options.chunked_prefill_size or defaults.chunked_prefill_size
    overlap = (options.enable_overlap or defaults.overlap) and not options.disable_overlap_schedule
    mixed = options.enable_mixed_chunk or (defaults.mixed and not options.disable_cuda_graph)
    mixed = mixed and not options.disable_mixed_chunk
    options = dataclasses.replace(options, enable_overlap=overlap, enable_mixed_chunk=mixed, **sizes)
    return _with_tree(options, options.drafter_spec, architecture, carried)


def _without_effect(options: Options, names: Collection[str], where: str) -> dict[str, Any]:
    """Defaults in place of options of these names that have others, which one line says."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(options) if spec.name in names}
    idle = {name: default for name, default in defaults.items() if getattr(options, name) != default}
    if idle:
        logger.warning("%s, %s has no effect", where, ", ".join(map(flag, idle)))
    return idle


# ---- who drafts ------------------------------------------------------------------------------------------------------


def _speculation(options: Options) -> Options:
    """Adds to an algorithm the head that comes with the model where that drafts, and what follows from them."""
    given, draft, tokens = options.speculative_algorithm, options.speculative_draft_model_path, None
    drafter = _default(options) if given is None else find_drafter(given)
    if drafter is None:
        return options
    if draft is None:
        head = shipped_head(options.model, drafter)
        draft = None if head is None else str(head)
        published = published_head(options.model, drafter)
        if published is not None:
            draft, commit = published
            revision = options.speculative_draft_model_revision or commit
            options = dataclasses.replace(options, speculative_draft_model_revision=revision)
    _check_draft_model(drafter, draft)
    if draft is not None and TOKEN_MAP in drafter.options:
        tokens = token_map_in(Path(draft).expanduser())
    if options.speculative_token_map is None and tokens is not None:
        options = dataclasses.replace(options, speculative_token_map=str(tokens))
    options = dataclasses.replace(
        options,
        speculative_algorithm=given if isinstance(given, type) else drafter.name,
        speculative_draft_model_path=draft,
        **_without_effect(options, _unread(options, drafter, draft), f"with --speculative-algorithm {drafter.name}"),
    )
    if not drafter.heads:
        return _with_tree(options, drafter)
    if options.speculative_num_steps and options.speculative_eagle_topk:  # else it depends on head and target
        grown_shape(_given(options), drafter.tree)
    _check_simulation(options, drafter)
    return options


def _default(options: Options) -> DrafterSpec | None:
    """Returns who drafts if nothing is asked for; None where the model's files say that (`models.heads.own_layers`).
    Nobody for random weights: what a head has learnt of the true ones says nothing of them."""
    if options.dummy or options.speculative_draft_model_path is not None:
        return NO_DRAFTER
    if shipped_head(options.model, DEFAULT) is not None:
        return DEFAULT
    if options.model not in ALIASES:
        return None
    return next(map(head_drafter, ALIASES[options.model].heads), NO_DRAFTER)


def _check_draft_model(drafter: DrafterSpec, draft: str | None) -> None:
    if draft is not None and not drafter.draft_model:
        able = ", ".join(spec.name for spec in DRAFTERS if spec.draft_model)
        raise ConfigError(
            f"speculative_draft_model_path needs a speculative_algorithm that drafts with a model ({able}); found "
            f"{drafter.name!r}"
        )
    if draft is None and drafter.draft_model == "required":
        raise ConfigError(
            f"speculative_algorithm {drafter.name} needs speculative_draft_model_path, the model that drafts"
        )


def _unread(options: Options, drafter: DrafterSpec, draft: str | None) -> set[str]:
    """Returns the options of speculation that this drafter does not read."""
    used = {"speculative_algorithm", DRAFT_MODEL, *drafter.options}
    if drafter.build is not None:
        used |= {*TREE, "speculative_fixed_shape", "speculative_explain"}
    if draft is not None:
        used.add("speculative_draft_model_revision")
    return {spec.name for spec in dataclasses.fields(options) if spec.name.startswith("speculative_")} - used


# ---- the tree --------------------------------------------------------------------------------------------------------


def _with_tree(
    options: Options, drafter: DrafterSpec, architecture: str = "", carried: TreeShape | None = None
) -> Options:
    """Returns options with the numbers of a tree, and whether every step has it."""
    if drafter.build is not None:
        given, llama = _given(options), drafter.llama_tree if architecture == "LlamaForCausalLM" else None
        if drafter.parts:
            _breadth(options)  # its check
        if drafter.matched:
            default = drafter.tree
            if "speculative_ngram_max_bfs_breadth" in drafter.options:
                default = default._replace(topk=_breadth(options))
            shape = matched_shape(given, default)
        else:
            shape = grown_shape(given, carried or llama or drafter.tree)
        found: dict[str, Any] = dict(zip(TREE, shape, strict=False))
        options = dataclasses.replace(options, **found)
    _check_simulation(options, drafter)
    return options


def _given(options: Options) -> Given:
    return options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens


def _breadth(options: Options) -> int:
    for part in ("match_window_size", "bfs_breadth"):
        low = getattr(options, f"speculative_ngram_min_{part}")
        high = getattr(options, f"speculative_ngram_max_{part}")
        if low > high:
            raise ConfigError(
                f"speculative_ngram_min_{part} must be at most speculative_ngram_max_{part}; found {low} and {high}"
            )
    return options.speculative_ngram_max_bfs_breadth


def _check_simulation(options: Options, drafter: DrafterSpec) -> None:
    length, steps = options.simulate_accept_length, options.speculative_num_steps
    if length is None:
        return
    if drafter.build is None:
        raise ConfigError("simulate_accept_length needs a speculative_algorithm, whose drafts it accepts")
    if steps is not None and length > steps + 1:
        raise ConfigError(
            f"simulate_accept_length must be at most speculative_num_steps + 1, which is {steps + 1}; found {length:g}"
        )
