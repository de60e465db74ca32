"""Constrains decoding on the host: which tokens may follow each node of a draft tree. No torch here."""

from draftwing.grammar.compiler import GrammarCompiler
from draftwing.grammar.state import GrammarState
from draftwing.grammar.tree import Guided, guide

__all__ = ["GrammarCompiler", "GrammarState", "Guided", "guide"]
