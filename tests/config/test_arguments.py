"""Options on the command line: spellings, values, what is not given."""

from __future__ import annotations

import argparse
import dataclasses

from draftwing.config.arguments import add_arguments, dashed
from draftwing.config.options import Options


def parse(*argv: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return Options(**vars(parser.parse_args(dashed(argv))))


def test_what_is_not_given_stays_the_default() -> None:
    assert parse() == Options()


def test_every_option_has_both_spellings_and_reaches_its_field() -> None:
    examples = {str: "x", int: "7", float: "0.5"}
    for field in dataclasses.fields(Options):
        for name in (field.name, *field.metadata["aliases"]):
            for flag in ("--" + name, "--" + name.replace("_", "-")):
                confidence = str(field.type)
                if confidence == "bool":
                    assert getattr(parse(flag), field.name) is True
                    continue
                kind = next(kind for kind in examples if confidence.startswith(kind.__name__))
                for argv in ((flag, examples[kind]), (f"{flag}={examples[kind]}",)):
                    assert getattr(parse(*argv), field.name) == kind(examples[kind])


def test_underscores_in_values_stay() -> None:
    assert parse("--model_path=my_org/my_model").model == "my_org/my_model"
    assert parse("--model", "my_model").model == "my_model"
