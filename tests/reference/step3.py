"""Step-3.5-Flash of transformers' classes for the text of Step-3.7-Flash, which has no class of that alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextConfig, Step3p7TextModel

_NAMES = {
    ".mlp.gate.weight": ".moe.gate.weight", ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight", ".mlp.shared_experts.": ".share_expert.",
}  # fmt: skip


class Step3p5ForCausalLM(Step3p7PreTrainedModel):
    config: Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        made = self.model(input_ids, **more)
        return CausalLMOutput(logits=self.lm_head(made.last_hidden_state), hidden_states=made.hidden_states)

    def save_pretrained(self, folder: Path | str, **_: Any) -> None:
        """Writes names as published checkpoints have them."""
        self.config.architectures = [type(self).__name__]
        self.config.save_pretrained(folder)
        found = dict[str, Tensor]()
        for name, value in self.state_dict().items():
            if name.endswith(".mlp.experts.gate_up_proj"):
                for part, half in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                    found[name.replace("mlp.experts.gate_up_proj", f"moe.{part}_proj.weight")] = half.contiguous()
                continue
            for theirs, own in _NAMES.items():
                name = name.replace(theirs, own)
            found[name] = value.contiguous()
        save_file(found, Path(folder) / "model.safetensors", {"format": "pt"})
