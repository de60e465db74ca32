"""Every command of the documentation, and of SGLang's page on speculative decoding, is taken as it is typed. What
`curl` asks is asked in tests/test_readme.py."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from draftwing.cli import main
from draftwing.config.drafters import find_drafter
from draftwing.config.options import Options
from draftwing.config.sources import with_sources

ROOT = Path(__file__).parent.parent
examples = script(ROOT / "tools" / "readme_commands.py").examples
PAGES = (
    "README.md", "docs/constrained.md", "docs/installation.md", "docs/migrating.md", "docs/python.md",
    "docs/recipes.md", "docs/speculative_decoding.md", "docs/troubleshooting.md",
)  # fmt: skip
OTHERS = ("pip ", "uv ", "uvx ", "hf ", "docker ", "git ")  # programs whose commands are not looked at
PORT_OF_PAGES = "http://127.0.0.1:30000"
# What SGLang's page serves, its import changed; names of models, and log levels, left out.
EAGLE = "--speculative-algorithm EAGLE --speculative-draft-model-path d --speculative-num-steps"
SGLANG = (
    f"{EAGLE} 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8",
    f"{EAGLE} 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.6 --enable-torch-compile "
    "--torch-compile-max-bs 2",
    f"{EAGLE} 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --speculative-token-map freq_32768.pt "
    "--mem-fraction 0.7 --cuda-graph-max-bs 2 --dtype float16",
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 5 "
    "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --dtype float16",
    "--host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE --speculative-num-steps 1 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction 0.5",
    "--speculative-algorithm STANDALONE --speculative-draft-model-path d --speculative-num-steps 4 "
    "--speculative-eagle-topk 2 --speculative-num-draft-tokens 7 --mem-fraction-static 0.7",
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --speculative-ngram-max-match-window-size 12 "
    "--speculative-ngram-max-bfs-breadth 10 --mem-fraction-static 0.8",
)


def commands(page: str) -> list[str]:
    """Those of every ```bash block, without comments."""
    found = examples((ROOT / page).read_text(encoding="utf8"))
    return [shlex.join(one.words) for one in found if one.language == "bash"]


EVERY = sorted({command for page in PAGES for command in commands(page)})


def test_a_command_is_taken_as_it_is_typed() -> None:
    """With a tree as large as it says, and the drafter that it names."""
    parser, _, _ = main._parser()
    for command in [one.removeprefix("draftwing ") for one in EVERY if one.startswith("draftwing ")] + [*SGLANG]:
        words = shlex.split(command)
        words = ["serve", "--model", "m", *words] if command in SGLANG else words
        given: dict[str, Any] = vars(parser.parse_args([words[0], *main.dashed(words[1:])]))
        main._take_positional_model(given)
        if given.pop("command") == "serve":
            options = Options.from_kwargs(**with_sources(given, {})).resolve()
            asked = given.get("speculative_algorithm")
            assert asked is None or options.speculative_algorithm == find_drafter(asked).name, command
            if "speculative_num_draft_tokens" in given:
                assert options.speculative_num_draft_tokens == int(given["speculative_num_draft_tokens"]), command


def test_no_command_is_left_out() -> None:
    assert len(commands("docs/speculative_decoding.md")) >= 10
    for command in EVERY:
        assert command.startswith(("draftwing ", "curl ", "make ", *OTHERS)), command
        if command.startswith("make "):  # setting up an environment is no unit test; that make knows what to do is
            subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/constrained.md", "docs/python.md", "docs/speculative_decoding.md"])
def test_python(page: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small model in the default one's place, which the README's program has."""
    text = (ROOT / page).read_text(encoding="utf8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if "LLM(" in block]
    assert programs
    for program in programs:
        named, count = re.subn(
            r'LLM\((model=)?("smollm2"(, )?)?',
            f"LLM({model!r}, max_total_tokens=4096, chat_template='chatml_tools', ",
            program,
        )
        assert count == 1
        exec(compile(named, page, "exec"), {})
        assert capsys.readouterr().out.strip(" \n")  # a small model may write control characters alone
