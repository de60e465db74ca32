"""SGLang's kits are mixins: classes that give them the address of the server."""

import importlib
import os
import unittest

import openai
import peer_plugin

KITS = {
    "basic_api_contract_kit": ("BasicAPIContractMixin",),
    "basic_decode_correctness_kit": ("BasicDecodeCorrectnessMixin",),
    "spec_server_kits": (
        "SpecCorrectnessKit",
        "SpecPerfKit",
        "SpecLogprobKit",
        "SpecGrammarKit",
        "SpecHiddenStatesKit",
        "SpecSamplingMaskKit",
    ),
    "matched_stop_kit": ("MatchedStopMixin",),
    "json_constrained_kit": ("JSONConstrainedMixin",),
    "json_mode_kit": ("JSONModeMixin",),
    "regex_constrained_kit": ("RegexConstrainedMixin",),
    "ebnf_constrained_kit": ("EBNFConstrainedMixin",),
    "anthropic_messages_kit": ("AnthropicMessagesMixin",),
    "abort_timeout_kit": ("AbortAllMixin",),
    "basic_scheduler_stress_kit": ("BasicSchedulerStressMixin",),
}
URL, MODEL = os.environ["PEER_URL"], os.environ["PEER_MODEL"]


def host(kit, base):
    fields = dict(
        base_url=URL,
        url=URL,
        model=MODEL,
        api_key="none",
        __test__=True,
        tokenizer=property(lambda self: peer_plugin.get_tokenizer()),
        setUp=lambda self: setattr(self, "client", openai.Client(base_url=URL + "/v1", api_key="none")),
    )
    return type("Test" + base.__name__, (base, unittest.TestCase), fields)


for kit, names in KITS.items():
    module = importlib.import_module("sglang.test.kits." + kit)
    for name in names:
        if hasattr(module, name):
            globals()["Test" + name] = host(kit, getattr(module, name))
