"""A small model of Qwen3-VL's kind that sees: shapes, digits and their colours in pictures that are drawn here.

    python tools/train_small_seer.py OUT [--tower-steps 2000] [--steps 1000] [--batch 8]
    draftwing chat OUT --image OUT/examples/0.png

Asked "What is in the picture?" it says "A red circle on white.", also of the second of two, in a later turn, and says
so where there is none. The tower learns first, from labels and from where things are, and stays as it is while the
decoder learns to answer. Colours come within minutes, shapes and digits need most of the steps: what was tried is in
docs/dev/training.md. The end shows how often the engine's answers are right: with their pictures, with another's, and
with drafts. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

COLOURS = {
    "red": (214, 40, 40), "green": (46, 139, 60), "blue": (40, 70, 200), "yellow": (240, 205, 40),
    "purple": (130, 50, 160), "orange": (240, 130, 30), "black": (20, 20, 20), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = "circle", "square", "triangle", "star", "ring", "cross"
THINGS = (*SHAPES, *map(str, range(10)))
SIZES = (128, 128), (128, 128), (192, 128), (128, 192)  # halved by the processor, as any larger ones are made as small
END, PAD, IMAGE, VIDEO, BEFORE, AFTER, START, STOP = (
    "<|endoftext|>", "<|pad|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>",
    "<|im_end|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCK = 16  # pixels of a token's side
MASK = 8  # parts of its side of which is told whether a thing is there
PLAIN = 0.3  # of the tower's steps: less and less is black on white, without which it finds colours and no shapes
PIXELS = {"shortest_edge": 16 * BLOCK**2, "longest_edge": 24 * BLOCK**2}


class Scene(NamedTuple):
    thing: str
    colour: str
    ground: str

    def answer(self, question: str) -> str:
        return QUESTIONS[question].format(*self)


QUESTIONS = {
    "What is in the picture?": "A {1} {0} on {2}.",
    "What is it?": "It is a {0}.",
    "Which colour does it have?": "It is {1}.",
    "What is behind it?": "Everything behind it is {2}.",
}
NOTHING = "I see no picture."


def scene_of(draw: random.Random) -> Scene:
    colour, ground = draw.sample(sorted(COLOURS), 2)
    return Scene(draw.choice(THINGS), colour, ground)


def shade(draw: random.Random, colour: str) -> tuple[int, ...]:
    return tuple(max(0, min(255, part + draw.randint(-14, 14))) for part in COLOURS[colour])


def drawn(scene: Scene, draw: random.Random) -> Image.Image:
    """A thing somewhere in a picture of some size."""
    width, height = draw.choice(SIZES)
    picture = Image.new("RGB", (width, height), shade(draw, scene.ground))
    pen, fill, ground = ImageDraw.Draw(picture), shade(draw, scene.colour), picture.getpixel((0, 0))
    size = draw.randint(84, min(width, height) - 8)
    left, top = draw.randint(2, width - size - 2), draw.randint(2, height - size - 2)
    box = (left, top, left + size, top + size)

    def polygon(*points: tuple[float, float]) -> None:
        pen.polygon([(left + x * size, top + y * size) for x, y in points], fill)

    if scene.thing == "circle":
        pen.ellipse(box, fill)
    elif scene.thing == "square":
        pen.rectangle(box, fill)
    elif scene.thing == "triangle":
        polygon((0.5, 0), (1, 1), (0, 1))
    elif scene.thing == "ring":
        edge = size // 4
        pen.ellipse(box, fill)
        pen.ellipse((box[0] + edge, box[1] + edge, box[2] - edge, box[3] - edge), ground)
    elif scene.thing == "cross":
        pen.rectangle((left + size * 0.35, top, left + size * 0.65, top + size), fill)
        pen.rectangle((left, top + size * 0.35, left + size, top + size * 0.65), fill)
    elif scene.thing == "star":
        turns = [(math.pi * (i / 5 - 0.5), 0.5 if i % 2 == 0 else 0.2) for i in range(10)]
        polygon(*((0.5 + far * math.cos(turn), 0.5 + far * math.sin(turn)) for turn, far in turns))
    else:
        pen.text((left + size / 2, top + size / 2), scene.thing, fill, ImageFont.load_default(size * 1.2), "mm")
    return picture


class Talk(NamedTuple):
    """A conversation in which some turns show a picture: messages with answers, and the pictures."""

    messages: list[dict[str, Any]]
    pictures: list[Image.Image]
    scenes: list[Scene]


def talk_of(draw: random.Random, turns: int = 2) -> Talk:
    """Each question is about the last picture that was shown."""
    messages: list[dict[str, Any]] = []
    pictures: list[Image.Image] = []
    scenes: list[Scene] = []
    if draw.random() < 0.1:
        return Talk([_user(draw.choice(list(QUESTIONS)), None), _assistant(NOTHING)], [], [])
    for turn in range(turns):
        question = draw.choice(list(QUESTIONS))
        new = turn == 0 or draw.random() < 0.5
        if new:
            scenes.append(scene_of(draw))
            pictures.append(drawn(scenes[-1], draw))
        messages += [_user(question, pictures[-1] if new else None), _assistant(scenes[-1].answer(question))]
    return Talk(messages, pictures, scenes)


def _user(question: str, picture: Image.Image | None) -> dict[str, Any]:
    if picture is None:
        return {"role": "user", "content": question}
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}


def _assistant(answer: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer}


def tokenizer_of() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    draw, special = random.Random(0), [END, PAD, IMAGE, VIDEO, BEFORE, AFTER, START, STOP]
    texts = [question for question in QUESTIONS for _ in range(100)] + ["user\n", "assistant\n", NOTHING] * 100
    texts += [scene_of(draw).answer(question) for question in QUESTIONS for _ in range(2000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=STOP, pad_token=PAD)
    whole.chat_template = TEMPLATE
    return whole


def model_of(tokenizer: PreTrainedTokenizerFast, hidden: int) -> Qwen3VLForConditionalGeneration:
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(text) for name, text in (
        ("image", IMAGE), ("video", VIDEO), ("vision_start", BEFORE), ("vision_end", AFTER))}  # fmt: skip
    text = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 4,
        "num_attention_heads": hidden // 32, "num_key_value_heads": max(hidden // 64, 1), "head_dim": 32,
        "max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": hidden, "num_heads": hidden // 32, "intermediate_size": 2 * hidden,
        "patch_size": BLOCK // 2, "spatial_merge_size": 2, "out_hidden_size": hidden, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1, 2],
    }  # fmt: skip
    text["initializer_range"] = vision["initializer_range"] = hidden**-0.5  # the usual 0.02 is for much wider ones
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    )


class Reader:
    """Makes batches of conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.processor = Qwen2VLImageProcessorPil(size=PIXELS, patch_size=BLOCK // 2, merge_size=2)
        self._ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (IMAGE, START, STOP)}

    def pixels_of(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        return dict(self.processor(images=list(pictures), return_tensors="pt"))

    def batch_of(self, talks: Sequence[Talk]) -> dict[str, Tensor]:
        pictures = [picture for talk in talks for picture in talk.pictures]
        made = self.pixels_of(pictures) if pictures else {}
        counts = iter((made["image_grid_thw"].prod(-1) // 4).tolist() if pictures else ())
        rows, wanted = [], []
        for talk in talks:
            row, labels, said = list[int](), list[int](), False
            for message in talk.messages:
                text = self._tokenizer.apply_chat_template([message], tokenize=False)
                head, _, tail = text.partition("\n") if message["role"] == "assistant" else (text, "", "")
                for part, learned in ((head + "\n" if tail else head, False), (tail, True)):
                    for token in self._tokenizer(part)["input_ids"] if part else ():
                        times = next(counts) if token == self._ids[IMAGE] else 1
                        row += [token] * times
                        said = learned
                        labels += [token if said else -100] * times
            rows.append(torch.tensor(row))
            wanted.append(torch.tensor(labels))
        pad: Any = self._tokenizer.pad_token_id
        ids = nn.utils.rnn.pad_sequence(rows, True, pad)
        return made | {
            "input_ids": ids,
            "labels": nn.utils.rnn.pad_sequence(wanted, True, -100),
            "attention_mask": (ids != pad).long(),
            "mm_token_type_ids": (ids == self._ids[IMAGE]).int(),
        }


class Labels(nn.Module):
    """What pictures show, of the means of their rows of features: things, their colours, and those behind. And where
    the things are, of each row that the middle of the tower gives."""

    def __init__(self, width: int, deep: int) -> None:
        super().__init__()
        self.read = nn.Linear((1 + deep) * width, len(THINGS) + 2 * len(COLOURS))
        self.trace = nn.Linear(width, MASK**2)

    def forward(self, features: Any, counts: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
        rows = torch.cat((features.pooler_output, *features.deepstack_features), -1)
        means = torch.stack([part.mean(0) for part in rows.split(counts)])
        told = self.read(means).split((len(THINGS), len(COLOURS), len(COLOURS)), -1)
        return told, self.trace(features.deepstack_features[0])


def mask_of(scene: Scene, draw: random.Random, grid: tuple[int, int]) -> Tensor:
    """Returns where a thing is that `drawn` draws, [rows * columns of tokens, MASK * MASK], 0 .. 1."""
    rows, columns = grid
    black = drawn(scene._replace(colour="white", ground="black"), draw).convert("L")
    small = torch.from_numpy(np.array(black.resize((columns * MASK, rows * MASK)))) / 255
    return small.view(rows, MASK, columns, MASK).transpose(1, 2).reshape(rows * columns, -1)


def train_tower(net: Qwen3VLForConditionalGeneration, reader: Reader, args: argparse.Namespace) -> None:
    """Teaches the tower what pictures show, and leaves it as it is then: a decoder that learns beside it teaches it
    colours alone."""
    draw, device, tower = random.Random(args.seed), torch.device(args.device), net.model.visual
    deep = len(tower.config.deepstack_visual_indexes)
    labels, colours = Labels(tower.config.out_hidden_size, deep).to(device), sorted(COLOURS)

    def loss_of(done: float) -> tuple[Tensor, str]:
        scenes = [scene_of(draw) for _ in range(4 * args.batch)]
        plain = max(1 - done / PLAIN, 0.0)
        scenes = [one._replace(colour="black", ground="white") if draw.random() < plain else one for one in scenes]
        again = [random.Random(draw.random()) for _ in scenes]
        states = [one.getstate() for one in again]
        made = reader.pixels_of([drawn(scene, one) for scene, one in zip(scenes, again, strict=True)])
        grids, masks = (made["image_grid_thw"][:, 1:] // 2).tolist(), list[Tensor]()
        for scene, one, state, grid in zip(scenes, again, states, grids, strict=True):
            one.setstate(state)
            masks.append(mask_of(scene, one, grid))
        counts = [rows * columns for rows, columns in grids]
        found = tower(made["pixel_values"].to(device), grid_thw=made["image_grid_thw"].to(device), return_dict=True)
        told, traced = labels(found, counts)
        ids = [(THINGS.index(one.thing), colours.index(one.colour), colours.index(one.ground)) for one in scenes]
        wanted = torch.tensor(ids, device=device).t()
        losses = [nn.functional.cross_entropy(one, ids) for one, ids in zip(told, wanted, strict=True)]
        losses.append(4 * nn.functional.binary_cross_entropy_with_logits(traced, torch.cat(masks).to(device)))
        right = [int((one.argmax(-1) == ids).sum()) for one, ids in zip(told, wanted, strict=True)]
        return torch.stack(
            losses
        ).sum(), f"of {len(scenes)} things, colours and grounds {right} are right, trace {losses[-1].item() / 4:.3f}"

    _fit("tower", [*tower.parameters(), *labels.parameters()], args.tower_steps, args.rate, loss_of)
    tower.requires_grad_(False)


def train(net: Qwen3VLForConditionalGeneration, reader: Reader, args: argparse.Namespace) -> None:
    """Teaches the decoder to answer."""
    draw, device = random.Random(args.seed), torch.device(args.device)

    def loss_of(done: float) -> tuple[Tensor, str]:
        batch = reader.batch_of([talk_of(draw) for _ in range(args.batch)])
        loss: Tensor = net(**{name: value.to(device) for name, value in batch.items()}).loss
        return loss, ""

    _fit("decoder", [one for one in net.parameters() if one.requires_grad], args.steps, args.rate, loss_of)


def _fit(
    name: str, params: list[nn.Parameter], steps: int, rate: float, loss_of: Callable[[float], tuple[Tensor, str]]
) -> None:
    optimizer = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    warm = max(steps // 25, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    began = time.perf_counter()
    for step in range(steps):
        loss, more = loss_of(step / steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49 or step + 1 == steps:
            took = time.perf_counter() - began
            print(f"{name}: step {step + 1} of {steps}, {took:.0f} s, loss {loss.item():.4f} {more}", flush=True)


def save(net: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, reader: Reader, out: Path) -> None:
    net.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    reader.processor.save_pretrained(out)
    config = json.loads((out / "preprocessor_config.json").read_text())
    (out / "preprocessor_config.json").write_text(json.dumps(config | {"size": PIXELS}, indent=1))
    (out / "examples").mkdir(exist_ok=True)
    draw = random.Random("examples")
    scenes = [scene_of(draw) for _ in range(8)]
    for i, scene in enumerate(scenes):
        drawn(scene, draw).resize((256, 256)).save(out / "examples" / f"{i}.png")
    names = {f"{i}.png": scene.answer("What is in the picture?") for i, scene in enumerate(scenes)}
    (out / "examples" / "answers.json").write_text(json.dumps(names, indent=1))


def check(out: Path, device: str, count: int) -> None:
    """Prints how often the engine is right about pictures that training has not seen."""
    from draftwing import LLM

    draw = random.Random("held out")
    talks = [talk for talk in (talk_of(draw) for _ in range(2 * count)) if talk.pictures][:count]
    wanted = [talk.messages[-1]["content"] for talk in talks]
    asked = [talk.messages[:-1] for talk in talks]
    others = [_with_pictures(one, talks[i - 1].pictures) for i, one in enumerate(asked)]
    without = [one[-1:] for one in asked]
    params = {"temperature": 0.0, "max_new_tokens": 24}
    texts: list[list[int]] = []
    for algorithm in ("none", "NGRAM", "SUFFIX"):
        with LLM(str(out), device=device, speculative_algorithm=algorithm, max_total_tokens=16384) as llm:
            answers = llm.chat(asked, params)
            right = sum(a.text == b for a, b in zip(answers, wanted, strict=True))
            accept = sum(a.meta_info["spec_accept_length"] for a in answers) / count
            print(f"{algorithm}: {right} of {count} answers are right, {accept:.2f} tokens a step", flush=True)
            if algorithm == "none":
                texts = [a.token_ids for a in answers]
                swapped = sum(a.text == b for a, b in zip(llm.chat(others, params), wanted, strict=True))
                print(f"with the pictures of others: {swapped} of {count}")
                blind = [one for one in without if isinstance(one[-1]["content"], str)]
                said = [a.text for a in llm.chat(blind, params)]
                print(f"without any: {said.count(NOTHING)} of {len(blind)} say {NOTHING!r}")
            else:
                same = sum(a.token_ids == b for a, b in zip(answers, texts, strict=True))
                print(f"{algorithm}: {same} of {count} texts are those without drafts")


def _with_pictures(messages: list[dict[str, Any]], pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
    left, out = list(pictures), []
    for message in messages:
        if not isinstance(message["content"], str):
            text = message["content"][1]["text"]
            message = _user(text, left.pop(0) if len(left) > 1 else left[0])
        out.append(message)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tower-steps", type=int, default=2000, help="with --batch times four pictures each")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="conversations of two turns")
    parser.add_argument("--hidden", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=200, help="conversations at the end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer = tokenizer_of()
    reader, net = Reader(tokenizer), model_of(tokenizer, args.hidden).to(args.device)
    size = sum(param.numel() for param in net.parameters())
    print(f"{size / 1e6:.1f}M parameters on {args.device}, {len(tokenizer)} tokens", flush=True)
    train_tower(net, reader, args)
    train(net, reader, args)
    save(net, tokenizer, reader, args.out)
    check(args.out, args.device, args.check)


if __name__ == "__main__":
    main()
