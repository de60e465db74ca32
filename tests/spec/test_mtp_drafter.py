"""The drafter for several MTP layers runs on tensors without data. (`test_model_drafter_reference.py` checks what it
drafts, `tests/engine/test_heads.py` that it changes no token.)"""

import pytest
import torch
from reference import checkpoints
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.core import TreeShape
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.kv.pool import KVPool
from draftwing.models.heads.loader import load_mtp_head
from draftwing.models.loader import load_model
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.torch.attention import TorchAttention
from draftwing.ops.torch.ops import TorchOps
from draftwing.spec.drafter import DraftStep, SeenTokens
from draftwing.spec.model_drafter import ModelDrafter
from draftwing.spec.mtp_drafter import MTPDrafter, make_model_drafter


def load_head(folder, layers):
    target = load_model(checkpoints.mimo(5, layers).write(folder), torch.float32, "cpu")
    return target, load_mtp_head(folder, target, torch.float32, "cpu")


def without_data(module, mode):
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False)]:
            setattr(part, name, torch.nn.Parameter(mode.from_tensor(tensor.detach()), requires_grad=False))


@pytest.mark.slow
@pytest.mark.parametrize("noisy_rows", [0, 1])
@pytest.mark.parametrize("shape", [TreeShape(5, 1, 6), TreeShape(4, 3, 9), TreeShape(1, 2, 3)], ids=str)
def test_a_step_needs_no_data(shape, noisy_rows, tmp_path):
    target, head = load_head(tmp_path, 3)
    mode, hidden = FakeTensorMode(), target.config.hidden_size
    without_data(target, mode)
    without_data(head, mode)
    with mode, torch.no_grad():
        drafter = make_model_drafter(head, 4, shape.topk, torch.float32, TorchOps(torch.device("cpu")))
        slots = RowTable(3, 64, pick_device("cpu"))
        drafter.attach(TorchAttention(KVPool(drafter.kv_layers, 100, torch.float32, torch.device("cpu"))), 0, 64)
        rows, noisy = torch.tensor([0, 2]), torch.arange(noisy_rows)
        ids = torch.zeros(6, dtype=torch.int64)
        spans = (ChunkSpan(0, 0, 4, 1), ChunkSpan(1, 1, 0, 5, False))
        prompt = Batch(rows, ids, ids, ids, slots.page_table, slots.kv_len[rows], chunks=spans, bound=5)
        drafter.extend(SeenTokens(slots, prompt, torch.empty(6, hidden), ids, None, noisy))
        draft = drafter.propose(DraftStep(slots, rows, shape, 5, noisy))
        assert draft.tokens.shape == draft.parent.shape == (2, shape.nodes)
        width = shape.max_commit
        ids, step = torch.zeros(2 * width, dtype=torch.int64), torch.arange(width).expand(2, width)
        path = Batch(
            rows, ids, ids, ids, slots.page_table, slots.kv_len[rows], bound=5 + width + 1,
            path=step.unsqueeze(1).expand(-1, width, -1), path_len=step + 1, window=width,
        )  # fmt: skip
        drafter.extend(SeenTokens(slots, path, torch.empty(2 * width, hidden), ids, torch.ones_like(rows), noisy))


@pytest.mark.parametrize("layers, kind", [(1, ModelDrafter), (2, MTPDrafter)])
def test_one_layer_is_chained_and_several_run_one_per_step(layers, kind, tmp_path):
    _, head = load_head(tmp_path, layers)
    drafter = make_model_drafter(head, 2, 3, torch.float32, make_ops(torch.device("cpu")))
    assert type(drafter) is kind and drafter.lookahead == layers and len(drafter.kv_layers) == layers
    assert drafter.tail == 0 and drafter.span(TreeShape(4, 3, 8)) == 9
