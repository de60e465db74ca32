"""Short names of models: `draftwing serve qwen3-0.6b`. No torch: options are checked before it is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEFAULT_MODEL = "smollm2"


class HubModel(NamedTuple):
    """A repository of the hub. commit: the one that is fetched, None: the newest of its main branch."""

    repo: str
    commit: str | None = None


@dataclass(frozen=True)
class Alias:
    """What a short name stands for.

    hub: where it comes from; None: the default model, which `models.hub` fetches from a package.
    parameters: how many, in words.  licence: SPDX identifier, or what the hub calls it.
    gated: whether the hub asks for consent to the licence, and so for `hf auth login`.
    heads: who can draft for it, by the kind of head, the default first; None: layers of the model's own checkpoint.
    sampling: defaults of requests by the names of `SamplingParams`, before those of generation_config.json. There
    `max_new_tokens` holds where neither the request nor its API limits the answer.
    """

    hub: HubModel | None
    parameters: str
    licence: str
    gated: bool = False
    heads: Mapping[str, HubModel | None] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


_APACHE, _LLAMA32 = "Apache-2.0", "llama3.2"
# Commits are those that were the newest when this was written; who wants others passes the hub id, or --revision.
ALIASES: Mapping[str, Alias] = {
    # Its heads come with the package, see `config.drafters`. With these values 98 of 100 answers ended within 1,024
    # tokens and none had a loop (`benchmarks/sampling_quality.py`); drafts gain nearly what they do without penalties.
    DEFAULT_MODEL: Alias(
        None,
        "135M",
        _APACHE,
        sampling={"temperature": 0.9, "min_p": 0.1, "dry_multiplier": 0.8, "max_new_tokens": 1024},
    ),
    "smollm2-1.7b": Alias(
        HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", "31b70e2e869a7173562077fd711b654946d38674"), "1.7B", _APACHE
    ),
    "qwen3-0.6b": Alias(HubModel("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"), "0.6B", _APACHE),
    "qwen3-1.7b": Alias(
        HubModel("Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"),
        "1.7B",
        _APACHE,
        heads={"eagle3": HubModel("AngelSlim/Qwen3-1.7B_eagle3", "94441b48acc5804677ae12259617c83323b543a9")},
    ),
    "qwen3-4b": Alias(
        HubModel("Qwen/Qwen3-4B", "1cfa9a7208912126459214e8b04321603b3df60c"),
        "4B",
        _APACHE,
        heads={
            "eagle3": HubModel("AngelSlim/Qwen3-4B_eagle3"),
            "dspark": HubModel("deepseek-ai/dspark_qwen3_4b_block7", "3457dff1417cb84927f6098a5fcb7cee85c934b7"),
        },
    ),
    "qwen3-8b": Alias(
        HubModel("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218"),
        "8B",
        _APACHE,
        heads={
            "eagle3": HubModel("AngelSlim/Qwen3-8B_eagle3", "9629dfce7a4a10564dd48d3e5485c3976095653c"),
            "dflash": HubModel("z-lab/Qwen3-8B-DFlash-b16", "9b41424b7109f9c5413454f481b09a82b85333f4"),
            "dspark": HubModel("deepseek-ai/dspark_qwen3_8b_block7", "03326e5043815da1f81b109078b2889737c26017"),
        },
    ),
    "qwen2.5-0.5b": Alias(
        HubModel("Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"), "0.5B", _APACHE
    ),
    "qwen2.5-1.5b": Alias(
        HubModel("Qwen/Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306"), "1.5B", _APACHE
    ),
    "qwen2.5-7b": Alias(
        HubModel("Qwen/Qwen2.5-7B-Instruct", "a09a35458c702b33eeacc393d103063234e8bc28"), "7B", _APACHE
    ),
    "llama3.2-1b": Alias(
        HubModel("meta-llama/Llama-3.2-1B-Instruct", "9213176726f574b556790deb65791e0c5aa438b6"),
        "1B",
        _LLAMA32,
        gated=True,
    ),
    "llama3.2-3b": Alias(
        HubModel("meta-llama/Llama-3.2-3B-Instruct", "0cb88a4f764b7a12671c53f0838cd831a0843b95"),
        "3B",
        _LLAMA32,
        gated=True,
    ),
    "llama3.1-8b": Alias(
        HubModel("meta-llama/Llama-3.1-8B-Instruct", "0e9e39f249a16976918f6564b8830bc894c89659"),
        "8B",
        "llama3.1",
        gated=True,
        heads={"eagle3": HubModel("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "ada412b672e293d682423de84a095447bf38a637")},
    ),
    "gemma3-1b": Alias(
        HubModel("google/gemma-3-1b-it", "dcc83ea841ab6100d6b47a070329e1ba4cf78752"), "1B", "gemma", gated=True
    ),
    "mimo-7b": Alias(HubModel("XiaomiMiMo/MiMo-7B-RL"), "7B", "MIT", heads={"mtp": None}),
    "gpt-oss-20b": Alias(HubModel("openai/gpt-oss-20b", "6cee5e81ee83917806bbde320786a8fb61efebee"), "20B", _APACHE),
}


def nearest(name: str) -> str | None:
    """Returns the alias that a mistyped name may mean."""
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    return close[0] if close else None
