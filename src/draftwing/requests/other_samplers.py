"""Samplers of other servers that this one does not have: the values that ask for nothing, and what it has instead.

Their names are those of llama.cpp, vLLM, SGLang, TGI, OpenRouter, KoboldCpp and text-generation-webui.
"""

from __future__ import annotations

from typing import Any, Final

_TAILS = "use top_p, top_k and min_p"
_HEAT = "use temperature and min_p"
_REPEATS = "use dry_multiplier, repetition_penalty, frequency_penalty and presence_penalty"
_ORDER = "the order of samplers is fixed"
_TABLE: tuple[tuple[tuple[Any, ...], str, str], ...] = (
    ((1,), _TAILS, "typical_p typical tfs_z tfs"),
    ((0,), _TAILS, "top_a epsilon_cutoff eta_cutoff"),
    ((0, -1), _TAILS, "top_n_sigma nsigma"),
    ((0,), _HEAT, "dynatemp_range smoothing_factor xtc_probability mirostat mirostat_mode"),
    ((False,), _HEAT, "dynamic_temperature"),
    ((0, -1), _HEAT, "adaptive_target"),
    ((0,), _REPEATS, "no_repeat_ngram_size penalty_alpha"),
    ((1,), _REPEATS, "encoder_repetition_penalty"),
    (([], ""), _ORDER, "samplers sampler_priority sampler_order"),
    ((False,), _ORDER, "temperature_last"),
    ((True,), "use temperature: 0", "do_sample"),
    ((0,), "use logprobs and top_logprobs", "n_probs top_n_tokens"),
    ((1,), "leave it out", "guidance_scale"),
    (("",), "leave it out", "negative_prompt"),
    ((False,), "use ignore_eos", "ban_eos_token"),
    ((1,), "use n", "best_of"),
)
NEUTRAL_SAMPLERS: Final = {name: values for values, _, names in _TABLE for name in names.split()}
INSTEAD: Final = {name: instead for _, instead, names in _TABLE for name in names.split()}
# Of these samplers: they ask for nothing without them. DRY looks at the whole answer, without breakers.
SAMPLER_HINTS: Final = (
    "adaptive_decay dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_high dynatemp_low min_keep "
    "mirostat_eta mirostat_tau smoothing_curve xtc_threshold"
)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Returns whether a value is null, or one of those that ask for nothing."""
    # 0 == False in Python but not for a user: only numbers are equal across types.
    return value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def not_built(name: str) -> str:
    """Returns what to say of a field that is not built."""
    return f"is not supported by this version; {INSTEAD.get(name, 'leave it out')}"
