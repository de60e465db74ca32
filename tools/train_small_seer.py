"""A small model of Qwen3-VL's kind that sees: shapes, digits and their colours in pictures that are drawn here.

    python tools/train_small_seer.py OUT [--tower-steps 500] [--steps 500]
    draftwing chat OUT --image OUT/examples/0.png
    python tools/train_small_seer.py OUT --measure [--head HEAD]

Asked "What is in the picture?" it says "A red circle on white.", also of the second of two, in a later turn, and says
so where there is none. The tower learns first, from labels, and stays as it is while the decoder learns to answer. The
end shows how often the engine's answers are right: with their pictures, with others, without any, and with drafts.
`OUT/texts.jsonl` has conversations without their pictures, for `draftwing train --conversations`, which makes HEAD.
Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

# Things are darker than what is behind them: a tower of this size learns shapes late where either may be darker.
COLOURS = {"red": (205, 30, 40), "green": (25, 130, 50), "blue": (40, 65, 200), "purple": (120, 40, 150),
           "black": (20, 20, 20)}  # fmt: skip
GROUNDS = {"white": (245, 245, 245), "yellow": (245, 220, 80), "pink": (250, 180, 205), "grey": (190, 190, 190)}
SHAPES = "circle", "square", "triangle", "star", "ring", "cross"
THINGS = (*SHAPES, *map(str, range(10)))
SIZES = (128, 128), (192, 128), (128, 192)  # the processor makes a quarter of them, as of any larger ones
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
PATCH, MERGE = 8, 2  # pixels of a patch's side, patches of a token's
BLOCK = PATCH * MERGE
PIXELS = {"shortest_edge": 4 * BLOCK**2, "longest_edge": 6 * BLOCK**2}


class Scene(NamedTuple):
    thing: str
    colour: str
    ground: str

    def answer(self, question: str) -> str:
        return QUESTIONS[question].format(*self)

    def another(self, draw: random.Random) -> Scene:
        """Returns one of which no answer is the same."""
        return Scene(
            *(draw.choice([one for one in names if one != own]) for names, own in zip(NAMES, self, strict=True))
        )


QUESTIONS = {
    "What is in the picture?": "A {1} {0} on {2}.",
    "What is it?": "It is a {0}.",
    "Which colour does it have?": "It is {1}.",
    "What is behind it?": "Everything behind it is {2}.",
}
NOTHING = "I see no picture."
NAMES = THINGS, tuple(COLOURS), tuple(GROUNDS)


def scene_of(draw: random.Random) -> Scene:
    return Scene(*map(draw.choice, NAMES))


def shade(draw: random.Random, colour: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(max(0, min(255, part + draw.randint(-10, 10))) for part in colour)


@cache
def font(size: int) -> Any:
    return ImageFont.load_default(size)


def drawn(thing: str, draw: random.Random, shape: tuple[int, int], fill: Any, ground: Any) -> Image.Image:
    """A thing somewhere in a picture. shape: its width and height."""
    width, height = shape
    picture = Image.new("RGB", shape, ground)
    pen, size = ImageDraw.Draw(picture), draw.randint(84, 116)
    left, top = draw.randint(2, width - size - 2), draw.randint(2, height - size - 2)
    box = (left, top, left + size, top + size)

    def polygon(*points: tuple[float, float]) -> None:
        pen.polygon([(left + x * size, top + y * size) for x, y in points], fill)

    if thing == "circle":
        pen.ellipse(box, fill)
    elif thing == "square":
        pen.rectangle(box, fill)
    elif thing == "triangle":
        polygon((0.5, 0), (1, 1), (0, 1))
    elif thing == "ring":
        edge = size // 4
        pen.ellipse(box, fill)
        pen.ellipse((box[0] + edge, box[1] + edge, box[2] - edge, box[3] - edge), ground)
    elif thing == "cross":
        pen.rectangle((left + size * 0.35, top, left + size * 0.65, top + size), fill)
        pen.rectangle((left, top + size * 0.35, left + size, top + size * 0.65), fill)
    elif thing == "star":
        turns = [(math.pi * (i / 5 - 0.5), 0.5 if i % 2 == 0 else 0.2) for i in range(10)]
        polygon(*((0.5 + far * math.cos(turn), 0.5 + far * math.sin(turn)) for turn, far in turns))
    else:
        pen.text((left + size / 2, top + size / 2), thing, fill, font(int(size * 1.2)), "mm")
    return picture


def picture_of(scene: Scene, draw: random.Random) -> Image.Image:
    fill, ground = shade(draw, COLOURS[scene.colour]), shade(draw, GROUNDS[scene.ground])
    return drawn(scene.thing, draw, draw.choice(SIZES), fill, ground)


class Talk(NamedTuple):
    """A conversation in which some turns show a picture: messages with answers, and the pictures."""

    messages: list[dict[str, Any]]
    pictures: list[Image.Image]


def talk(questions: Sequence[str], scenes: Sequence[Scene | None], draw: random.Random) -> Talk:
    """Each question is about the last picture that was shown. scenes: what is shown with each of them."""
    messages: list[dict[str, Any]] = []
    pictures: list[Image.Image] = []
    seen = None
    for question, scene in zip(questions, scenes, strict=True):
        content: Any = question
        if scene is not None:
            seen = scene
            pictures.append(picture_of(scene, draw))
            content = [{"type": "image", "image": pictures[-1]}, {"type": "text", "text": question}]
        answer = NOTHING if seen is None else seen.answer(question)
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Talk(messages, pictures)


def asked(draw: random.Random) -> tuple[list[str], list[Scene | None]]:
    """Questions of one or two turns, and what is shown with them; now and then nothing is."""
    questions = draw.choices(list(QUESTIONS), k=draw.choice((1, 2)))
    if draw.random() < 0.1:
        return questions[:1], [None]
    return questions, [scene_of(draw) if i == 0 or draw.random() < 0.5 else None for i in range(len(questions))]


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
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 2,
        "num_attention_heads": hidden // 32, "num_key_value_heads": max(hidden // 64, 1), "head_dim": 32,
        "max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": hidden, "num_heads": hidden // 32, "intermediate_size": 2 * hidden,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "out_hidden_size": hidden, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [2],
    }  # fmt: skip
    text["initializer_range"] = vision["initializer_range"] = hidden**-0.5  # the usual 0.02 is for much wider ones
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    )


class Reader:
    """Makes batches of conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.processor = Qwen2VLImageProcessorPil(
            size=PIXELS, patch_size=PATCH, merge_size=MERGE, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        self._image = tokenizer.convert_tokens_to_ids(IMAGE)

    def pixels_of(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        return dict(self.processor(images=list(pictures), return_tensors="pt"))

    def batch_of(self, talks: Sequence[Talk]) -> dict[str, Tensor]:
        pictures = [picture for talk in talks for picture in talk.pictures]
        made = self.pixels_of(pictures) if pictures else {}
        counts = iter((made["image_grid_thw"].prod(-1) // MERGE**2).tolist() if pictures else ())
        rows, wanted = [], []
        for talk in talks:
            row, labels = list[int](), list[int]()
            for message in talk.messages:
                head, mark, tail = self._tokenizer.apply_chat_template([message], tokenize=False).partition("\n")
                for part, learned in (head + mark, False), (tail, message["role"] == "assistant"):
                    for token in self._tokenizer(part)["input_ids"]:
                        times = next(counts) if token == self._image else 1
                        row += [token] * times
                        labels += [token if learned else -100] * times
            rows.append(torch.tensor(row))
            wanted.append(torch.tensor(labels))
        pad: Any = self._tokenizer.pad_token_id
        ids = nn.utils.rnn.pad_sequence(rows, True, pad)
        return made | {
            "input_ids": ids,
            "labels": nn.utils.rnn.pad_sequence(wanted, True, -100),
            "attention_mask": (ids != pad).long(),
            "mm_token_type_ids": (ids == self._image).int(),
        }


class Pool:
    """Things in pictures of one size, to be had in any colours."""

    def __init__(self, reader: Reader, draw: random.Random, shape: tuple[int, int], count: int, device: str) -> None:
        self.things = torch.randint(len(THINGS), (count,), generator=torch.Generator().manual_seed(draw.randrange(99)))
        made = reader.pixels_of([drawn(THINGS[i], draw, shape, "white", "black") for i in self.things.tolist()])
        pixels = made["pixel_values"].view(count, -1, 3, 2, PATCH**2)  # a still picture is two equal frames
        self.things, (_, self.rows, self.columns) = self.things.to(device), made["image_grid_thw"][0].tolist()
        self._alpha = (pixels[:, :, 0, 0].to(device) + 1) / 2  # [count, patches, PATCH**2]: how much of it is the thing

    def batch(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pixels [count * patches, values] as the tower takes them, what they show [3, count], in the order of
        `NAMES`, and their grid [1, 3]: they are frames of one video, which do not see each other."""
        device = self.things.device
        at = torch.randint(len(self.things), (count,), device=device)
        shown, shades = [self.things[at]], []
        for names in (COLOURS, GROUNDS):
            table = torch.tensor([*names.values()], device=device) / 127.5 - 1
            shown.append(torch.randint(len(names), (count,), device=device))
            shades.append((table[shown[-1]] + (torch.rand(count, 3, device=device) - 0.5) * 0.16)[:, None, :, None])
        fill, ground = shades  # [count, 1, 3, 1]
        pixels = ground + self._alpha[at][:, :, None] * (fill - ground)  # [count, patches, 3, PATCH**2]
        pixels = pixels.clamp(-1, 1)[:, :, :, None].expand(-1, -1, -1, 2, -1)
        return pixels.flatten(0, 1).flatten(1), torch.stack(shown), torch.tensor([[count, self.rows, self.columns]])


def of_one_size(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, cu_seq_lens_q: Tensor, **__: Any
) -> tuple[Tensor, None]:
    """Attends within frames of one size, [1, heads, tokens, head_dim], in one call. Transformers has one for each."""
    frames = len(cu_seq_lens_q) - 1
    parts = (one[0].unflatten(1, (frames, -1)).transpose(0, 1) for one in (query, key, value))
    found = nn.functional.scaled_dot_product_attention(*parts, scale=scaling)  # [frames, heads, tokens, head_dim]
    return found.transpose(1, 2).flatten(0, 1), None


AttentionInterface.register("flash_of_one_size", of_one_size)  # it is given sizes because of its name


def train_tower(net: Qwen3VLForConditionalGeneration, reader: Reader, args: argparse.Namespace) -> None:
    """Teaches the tower what pictures show, and leaves it as it is then: a decoder that learns beside it teaches it
    colours alone."""
    draw, tower = random.Random(args.seed), net.model.visual
    pools = [Pool(reader, draw, shape, args.pictures, args.device) for shape in SIZES]
    counts = [len(names) for names in NAMES]
    labels = nn.Linear(tower.config.out_hidden_size, sum(counts)).to(args.device)

    def loss_of() -> tuple[Tensor, str]:
        pixels, shown, grid = draw.choice(pools).batch(args.tower_batch)
        found = tower(pixels, grid_thw=grid.to(args.device), return_dict=True)
        rows = found.pooler_output + torch.stack(found.deepstack_features).sum(0)  # as the decoder has them at last
        told = labels(rows.view(args.tower_batch, -1, rows.shape[-1]).mean(1)).split(counts, -1)
        right = [f"{(one.argmax(-1) == ids).float().mean():.0%}" for one, ids in zip(told, shown, strict=True)]
        losses = [nn.functional.cross_entropy(one, ids) for one, ids in zip(told, shown, strict=True)]
        return torch.stack(losses).sum(), f"things, colours, grounds: {', '.join(right)}"

    slow, tower.config._attn_implementation = tower.config._attn_implementation, "flash_of_one_size"
    _fit("tower", [*tower.parameters(), *labels.parameters()], args.tower_steps, args.rate, loss_of)
    tower.config._attn_implementation = slow
    tower.requires_grad_(False)


def train(net: Qwen3VLForConditionalGeneration, reader: Reader, args: argparse.Namespace) -> None:
    """Teaches the decoder to answer."""
    draw, device = random.Random(args.seed), torch.device(args.device)

    def loss_of() -> tuple[Tensor, str]:
        batch = reader.batch_of([talk(*asked(draw), draw) for _ in range(args.batch)])
        loss: Tensor = net(**{name: value.to(device) for name, value in batch.items()}).loss
        return loss, ""

    _fit("decoder", [one for one in net.parameters() if one.requires_grad], args.steps, args.rate, loss_of)


def _fit(
    name: str, params: list[nn.Parameter], steps: int, rate: float, loss_of: Callable[[], tuple[Tensor, str]]
) -> None:
    optimizer = torch.optim.AdamW(params, lr=rate, betas=(0.9, 0.98), weight_decay=0.02)
    warm = max(steps // 25, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    began = time.perf_counter()
    for step in range(steps):
        loss, more = loss_of()
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
        picture_of(scene, draw).save(out / "examples" / f"{i}.png")
    write_texts(out / "texts.jsonl")
    names = {f"{i}.png": scene.answer("What is in the picture?") for i, scene in enumerate(scenes)}
    (out / "examples" / "answers.json").write_text(json.dumps(names, indent=1))


def write_texts(file: Path, count: int = 4000) -> None:
    """Writes conversations without their pictures, as `draftwing train` reads them."""
    draw = random.Random("text alone")
    with file.open("w") as lines:
        for _ in range(count):
            messages = talk(*asked(draw), draw).messages
            for one in messages:
                if not isinstance(one["content"], str):
                    one["content"] = one["content"][1]["text"]
            lines.write(json.dumps({"messages": messages}) + "\n")


def check(out: Path, device: str, count: int, head: Path | None = None) -> None:
    """Prints how often the engine is right about pictures that training has not seen, each with a memory of its own.
    head: an EAGLE-3 head, which drafts chains of three."""
    from draftwing import LLM

    draw, params = random.Random("held out"), {"temperature": 0.0, "max_new_tokens": 24}
    told = [one for one in (asked(draw) for _ in range(2 * count)) if one[1][0]][:count]
    right = [talk(*one, draw) for one in told]
    shown = {
        "their pictures": right,
        "other pictures": [talk(one, [each and each.another(draw) for each in scenes], draw) for one, scenes in told],
        "no picture": [talk(one[:1], [None], draw) for one, _ in told],
    }
    wanted, texts = [one.messages[-1]["content"] for one in right], dict[str, list[str]]()
    drafters: dict[str, dict[str, Any]] = {"none": {}, "NGRAM": {}, "SUFFIX": {}}
    if head is not None:
        drafters["EAGLE3"] = {"speculative_draft_model_path": str(head), "speculative_num_steps": 3,
                              "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}  # fmt: skip
    for algorithm, more in drafters.items():
        more |= {"speculative_algorithm": algorithm, "speculative_fixed_shape": algorithm != "none"}
        for name, talks in shown.items():
            with LLM(str(out), device=device, max_total_tokens=16384, **more) as llm:
                found = llm.chat([one.messages[:-1] for one in talks], params)
            said = [one.text for one in found]
            same = sum(a == b for a, b in zip(said, texts.setdefault(name, said), strict=True))
            own = sum(text == one.messages[-1]["content"] for text, one in zip(said, talks, strict=True))
            first = sum(a == b for a, b in zip(said, wanted, strict=True))
            tokens = sum(one.meta_info["completion_tokens"] for one in found)
            steps = sum(one.meta_info["spec_verify_ct"] for one in found)
            print(
                f"{algorithm}, {name}: {own} of {count} answers are right, {first} are about their pictures; "
                f"{same} are those without drafts, {tokens / steps:.2f} tokens a step",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tower-steps", type=int, default=500)
    parser.add_argument("--tower-batch", type=int, default=256, help="pictures of a step")
    parser.add_argument("--pictures", type=int, default=2500, help="that are drawn of each size, to be coloured")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="conversations of a step")
    parser.add_argument("--hidden", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=200, help="conversations at the end")
    parser.add_argument("--measure", action="store_true", help="train nothing: only what the end shows")
    parser.add_argument("--head", type=Path, help="EAGLE-3 head that is measured, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.measure:
        check(args.out, args.device, args.check, args.head)
        return
    torch.manual_seed(args.seed)
    tokenizer = tokenizer_of()
    reader, net = Reader(tokenizer), model_of(tokenizer, args.hidden).to(args.device)
    size = sum(param.numel() for param in net.parameters())
    print(f"{size / 1e6:.2f}M parameters on {args.device}, {len(tokenizer)} tokens", flush=True)
    train_tower(net, reader, args)
    train(net, reader, args)
    save(net, tokenizer, reader, args.out)
    check(args.out, args.device, args.check, args.head)


if __name__ == "__main__":
    main()
