"""The vocabulary of a GGUF file."""

import json

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.grammar_field import Grammar
from draftwing.text.tokenizer import load_tokenizer


def test_a_gguf_vocabulary(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    state = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    for token in tokenizer.encode('{"city": "Zürich \\u00e9 東京"}', add_special_tokens=False):
        assert (state.mask()[token >> 5] >> (token & 31)) & 1
        assert state.advance(token)
    assert state.done and not state.advance(0)
    assert all(state.advance(stop) for stop in tokenizer.stop_ids)
