"""Which drafter an MTP head gets. (`test_model_drafter_reference.py` checks what it drafts, `tests/engine/` that it
changes no token and reads nothing on the host.)"""

import pytest
import torch
from reference import checkpoints

from draftwing.config.trees import TreeShape
from draftwing.models.heads.loader import load_mtp_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.spec.build import make_model_drafter
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.mtp_drafter import MTPDrafter


@pytest.mark.parametrize("layers, kind", [(1, ModelDrafter), (2, MTPDrafter)])
def test_one_layer_is_chained_and_several_run_one_per_step(layers, kind, tmp_path):
    target = load_model(checkpoints.mimo(5, layers).write(tmp_path), torch.float32, "cpu")
    head = load_mtp_head(tmp_path, target, torch.float32, "cpu")
    drafter = make_model_drafter(head, 2, 3, torch.float32, make_ops(torch.device("cpu")))
    assert type(drafter) is kind and drafter.lookahead == layers and len(drafter.kv_layers) == layers
    assert drafter.tail == 0 and drafter.span(TreeShape(4, 3, 8)) == 9
