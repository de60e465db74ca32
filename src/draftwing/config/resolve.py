"""How `Options` resolve: what excludes each other, and what follows from other options, the device and the models.

`Options.resolve`, `for_device` and `for_architecture` call what is here. No torch: see `config`.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.bundled import DEFAULT_ALGORITHM, ShippedHead, most_nodes, shipped_head, token_map_in
from draftwing.core import TreeShape
from draftwing.errors import ConfigError

if TYPE_CHECKING:
    from draftwing.config.options import Options

logger = logging.getLogger(__name__)

MODEL_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")  # those that draft with a model
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")  # fields of a `TreeShape`
# Trees when only an algorithm is given and the head asks for none: chains, but for EAGLE heads of Llama models.
CHAIN_SHAPE, LLAMA_SHAPE = TreeShape(3, 1, 4), TreeShape(5, 4, 8)
# (bytes of memory at least, most requests, prompt tokens of a step, largest batch with graphs) of a CUDA device
CUDA_SIZES = ((60e9, 256, 8192, 128), (20e9, 128, 4096, 64), (0, 64, 2048, 32))
CPU_SIZES = (64, 512)


def resolved(options: Options) -> Options:
    """`Options.resolve`, of options whose values are each in range."""
    if options.disable_overlap_schedule and options.enable_overlap:
        raise ConfigError("enable_overlap and disable_overlap_schedule exclude each other; give one of them")
    if options.chunked_prefill_size == 0:
        raise ConfigError("chunked_prefill_size must be at least 1, or -1 for no limit; found 0")
    fraction = options.mem_fraction_static
    if options.max_total_tokens is not None and fraction is not None:
        logger.warning("max_total_tokens sets the size of the KV pool; mem_fraction_static has no effect")
        fraction = None
    seed = secrets.randbits(31) if options.random_seed is None else options.random_seed
    drafting = _with_drafter(options)
    found = {"mem_fraction_static": fraction, "random_seed": seed, **_speculation(drafting)}
    options = dataclasses.replace(drafting, **found)
    _check_simulation(options)
    return options


# ---- the device ------------------------------------------------------------------------------------------------------


def for_device(options: Options, device_type: str, memory: int) -> Options:
    """`Options.for_device`"""
    if device_type != "cuda":
        defaults = {spec.name: spec.default for spec in dataclasses.fields(options)}
        idle = ("cuda_graph_max_bs", "enable_torch_compile", "torch_compile_max_bs")
        asked = [name for name in idle if getattr(options, name) != defaults[name]]
        if asked:
            logger.warning("without CUDA, %s has no effect", ", ".join(asked))
        unset: dict[str, Any] = {name: defaults[name] for name in idle}  # so that it is said once
        return _sized(dataclasses.replace(options, **unset), *CPU_SIZES, None)
    rows, chunk, graphs = next(sizes for least, *sizes in CUDA_SIZES if memory >= least)
    graphs = min(options.cuda_graph_max_bs or graphs, options.max_running_requests or rows)
    return _sized(options, rows, chunk, graphs)


def _sized(options: Options, rows: int, chunk: int, graphs: int | None) -> Options:
    return dataclasses.replace(
        options,
        max_running_requests=options.max_running_requests or rows,
        chunked_prefill_size=options.chunked_prefill_size or chunk,
        cuda_graph_max_bs=graphs,
    )


# ---- who drafts ------------------------------------------------------------------------------------------------------


def _with_drafter(options: Options) -> Options:
    """With an algorithm, and with the head that comes with the model where that drafts and no other is given."""
    asked, head = options.speculative_algorithm, None
    if asked is not None:
        algorithm = "none" if asked.lower() == "none" else asked.upper()
        if options.speculative_draft_model_path is None:
            head = shipped_head(options.model, algorithm)
    else:
        head = _default_head(options)
        algorithm = "none" if head is None else DEFAULT_ALGORITHM
    found: dict[str, Any] = {"speculative_algorithm": algorithm}
    draft, tokens = options.speculative_draft_model_path, None
    if head is not None:
        found["speculative_draft_model_path"], tokens = str(head.folder), head.token_map
    elif draft is not None and algorithm in ("EAGLE", "NEXTN"):
        tokens = token_map_in(Path(draft).expanduser())
    if options.speculative_token_map is None and tokens is not None:
        found["speculative_token_map"] = str(tokens)
    return dataclasses.replace(options, **found)


def _default_head(options: Options) -> ShippedHead | None:
    """What drafts if nothing is asked for. Not for random weights: what a head has learnt of the true ones says nothing
    of them."""
    if options.dummy or options.speculative_draft_model_path is not None:
        return None
    return shipped_head(options.model, DEFAULT_ALGORITHM)


def _speculation(options: Options) -> dict[str, Any]:
    """What follows from the algorithm, which is known by now."""
    algorithm, draft = options.drafter, options.speculative_draft_model_path
    if draft is not None and algorithm not in MODEL_ALGORITHMS:
        raise ConfigError(
            f"speculative_draft_model_path needs a speculative_algorithm that drafts with a model "
            f"({', '.join(MODEL_ALGORITHMS)}); found {algorithm!r}"
        )
    if draft is None and algorithm in ("STANDALONE", "EAGLE3"):
        raise ConfigError(
            f"speculative_algorithm {algorithm} needs speculative_draft_model_path, the model that drafts"
        )
    _warn_of_idle_options(options)
    if algorithm == "none":
        return dict.fromkeys(TREE)
    if options.drafts_with_head:
        if options.speculative_num_steps and options.speculative_eagle_topk:  # else it depends on head and target
            _grown_shape(options, CHAIN_SHAPE)
        return {}
    if algorithm == "NGRAM":
        return _tree(_ngram_shape(options))
    return {"speculative_adaptive": _adaptive(options)} | _tree(_grown_shape(options, CHAIN_SHAPE))


def _check_simulation(options: Options) -> None:
    length, steps = options.simulate_accept_length, options.speculative_num_steps
    if length is None:
        return
    if options.speculative_algorithm == "none":
        raise ConfigError("simulate_accept_length needs a speculative_algorithm, whose drafts it accepts")
    if steps is not None and length > steps + 1:
        raise ConfigError(
            f"simulate_accept_length must be at most speculative_num_steps + 1, which is {steps + 1}; found {length:g}"
        )


def _warn_of_idle_options(options: Options) -> None:
    """One line for options of speculation that were set and that this algorithm does not look at."""
    algorithm = options.drafter
    used = {"speculative_algorithm", "speculative_draft_model_path"}
    if algorithm != "none":
        used |= {*TREE, "speculative_adaptive"}
    if algorithm in ("EAGLE", "NEXTN"):
        used.add("speculative_token_map")
    if algorithm == "EAGLE3":
        used |= {"speculative_aux_layer_ids", "speculative_token_map"}  # the map: a warning of its own at the load
    if options.speculative_draft_model_path is not None:
        used.add("speculative_draft_model_revision")
    idle = [
        spec.name
        for spec in dataclasses.fields(options)
        if spec.name.startswith("speculative_")
        and spec.name not in used
        and not (algorithm == "NGRAM" and "_ngram_" in spec.name)
        and getattr(options, spec.name) != spec.default
    ]
    if idle:
        logger.warning("with speculative_algorithm %s, %s has no effect", algorithm, ", ".join(idle))


# ---- the tree --------------------------------------------------------------------------------------------------------


def for_architecture(options: Options, architecture: str, carried: TreeShape | None) -> Options:
    """`Options.for_architecture`"""
    if not options.drafts_with_head:
        return options
    default = carried or (LLAMA_SHAPE if architecture == "LlamaForCausalLM" else CHAIN_SHAPE)
    found = {"speculative_adaptive": _adaptive(options)} | _tree(_grown_shape(options, default))
    options = dataclasses.replace(options, **found)
    _check_simulation(options)
    return options


def _tree(shape: TreeShape) -> dict[str, Any]:
    return dict(zip(TREE, shape, strict=True))


def _given(options: Options) -> tuple[int | None, int | None, int | None]:
    """Steps, topk and draft tokens."""
    return options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens


def _adaptive(options: Options) -> bool:
    """A tree that was asked for is the tree of every step, unless its adaptation was asked for, too."""
    free = _given(options) == (None, None, None) and options.simulate_accept_length is None
    return options.speculative_adaptive or free


def _grown_shape(options: Options, default: TreeShape) -> TreeShape:
    """The growth loop's tree: level 1 has topk nodes, every further level topk children of topk nodes."""
    steps, topk, asked = _given(options)
    if (steps, topk, asked) == (None, None, None):
        return default
    steps, topk = steps or default.depth, topk or default.topk
    if topk == 1:
        return _chain(steps, asked or steps + 1)
    most = most_nodes(steps, topk)
    nodes = asked or min(max(default.nodes, steps + 1), most)
    if not steps < nodes <= most:
        raise ConfigError(
            "speculative_num_draft_tokens must be from speculative_num_steps + 1 to 1 + topk + (steps - 1) * "
            f"topk^2, which is {steps + 1} to {most} for {steps} steps and topk {topk}; found {nodes}"
        )
    return TreeShape(steps, topk, nodes)


def _ngram_shape(options: Options) -> TreeShape:
    for part in ("match_window_size", "bfs_breadth"):
        low = getattr(options, f"speculative_ngram_min_{part}")
        high = getattr(options, f"speculative_ngram_max_{part}")
        if low > high:
            raise ConfigError(
                f"speculative_ngram_min_{part} must be at most speculative_ngram_max_{part}; found {low} and {high}"
            )
    steps, topk, nodes = _given(options)
    if topk is None:
        topk = options.speculative_ngram_max_bfs_breadth
    if nodes is None:
        nodes = 12 if topk > 1 or steps is None else steps + 1
    if steps is None:
        steps = nodes - 1
    if steps > nodes - 1:
        raise ConfigError(
            "speculative_num_steps must be at most speculative_num_draft_tokens - 1 (the root is one of the draft "
            f"tokens); found {steps} and {nodes}"
        )
    return _chain(steps, nodes) if topk == 1 else TreeShape(steps, topk, nodes)


def _chain(steps: int, nodes: int) -> TreeShape:
    """nodes: as asked for"""
    if nodes != steps + 1:
        logger.warning("speculative_eagle_topk 1 is a chain: speculative_num_draft_tokens is set to %d", steps + 1)
    return TreeShape(steps, 1, steps + 1)
