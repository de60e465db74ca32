"""A drafter of your own: proposes what followed the newest two tokens when they last stood together in the same text.

    python examples/custom_drafter.py
    draftwing serve --speculative-algorithm custom_drafter:PairLookup     # in the folder of this file, or on PYTHONPATH

All of `propose` is tensors on the device: nothing is read on the host, and no shape depends on values.
"""

from __future__ import annotations

import torch

from draftwing import LLM, Draft, Drafter, DraftStep


class PairLookup(Drafter):
    """Copies from the row's own prompt and answer."""

    num_steps = 6  # --speculative-num-steps overrules it

    def propose(self, step: DraftStep) -> Draft:
        table, rows, depth = step.table, step.rows, step.shape.depth
        text = table.tokens[rows, : step.max_kv_len + 1].long()  # [B, L], valid up to the newest token
        end = table.kv_len[rows].unsqueeze(1)  # [B, 1], index of the newest token
        newest, before = text.gather(1, end), text.gather(1, (end - 1).clamp(min=0))  # [B, 1]
        position = torch.arange(text.shape[1], device=rows.device)  # [L]
        pair = (text == newest) & (text.roll(1, 1) == before) & (position > 0) & (position < end)  # [B, L]
        last = (pair * position).amax(1, keepdim=True)  # [B, 1], 0 where the pair is new
        ahead = torch.arange(depth, device=rows.device)
        # Past the newest token the copy goes on with what it has copied.
        tokens = text.gather(1, last + 1 + ahead % (end - last).clamp(min=1))  # [B, depth]
        return self.chain(step, tokens, (last > 0).expand_as(tokens))


def main() -> None:
    # Text that repeats itself, of which a lookup predicts much.
    days = ("Monday", "Tuesday", "Wednesday")
    prompt = "".join(f"{day}: open from 9 am to 5 pm.\n" for day in days) + "Thursday:"
    with LLM(speculative_algorithm=PairLookup) as llm:
        answer = llm.generate(prompt, {"temperature": 0, "max_new_tokens": 64})[0]
    print(prompt + answer.text)
    print(f"acceptance length: {answer.meta_info['spec_accept_length']:.2f} tokens per step")


if __name__ == "__main__":
    main()
