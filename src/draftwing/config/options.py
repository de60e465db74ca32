"""`Options`: what a user has chosen, what excludes each other, and what follows for the device and the models.

No torch: see `config.option_fields`, which has the fields.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwing.config.adapters import AdapterPath, adapter_paths
from draftwing.config.aliases import ALIASES
from draftwing.config.devices import Defaults, check_device
from draftwing.config.drafters import (
    DEFAULT,
    DRAFT_MODEL,
    DRAFTERS,
    NO_DRAFTER,
    SECOND,
    TOKEN_MAP,
    DrafterSpec,
    find_drafter,
    head_drafter,
    published_head,
    shipped_head,
    token_map_in,
)
from draftwing.config.fields import check_field, check_fields, flag, from_python, kinds, names_of
from draftwing.config.foreign_names import instead, take
from draftwing.config.option_fields import DTYPE_SPELLINGS, HARMONY_PARSERS, OF_CHECKPOINTS, OptionFields
from draftwing.config.trees import PLAIN, TREE, Given, TreeShape, grown_shape, matched_shape
from draftwing.errors import ConfigError
from draftwing.machine import numbered
from draftwing.plain import plain

logger = logging.getLogger(__name__)
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)

OPPOSITES = (
    ("enable_overlap", "disable_overlap_schedule"),
    ("enable_mixed_chunk", "disable_mixed_chunk"),
    ("enable_deterministic_inference", "fast_numerics"),
    ("enable_tp_invariance", "fast_numerics"),
    ("enable_tp_invariance", "enable_torch_compile"),
    ("enable_tp_invariance", "enable_expert_parallel"),
)
IDLE_FOR_ENCODERS = ("prefix_cache_dir", "hicache_size", "enable_torch_compile", "torch_compile_max_bs")
IDLE_WITHOUT_CUDA = ("cuda_graph_max_bs", "enable_torch_compile", "torch_compile_max_bs", "fast_numerics")


@dataclass(frozen=True)
class Options(OptionFields):
    """What a user can choose. `resolve()` checks it and fills what follows from other options; resolving twice is the
    same as once."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Options:
        """Returns options given by name or alias; `-` is read as `_`. Raises ConfigError for unknown or repeated ones.

        SGLang's options that have no counterpart are logged, or refused if they ask for what is not built.
        """
        names, found = names_of(cls), kinds(cls)
        values: dict[str, Any] = {}
        for key, value in take({key.replace("-", "_"): value for key, value in kwargs.items()}).items():
            name = names.get(key)
            if name is None:
                said = instead(key, names)
                raise ConfigError(f"unknown option {key!r}" + (f"; {said}" if said else ""))
            if name in values:
                raise ConfigError(f"option {name!r} is given twice (once as {key!r})")
            value = plain(value)
            values[name] = from_python(found[name], DTYPE_SPELLINGS.get(value, value) if name == "dtype" else value)
            if key != name:  # `resolve` would say the field's own name
                check_field(cls.__dataclass_fields__[name], found[name], values[name], key)
        if values.get("quantization") in OF_CHECKPOINTS:
            logger.warning(
                "--quantization %s has no effect: a checkpoint says how it is quantised", values.pop("quantization")
            )
        return cls(**values)

    def resolve(self) -> Options:
        """Checks the options and fills in every default that follows from other options. Raises ConfigError.

        Afterwards `speculative_algorithm` is set, "none" where there is no speculation, and None where that is left to
        the files of the model (`models.heads.own_layers`). The tree of a head is left to `for_engine`.
        """
        check_fields(self)
        check_device(self.device)
        for one, other in OPPOSITES:
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(f"{one} and {other} exclude each other; give one of them")
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path must be a path such as /llm; found {self.root_path!r}")
        if self.processors and self.tp_size > 1:
            raise ConfigError(f"cpu_affinity and tp_size {self.tp_size} exclude each other; leave one of them out")
        if self.learn_while_idle and self.learn is None:
            raise ConfigError("learn_while_idle needs learn, the folder of what is learnt from")
        for name, given in (("prefix_cache_dir", self.prefix_cache_dir), ("hicache_size", self.hicache_size)):
            if given and self.disable_radix_cache:
                raise ConfigError(f"{name} and disable_radix_cache exclude each other; give one of them")
        if self.prefix_cache_dir and self.tp_size > 1:
            raise ConfigError(f"prefix_cache_dir needs tp_size 1; found {self.tp_size}: leave one of them out")
        if self.chunked_prefill_size == 0:
            raise ConfigError("chunked_prefill_size must be at least 1, or -1 for no limit; found 0")
        parsers = {"reasoning_parser": self.reasoning_parser, "tool_call_parser": self.tool_call_parser}
        if len({name in HARMONY_PARSERS for name in parsers.values() if name is not None}) > 1:
            found = ", ".join(f"{key} = {name!r}" for key, name in parsers.items())
            raise ConfigError(
                f"gpt-oss writes reasoning and calls in one format; found {found}: give both or one of them"
            )
        fraction = self.mem_fraction_static
        if self.max_total_tokens is not None and fraction is not None:
            logger.warning("--max-total-tokens sets the size of the KV cache; --mem-fraction-static has no effect")
            fraction = None
        adapter_paths(self.lora_modules, self.model_names)
        seed = secrets.randbits(31) if self.random_seed is None else self.random_seed
        options = dataclasses.replace(self, mem_fraction_static=fraction, random_seed=seed)
        return _speculation(options)

    def for_engine(self, defaults: Defaults, architecture: str = "", carried: TreeShape | None = None) -> Options:
        """Returns resolved options with all that depends on the device and the models: sizes, overlap, a head's tree.

        defaults: of the device.  carried: the tree that the head's config asks for; without one it is the default for
        targets of this architecture. A second call changes nothing. Raises ConfigError.
        """
        rows = self.max_running_requests or defaults.max_running_requests
        if defaults.graph_size:
            sizes: dict[str, Any] = {"cuda_graph_max_bs": min(self.cuda_graph_max_bs or defaults.graph_size, rows)}
        else:
            sizes = _without_effect(self, IDLE_WITHOUT_CUDA, "without CUDA")
        sizes["max_running_requests"] = rows
        sizes["chunked_prefill_size"] = self.chunked_prefill_size or defaults.chunked_prefill_size
        overlap = (self.enable_overlap or defaults.overlap) and not self.disable_overlap_schedule
        mixed = self.enable_mixed_chunk or (defaults.mixed and not self.disable_cuda_graph)
        mixed = mixed and not self.disable_mixed_chunk
        options = dataclasses.replace(self, enable_overlap=overlap, enable_mixed_chunk=mixed, **sizes)
        return _with_tree(options, options.drafter_spec, architecture, carried)

    def for_encoder(self, tokens: int) -> Options:
        """Returns options `for_engine` of a model that reads texts whole and writes none: without drafts, cached
        prefixes and graphs of steps. tokens: of a request at most. Raises ConfigError."""
        if self.drafts:
            raise ConfigError(
                f"speculative_algorithm {self.drafter}: this model makes vectors or scores of texts and writes none: "
                "leave it out"
            )
        assert self.max_running_requests, "for_engine gives it a value"
        fixed: dict[str, Any] = _without_effect(self, IDLE_FOR_ENCODERS, "with a model that writes no text")
        fixed |= {"disable_radix_cache": True, "disable_cuda_graph": True, "enable_mixed_chunk": False}
        fixed["max_total_tokens"] = self.max_total_tokens or self.max_running_requests * (tokens + 2)
        return dataclasses.replace(self, **fixed)

    @property
    def deterministic(self) -> bool:
        """Returns whether a token is to have the same bits in any batch and however it is asked for."""
        return not (self.fast_numerics or self.enable_torch_compile)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Returns the names of the model in the API, the main one first."""
        return self.served_model_name or (self.model,)

    @property
    def adapters(self) -> tuple[AdapterPath, ...]:
        """Returns those that are there from the start."""
        return adapter_paths(self.lora_modules, self.model_names)

    @property
    def serves_adapters(self) -> bool:
        return bool(self.lora_modules) or self.lora_dir is not None

    @property
    def has_key(self) -> bool:
        """Returns whether every client of a server needs a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def host_names(self) -> tuple[str, ...]:
        """Returns `allowed_hosts`, one by one."""
        return tuple(name.strip() for name in (self.allowed_hosts or "").split(",") if name.strip())

    @property
    def logit_processors(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.logit_processor or "").split(",") if name.strip())

    @property
    def processors(self) -> tuple[int, ...]:
        """Returns processors that threads are pinned to; empty without `cpu_affinity`. Raises ConfigError."""
        try:
            return numbered(self.cpu_affinity) if self.cpu_affinity else ()
        except ValueError as error:
            raise ConfigError(f"cpu_affinity: {error}") from None

    @property
    def dummy(self) -> bool:
        return self.load_format == "dummy"

    @property
    def label(self) -> dict[str, Any]:
        """Says in words what is not real in this run; every output carries it. Empty where everything is real."""
        parts = ["random weights"] if self.dummy else []
        if self.simulate_accept_length is not None:
            parts.append(f"acceptance length {self.simulate_accept_length:g}")
        return {"simulated": parts} if parts else {}

    @property
    def drafter_spec(self) -> DrafterSpec:
        """Returns the drafter's spec; for resolved options. Nobody's where that is left to the files of the model.
        Imports a drafter of the user's own."""
        return NO_DRAFTER if self.speculative_algorithm is None else find_drafter(self.speculative_algorithm)

    @property
    def drafter(self) -> str:
        """Returns the drafter's name; for resolved options."""
        asked = self.speculative_algorithm
        return asked if isinstance(asked, str) else self.drafter_spec.name

    @property
    def drafts(self) -> bool:
        """Returns whether there is speculation; for resolved options."""
        return self.drafter != NO_DRAFTER.name

    @property
    def speculative_shape(self) -> TreeShape:
        """Returns the largest draft tree; for resolved options, with a head only after `for_engine`."""
        steps, topk, nodes = (getattr(self, name) for name in TREE)
        if steps is None and not self.drafts:
            return PLAIN
        assert steps is not None and topk is not None and nodes is not None, "options are not resolved"
        return TreeShape(steps, topk, nodes)


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
    second = options.speculative_second_draft_model_path
    if second is None and SECOND in drafter.options:
        found = shipped_head(options.model, drafter.parts[1])
        options = dataclasses.replace(
            options, speculative_second_draft_model_path=None if found is None else str(found)
        )
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
