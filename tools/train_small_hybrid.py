"""A small model of Qwen3.5's kind with a prediction layer, trained on real text, so that its acceptance is real.

    python tools/train_small_hybrid.py OUT TEXT [TEXT ..] [--steps 3000] [--batch 32] [--length 512] [--vocab 8192]
    draftwing bench OUT --prompts OUT/held_out.jsonl

TEXT: files of text, gzipped or not, or folders of them. A twentieth of each file, its end, is held out: OUT has prompts
of it. With the defaults a minute or two per thousand steps on a GPU. The model completes texts of their kind; it is no
assistant. Needs transformers.

The prediction layer learns three tokens ahead, each step on the output of the one before (arXiv 2412.19437, section
2.2, with one layer for all steps, as Qwen's is run).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

AHEAD = 3  # steps of the prediction layer that are trained
HELD_OUT = 0.05  # of each file
END = "<|endoftext|>"
PREDICTION_WEIGHT = 0.3  # of its loss beside the model's: as in the paper above


class PredictionLayer(nn.Module):
    """Names and shapes are those of `mtp.*` in a checkpoint."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(size, eps=eps)
        of_attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, of_attention)])
        self.norm = qwen.Qwen3_5RMSNorm(size, eps=eps)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=config.initializer_range)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """embedded: of the next tokens, hidden: after the final norm, both [B, S, hidden] -> [B, S, hidden]"""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=rotation))


class Hybrid(nn.Module):
    """The model and its prediction layer."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.model = qwen.Qwen3_5ForCausalLM(config)
        self.mtp = PredictionLayer(config)

    def losses(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """ids [B, S] -> cross entropy, and share of greedy tokens that are right, of the model and of each step of the
        layer"""
        batch, length = ids.shape
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        losses, right = [], []
        for step in range(AHEAD + 1):
            if step:
                embedded = self.model.model.embed_tokens(ids[:, step:])
                positions = torch.arange(embedded.shape[1], device=ids.device)
                rotation = self.model.model.rotary_emb(embedded, positions.expand(3, batch, -1))
                hidden = self.mtp(embedded, hidden[:, : length - step], rotation)
            logits = self.model.lm_head(hidden[:, :-1]).flatten(0, 1).float()
            wanted = ids[:, step + 1 :].flatten()
            losses.append(cross_entropy(logits, wanted))
            right.append((logits.argmax(-1) == wanted).float().mean().detach())
        return losses, right


def texts_of(paths: Sequence[Path]) -> Iterator[str]:
    files = [one for path in paths for one in (sorted(path.rglob("*")) if path.is_dir() else [path]) if one.is_file()]
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        yield data.decode("utf-8", errors="ignore")


def tokenizer_of(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `size` tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def config_of(args: argparse.Namespace, vocab: int) -> Qwen3_5TextConfig:
    """Heads of 64, a quarter of them rotated, and of the delta nets twice as many for values as for keys."""
    heads = args.hidden // 64
    key_heads = max(heads // 2, 1)
    return Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 3, 1), head_dim=64, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_num_key_heads=key_heads, linear_num_value_heads=2 * key_heads,
        max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
        },
    )  # fmt: skip


def train(net: Hybrid, ids: Tensor, held_out: Tensor, args: argparse.Namespace, device: torch.device) -> list[float]:
    """ids, held_out [n] of all texts. Returns the shares of held-out tokens that are right: the model's, and those of
    each step of the layer."""
    chooser = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.05)
    warm = max(args.steps // 50, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.02 + 0.98 * (1 + math.cos(math.pi * step / args.steps)) / 2),
    )

    def batch_of(source: Tensor) -> Tensor:
        starts = torch.randint(0, len(source) - args.length, (args.batch,), generator=chooser)
        return torch.stack([source[start : start + args.length] for start in starts.tolist()]).to(device)

    began = time.perf_counter()
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses, right = net.losses(batch_of(ids))
        optimizer.zero_grad(set_to_none=True)
        (losses[0] + PREDICTION_WEIGHT * torch.stack(losses[1:]).mean()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 or step + 1 == args.steps:
            shown = ", ".join(f"{loss.item():.3f} ({share:.0%})" for loss, share in zip(losses, right, strict=True))
            print(
                f"step {step + 1} of {args.steps}, {time.perf_counter() - began:.0f} s, loss (right): {shown}",
                flush=True,
            )
    net.eval()
    with torch.no_grad():
        found = [torch.stack(net.losses(batch_of(held_out))[1]) for _ in range(8)]
    return torch.stack(found).mean(0).tolist()


def save(net: Hybrid, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    net.to(torch.bfloat16).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"mtp.{name}": value.contiguous().cpu() for name, value in net.mtp.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}, indent=1))


def prompts_of(tails: Sequence[str], count: int = 80, characters: int = 400) -> Iterator[str]:
    """Beginnings of held-out pieces, in turn from all files."""
    pieces = [[tail[at : at + characters] for at in range(0, len(tail) - characters, 4 * characters)] for tail in tails]
    for i in range(max(map(len, pieces), default=0)):
        for some in pieces:
            if i < len(some) and count:
                count -= 1
                yield some[i]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8, help="every fourth has attention")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    whole = list(texts_of(args.texts))
    ends = [int(len(text) * (1 - HELD_OUT)) for text in whole]
    heads, tails = (
        [text[:end] for text, end in zip(whole, ends, strict=True)],
        [text[end:] for text, end in zip(whole, ends, strict=True)],
    )
    tokenizer = tokenizer_of(heads, args.vocab)
    ids, held_out = (
        torch.tensor([one for part in parts for one in (*tokenizer(part)["input_ids"], tokenizer.eos_token_id)])
        for parts in (heads, tails)
    )
    net = Hybrid(config_of(args, len(tokenizer))).to(device)
    size = sum(param.numel() for param in net.parameters())
    print(
        f"{len(ids):,} tokens of text, {len(held_out):,} held out; {size / 1e6:.1f}M parameters on {device}", flush=True
    )
    right: list[float] = train(net, ids, held_out, args, device)
    save(net, tokenizer, args.out)
    (args.out / "held_out.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts_of(tails)))
    print(
        "held-out tokens that are right, of the model and of each step of the layer:", *(f"{one:.1%}" for one in right)
    )


if __name__ == "__main__":
    main()
