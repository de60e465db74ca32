"""Constrained decoding, the host's side: which tokens may follow, for every node of a draft tree. No torch here."""

from draftwing.grammar.compiler import GrammarCompiler, check
from draftwing.grammar.state import GrammarState
from draftwing.grammar.tree import Guided, guide, masks_of

__all__ = ["GrammarCompiler", "GrammarState", "Guided", "check", "guide", "masks_of"]
