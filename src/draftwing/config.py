"""Every option of the engine and its server, once: the command line and `LLM(...)` are both built from the fields.

No torch here: options are checked before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import logging
import math
import secrets
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwing import compat
from draftwing.core import MAX_HINT, PLAIN, TreeShape
from draftwing.errors import ConfigError
from draftwing.server.parsers.names import REASONING_PARSERS, TOOL_CALL_PARSERS
from draftwing.shipped import DEFAULT_ALGORITHM, ShippedHead, most_nodes, shipped_head, token_map_in

logger = logging.getLogger(__name__)

MODEL, SERVER, MEMORY, SPECULATION = "model", "server", "memory and scheduling", "speculation"
REQUESTS, CUDA = "requests", "CUDA"
ALGORITHMS = ("none", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
# Trees when only an algorithm is given and the head asks for none: chains, but for EAGLE heads of Llama models.
CHAIN_SHAPE, LLAMA_SHAPE = TreeShape(3, 1, 4), TreeShape(5, 4, 8)
AUX_LAYER_IDS = ("auto", "output", "boundary")
# (bytes of memory at least, most requests, prompt tokens of a step, largest batch with graphs) of a CUDA device
CUDA_SIZES = ((60e9, 256, 8192, 128), (20e9, 128, 4096, 64), (0, 64, 2048, 32))
CPU_SIZES = (64, 512)


def _option(
    default: Any,
    group: str,
    help: str,
    *,
    aliases: Sequence[str] = (),
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field with what the command line and the checks need. `minimum` and `maximum` are inclusive."""
    meta = {"group": group, "help": help, "aliases": aliases, "choices": choices, "min": minimum, "max": maximum}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Options:
    """What a user can choose. `resolve()` checks it and fills what follows from other options; resolving twice is the
    same as once."""

    model: str = _option(
        "smollm2",
        MODEL,
        "an alias (smollm2), a folder in Hugging Face's format, a hub id, or a .gguf file",
        aliases=("model_path",),
    )
    tokenizer_path: str | None = _option(None, MODEL, "folder or file of the tokenizer (default: the model's own)")
    revision: str | None = _option(None, MODEL, "branch, tag or commit, when the model is a hub id")
    chat_template: str | None = _option(
        None, MODEL, "Jinja chat template in place of the model's own: a file, or the text itself"
    )
    trust_remote_code: bool = _option(False, MODEL, "accepted; code that comes with a checkpoint is never executed")
    dtype: str = _option(
        "auto",
        MODEL,
        "of weights and KV; auto on a CPU: bfloat16 where it is native, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = _option(
        "auto",
        MODEL,
        "dummy: random weights from config.json alone, to time steps; every output says so",
        choices=("auto", "dummy"),
    )
    device: str = _option("auto", MODEL, "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    context_length: int | None = _option(None, MODEL, "tokens of prompt and answer (default: the model's)", minimum=2)
    random_seed: int | None = _option(
        None, MODEL, "where the seeds of unseeded requests come from (default: random)", minimum=0, maximum=2**63 - 1
    )

    served_model_name: str | None = _option(None, SERVER, "name in /v1/models (default: the model as given)")
    host: str = _option("127.0.0.1", SERVER, "address to listen on; 0.0.0.0 for every interface")
    port: int = _option(30000, SERVER, "port to listen on; 0 picks a free one", minimum=0, maximum=65535)
    log_level: str = _option("info", SERVER, "least severe messages to log", choices=LOG_LEVELS)
    api_key: str | None = _option(
        None, SERVER, "clients have to send it as a bearer token, but for /health (default: no key)"
    )
    request_timeout: float | None = _option(
        None, SERVER, "seconds after which a request is aborted (default: never)", minimum=0.001
    )
    drain_timeout: float = _option(
        30.0,
        SERVER,
        "seconds that running requests have after SIGTERM before they are aborted",
        minimum=0,
        maximum=86400,
    )

    enable_metrics: bool = _option(False, SERVER, "accepted; /metrics is always there")
    log_requests: bool = _option(False, SERVER, "log a line of JSON for every request")
    log_requests_level: int = _option(
        0,
        SERVER,
        "0: sizes and times; 1: parameters too; 2: the beginning of texts; 3: texts",
        minimum=0,
        maximum=3,
    )
    otlp_traces_endpoint: str | None = _option(
        None, SERVER, "send an OpenTelemetry span per request there (install draftwing[otel])"
    )

    sampling_defaults: str = _option(
        "openai",
        REQUESTS,
        "where sampling fields that a request does not give come from: the model's generation_config.json, or openai",
        choices=("model", "openai"),
    )
    reasoning_parser: str | None = _option(
        None, REQUESTS, "how the model marks its reasoning, which is then answered apart", choices=REASONING_PARSERS
    )
    tool_call_parser: str | None = _option(
        None, REQUESTS, "how the model writes its tool calls", choices=TOOL_CALL_PARSERS
    )
    logit_processor: str | None = _option(
        None, REQUESTS, "module:attribute of a logit processor that requests may name; several with commas"
    )
    constrained_json_whitespace_pattern: str | None = _option(
        None, REQUESTS, "regular expression of the white space in JSON that a schema asks for (default: any)"
    )
    constrained_json_disable_any_whitespace: bool = _option(
        False, REQUESTS, "JSON that a schema asks for is written without white space"
    )

    mem_fraction_static: float | None = _option(
        None,
        MEMORY,
        "share of the device's memory for weights and KV pool (default on a CPU: the smaller of 2 GiB and a quarter "
        "of free memory for the pool)",
        aliases=("mem_fraction",),
        minimum=0.01,
        maximum=0.99,
    )
    max_total_tokens: int | None = _option(
        None, MEMORY, "tokens in the KV pool, in place of a share of the memory", minimum=2
    )
    max_running_requests: int | None = _option(
        None,
        MEMORY,
        "requests that run at once; others wait (default: 64 on a CPU, 64 to 256 on CUDA, by its memory)",
        minimum=1,
        maximum=65536,
    )
    chunked_prefill_size: int | None = _option(
        None,
        MEMORY,
        "most prompt tokens of one step; -1: no limit (default: 512 on a CPU, 2048 to 8192 on CUDA, by its memory)",
        minimum=-1,
    )
    disable_radix_cache: bool = _option(False, MEMORY, "do not reuse the KV of common prefixes")
    disable_overlap_schedule: bool = _option(False, MEMORY, "wait for every step's result before planning the next")
    enable_overlap: bool = _option(False, MEMORY, "plan a step while the one before runs (default on CUDA only)")
    num_threads: int | None = _option(None, MEMORY, "CPU threads of a forward (default: all cores)", minimum=1)

    cuda_graph_max_bs: int | None = _option(
        None,
        CUDA,
        "largest batch that decodes from CUDA graphs; fewer start faster (default: 32 to 128, by the device's memory)",
        aliases=("cuda_graph_max_bs_decode",),
        minimum=1,
        maximum=65536,
    )
    disable_cuda_graph: bool = _option(False, CUDA, "launch every kernel of every step")
    enable_torch_compile: bool = _option(False, CUDA, "let torch.compile have small batches of target and draft")
    torch_compile_max_bs: int = _option(32, CUDA, "largest batch that is compiled", minimum=1, maximum=65536)
    enable_deterministic_inference: bool = _option(
        False, CUDA, "a request's text does not depend on what runs beside it, nor on whether tokens are drafted"
    )

    speculative_algorithm: str | None = _option(
        None,
        SPECULATION,
        "who drafts tokens (default: EAGLE3 for smollm2, whose head is included, none for other models)",
        aliases=("speculative_algo",),
        choices=ALGORITHMS,
    )
    speculative_draft_model_path: str | None = _option(
        None,
        SPECULATION,
        "model or head that drafts: as --model (default: the head that comes with smollm2; of other models their own "
        "prediction layers, with EAGLE and NEXTN)",
        aliases=("speculative_draft_model",),
    )
    speculative_draft_model_revision: str | None = _option(
        None, SPECULATION, "branch, tag or commit, when the draft model is a hub id"
    )
    speculative_token_map: str | None = _option(
        None,
        SPECULATION,
        "tokens that EAGLE may draft (FR-Spec): a .pt, JSON or text list, or org/repo/file of the hub",
    )
    speculative_aux_layer_ids: str = _option(
        "auto",
        SPECULATION,
        "what the layer ids of an EAGLE-3 config count: outputs of layers, or boundaries between them",
        choices=AUX_LAYER_IDS,
    )
    speculative_num_steps: int | None = _option(
        None,
        SPECULATION,
        "depth of a draft (default: as the head's config says, else 3, or 5 for EAGLE on Llama; draft tokens - 1 for "
        "NGRAM)",
        minimum=1,
        maximum=256,
    )
    speculative_eagle_topk: int | None = _option(
        None,
        SPECULATION,
        "branching factor of a draft (default: as the head's config says, else 1, or 4 for EAGLE on Llama; max bfs "
        "breadth for NGRAM)",
        minimum=1,
        maximum=64,
    )
    speculative_num_draft_tokens: int | None = _option(
        None,
        SPECULATION,
        "nodes verified in a step, the root included (default: as the head's config says, else 4, or 8 for EAGLE on "
        "Llama; 12 for NGRAM)",
        minimum=2,
        maximum=512,
    )
    speculative_adaptive: bool = _option(
        False,
        SPECULATION,
        "take shorter drafts, or none, for steps in which that is faster (always so with NGRAM, and where no tree is "
        "asked for)",
    )
    speculative_ngram_min_match_window_size: int = _option(
        1, SPECULATION, "fewest last tokens that must match", minimum=1, maximum=MAX_HINT
    )
    speculative_ngram_max_match_window_size: int = _option(
        12, SPECULATION, "most last tokens that are matched", minimum=1, maximum=MAX_HINT
    )
    speculative_ngram_min_bfs_breadth: int = _option(1, SPECULATION, "least breadth of a draft", minimum=1, maximum=64)
    speculative_ngram_max_bfs_breadth: int = _option(10, SPECULATION, "most breadth of a draft", minimum=1, maximum=64)
    speculative_ngram_branch_length: int = _option(
        18,
        SPECULATION,
        "most tokens of one remembered continuation",
        aliases=("speculative_ngram_max_trie_depth",),
        minimum=1,
        maximum=256,
    )
    speculative_ngram_capacity: int = _option(
        10_000_000, SPECULATION, "tokens of log that the shared memory keeps", minimum=1024, maximum=2**31 - 1
    )

    simulate_accept_length: float | None = _option(
        None,
        SPECULATION,
        "accept drafts at random, this many tokens a step on average, the target's own included, to time steps; the "
        "text is worthless and every output says so",
        minimum=1,
    )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Options:
        """Options by name or alias, `-` read as `_`. Raises ConfigError for an unknown or repeated name.

        SGLang's options that have no counterpart are logged, or refused if they ask for what is not built.
        """
        names = _names()
        values: dict[str, Any] = {}
        for key, value in compat.take({key.replace("-", "_"): value for key, value in kwargs.items()}).items():
            name = names.get(key)
            if name is None:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
                raise ConfigError(f"unknown option {key!r}; the nearest one is {near!r}")
            if name in values:
                raise ConfigError(f"option {name!r} is given twice (once as {key!r})")
            values[name] = value
        return cls(**values)

    def resolve(self) -> Options:
        """Checked options with every default that follows from other options filled in: afterwards somebody drafts or
        `speculative_algorithm` is "none". Raises ConfigError."""
        for spec in dataclasses.fields(self):
            _check_field(spec, getattr(self, spec.name))
        if self.disable_overlap_schedule and self.enable_overlap:
            raise ConfigError("enable_overlap and disable_overlap_schedule exclude each other; give one of them")
        if self.chunked_prefill_size == 0:
            raise ConfigError("chunked_prefill_size must be at least 1, or -1 for no limit; found 0")
        fraction = self.mem_fraction_static
        if self.max_total_tokens is not None and fraction is not None:
            logger.warning("max_total_tokens sets the size of the KV pool; mem_fraction_static has no effect")
            fraction = None
        seed = secrets.randbits(31) if self.random_seed is None else self.random_seed
        drafting = self._with_drafter()
        found = {"mem_fraction_static": fraction, "random_seed": seed, **drafting._resolve_speculation()}
        resolved = dataclasses.replace(drafting, **found)
        resolved._check_simulation()
        return resolved

    def lag(self, device_type: str) -> int:
        """Steps between a launch and the commit of its result: 1 with overlap, else 0. Overlap is CUDA's default."""
        if self.disable_overlap_schedule:
            return 0
        return 1 if self.enable_overlap or device_type == "cuda" else 0

    def for_device(self, device_type: str, memory: int) -> Options:
        """Sizes by the device, `memory` bytes in all, where none were given."""
        if device_type != "cuda":
            idle = ("cuda_graph_max_bs", "enable_torch_compile", "torch_compile_max_bs")
            asked = [name for name in idle if getattr(self, name) != getattr(Options, name)]
            if asked:
                logger.warning("without CUDA, %s has no effect", ", ".join(asked))
            unset: dict[str, Any] = {name: getattr(Options, name) for name in idle}  # so that it is said once
            return dataclasses.replace(self, **unset)._sized(*CPU_SIZES, None)
        rows, chunk, graphs = next(sizes for least, *sizes in CUDA_SIZES if memory >= least)
        return self._sized(rows, chunk, min(self.cuda_graph_max_bs or graphs, self.max_running_requests or rows))

    def _sized(self, rows: int, chunk: int, graphs: int | None) -> Options:
        return dataclasses.replace(
            self,
            max_running_requests=self.max_running_requests or rows,
            chunked_prefill_size=self.chunked_prefill_size or chunk,
            cuda_graph_max_bs=graphs,
        )

    @property
    def deterministic(self) -> bool:
        return self.enable_deterministic_inference

    @property
    def logit_processors(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in (self.logit_processor or "").split(",") if name.strip())

    @property
    def dummy(self) -> bool:
        return self.load_format == "dummy"

    @property
    def label(self) -> dict[str, Any]:
        """What every output of a run carries of which something is not real, in words; empty in any other."""
        parts = ["random weights"] if self.dummy else []
        if self.simulate_accept_length is not None:
            parts.append(f"accept length {self.simulate_accept_length:g}")
        return {"simulated": parts} if parts else {}

    @property
    def drafter(self) -> str:
        """Who drafts, one of `ALGORITHMS`; of resolved options."""
        assert self.speculative_algorithm is not None, "options are not resolved"
        return self.speculative_algorithm

    @property
    def drafts_with_head(self) -> bool:
        """Whether an EAGLE-like algorithm drafts; of resolved options."""
        return self.drafter in ("EAGLE", "EAGLE3", "NEXTN")

    @property
    def speculative_shape(self) -> TreeShape:
        """The draft tree that the user asked for; of resolved options."""
        if self.drafter == "none":
            return PLAIN
        steps, topk, nodes = (
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )
        assert steps is not None and topk is not None and nodes is not None, "options are not resolved"
        return TreeShape(steps, topk, nodes)

    def _with_drafter(self) -> Options:
        """With an algorithm, and with the head that comes with the model where that drafts and no other is given."""
        asked, head = self.speculative_algorithm, None
        if asked is not None:
            algorithm = "none" if asked.lower() == "none" else asked.upper()
            if self.speculative_draft_model_path is None:
                head = shipped_head(self.model, algorithm)
        else:
            head = self._default_head()
            algorithm = "none" if head is None else DEFAULT_ALGORITHM
        found: dict[str, Any] = {"speculative_algorithm": algorithm}
        draft, tokens = self.speculative_draft_model_path, None
        if head is not None:
            found["speculative_draft_model_path"], tokens = str(head.folder), head.token_map
        elif draft is not None and algorithm in ("EAGLE", "NEXTN"):
            tokens = token_map_in(Path(draft).expanduser())
        if self.speculative_token_map is None and tokens is not None:
            found["speculative_token_map"] = str(tokens)
        return dataclasses.replace(self, **found)

    def _default_head(self) -> ShippedHead | None:
        """What drafts if nothing is asked for. Not for random weights: what a head has learnt of the true ones says
        nothing of them."""
        if self.dummy or self.speculative_draft_model_path is not None:
            return None
        return shipped_head(self.model, DEFAULT_ALGORITHM)

    def _resolve_speculation(self) -> dict[str, Any]:
        algorithm = self.drafter
        draft = self.speculative_draft_model_path
        if draft is not None and algorithm in ("none", "NGRAM"):
            raise ConfigError(
                f"speculative_draft_model_path needs a speculative_algorithm that drafts with a model "
                f"({_list(ALGORITHMS[2:])}); found {algorithm!r}"
            )
        if draft is None and algorithm in ("STANDALONE", "EAGLE3"):
            raise ConfigError(
                f"speculative_algorithm {algorithm} needs speculative_draft_model_path, the model that drafts"
            )
        tree = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        self._warn_of_idle_options(algorithm, tree)
        if algorithm == "none":
            return {"speculative_algorithm": "none"} | dict.fromkeys(tree)
        if self.drafts_with_head:
            if self.speculative_num_steps and self.speculative_eagle_topk:  # else it depends on head and target
                self._grown_shape(CHAIN_SHAPE)
            return {"speculative_algorithm": algorithm}
        if algorithm == "NGRAM":
            return {"speculative_algorithm": algorithm} | dict(zip(tree, self._ngram_shape(), strict=True))
        found = {"speculative_algorithm": algorithm, "speculative_adaptive": self._adaptive()}
        return found | dict(zip(tree, self._grown_shape(CHAIN_SHAPE), strict=True))

    def _check_simulation(self) -> None:
        length, steps = self.simulate_accept_length, self.speculative_num_steps
        if length is None:
            return
        if self.speculative_algorithm == "none":
            raise ConfigError("simulate_accept_length needs a speculative_algorithm, whose drafts it accepts")
        if steps is not None and length > steps + 1:
            raise ConfigError(
                f"simulate_accept_length must be at most speculative_num_steps + 1, which is {steps + 1}; "
                f"found {length:g}"
            )

    def _warn_of_idle_options(self, algorithm: str, tree: Sequence[str]) -> None:
        """One line for options of speculation that were set and that this algorithm does not look at."""
        used = {"speculative_algorithm", "speculative_draft_model_path"}
        if algorithm != "none":
            used |= {*tree, "speculative_adaptive"}
        if algorithm in ("EAGLE", "NEXTN"):
            used.add("speculative_token_map")
        if algorithm == "EAGLE3":
            used |= {"speculative_aux_layer_ids", "speculative_token_map"}  # the map: a warning of its own at the load
        if self.speculative_draft_model_path is not None:
            used.add("speculative_draft_model_revision")
        idle = [
            spec.name
            for spec in dataclasses.fields(self)
            if spec.name.startswith("speculative_")
            and spec.name not in used
            and not (algorithm == "NGRAM" and "_ngram_" in spec.name)
            and getattr(self, spec.name) != spec.default
        ]
        if idle:
            logger.warning("with speculative_algorithm %s, %s has no effect", algorithm, ", ".join(idle))

    def for_architecture(self, architecture: str, carried: TreeShape | None = None) -> Options:
        """Resolved options with the tree that an EAGLE-like algorithm has by default: `carried`, what the head's config
        asks for, or else what such targets have."""
        if not self.drafts_with_head:
            return self
        shape = self._grown_shape(carried or (LLAMA_SHAPE if architecture == "LlamaForCausalLM" else CHAIN_SHAPE))
        tree = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        filled: dict[str, Any] = dict(zip(tree, shape, strict=True))
        options = dataclasses.replace(self, **filled, speculative_adaptive=self._adaptive())
        options._check_simulation()
        return options

    def _adaptive(self) -> bool:
        """A tree that was asked for is the tree of every step, unless its adaptation was asked for, too."""
        tree = (self.speculative_num_steps, self.speculative_eagle_topk, self.speculative_num_draft_tokens)
        return self.speculative_adaptive or (tree == (None, None, None) and self.simulate_accept_length is None)

    def _grown_shape(self, default: TreeShape) -> TreeShape:
        """The growth loop's tree: level 1 has topk nodes, every further level topk children of topk nodes."""
        given = (self.speculative_num_steps, self.speculative_eagle_topk, self.speculative_num_draft_tokens)
        if given == (None, None, None):
            return default
        steps, topk = given[0] or default.depth, given[1] or default.topk
        most = most_nodes(steps, topk)
        nodes = given[2] or min(max(default.nodes, steps + 1), most)
        if topk == 1:
            if nodes != steps + 1 and given[2] is not None:
                logger.warning(
                    "speculative_eagle_topk 1 is a chain: speculative_num_draft_tokens is set to %d", steps + 1
                )
            return TreeShape(steps, 1, steps + 1)
        if not steps < nodes <= most:
            raise ConfigError(
                "speculative_num_draft_tokens must be from speculative_num_steps + 1 to 1 + topk + (steps - 1) * "
                f"topk^2, which is {steps + 1} to {most} for {steps} steps and topk {topk}; found {nodes}"
            )
        return TreeShape(steps, topk, nodes)

    def _ngram_shape(self) -> TreeShape:
        for part in ("match_window_size", "bfs_breadth"):
            low = getattr(self, f"speculative_ngram_min_{part}")
            high = getattr(self, f"speculative_ngram_max_{part}")
            if low > high:
                raise ConfigError(
                    f"speculative_ngram_min_{part} must be at most speculative_ngram_max_{part}; found {low} and {high}"
                )
        steps, topk, nodes = (
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )
        if topk is None:
            topk = self.speculative_ngram_max_bfs_breadth
        if nodes is None:
            nodes = 12 if topk > 1 or steps is None else steps + 1
        if steps is None:
            steps = nodes - 1
        if steps > nodes - 1:
            raise ConfigError(
                "speculative_num_steps must be at most speculative_num_draft_tokens - 1 (the root is one of the draft "
                f"tokens); found {steps} and {nodes}"
            )
        if topk == 1 and nodes != steps + 1:
            logger.warning("speculative_eagle_topk 1 is a chain: speculative_num_draft_tokens is set to %d", steps + 1)
            nodes = steps + 1
        return TreeShape(steps, topk, nodes)


def _names() -> dict[str, str]:
    """Every accepted name, aliases included, to its field's name."""
    fields = dataclasses.fields(Options)
    return {f.name: f.name for f in fields} | {alias: f.name for f in fields for alias in f.metadata["aliases"]}


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Options)


def _type_of(name: str) -> tuple[type[Any], bool]:
    """A field's type, and whether None is allowed."""
    hint = _hints()[name]
    if isinstance(hint, types.UnionType):
        return typing.get_args(hint)[0], True
    return hint, False


def _check_field(spec: dataclasses.Field[Any], value: Any) -> None:
    kind, optional = _type_of(spec.name)
    if value is None and optional:
        return
    allowed: tuple[type[Any], ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{spec.name} must be a {kind.__name__}; found {value!r}")
    meta = spec.metadata
    if spec.name == "speculative_algorithm":
        value = value.upper() if value.lower() != "none" else "none"
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{spec.name} must be one of {_list(meta['choices'])}; found {value!r}")
    if kind is str and not value:
        raise ConfigError(f"{spec.name} must not be empty")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{spec.name} must be a finite number; found {value!r}")
    if meta["min"] is not None and value < meta["min"]:
        raise ConfigError(f"{spec.name} must be at least {meta['min']}; found {value}")
    if meta["max"] is not None and value > meta["max"]:
        raise ConfigError(f"{spec.name} must be at most {meta['max']}; found {value}")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one argument per field of `Options`, grouped. Defaults stay out, so that only what was given is set."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in dataclasses.fields(Options):
        meta = spec.metadata
        group = groups.get(meta["group"]) or groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        flags = ["--" + name.replace("_", "-") for name in (spec.name, *meta["aliases"])]
        kind, _ = _type_of(spec.name)
        text = meta["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(*flags, dest=spec.name, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        if spec.default is not None:
            text += f" (default: {spec.default})"
        metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else kind.__name__.upper()
        group.add_argument(*flags, dest=spec.name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    for title, table in (
        ("accepted for SGLang's users, without effect", compat.NO_EFFECT),
        ("known from SGLang, refused", compat.REFUSED),
    ):
        group = parser.add_argument_group(title)
        for name, foreign in table.items():
            flag, text = "--" + name.replace("_", "-"), foreign.why.replace("%", "%%")
            if foreign.kind is bool:
                group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            else:
                metavar = foreign.kind.__name__.upper()
                group.add_argument(flag, type=foreign.kind, default=argparse.SUPPRESS, metavar=metavar, help=text)


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with `_` in option names replaced by `-`, so that both spellings work; values stay as they are."""
    out = []
    for arg in argv:
        name, eq, value = arg.partition("=")
        out.append(name.replace("_", "-") + eq + value if arg.startswith("--") else arg)
    return out
