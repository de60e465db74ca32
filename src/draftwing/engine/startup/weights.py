"""A model's weights, loaded and packed, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from draftwing.config.options import Options
from draftwing.engine.devices.base import Device
from draftwing.engine.precision import Precision
from draftwing.log import progress_bar
from draftwing.models.decoder import DecoderModel
from draftwing.models.loader import load_model
from draftwing.parallel.ranks import ALONE, Ranks


def load_with_progress(
    path: Path, precision: Precision, device: Device, options: Options, ranks: Ranks = ALONE, target: bool = True
) -> DecoderModel:
    """Returns the model, packed. target: whether it is the one that options are of."""
    with progress_bar(unit="B", unit_scale=True, desc="loading weights", disable=ranks.rank > 0) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # before anything is logged

        most = device.memory_limit() * (ranks.size if device.has_own_memory else 1)
        model = load_model(
            path, precision.dtype, device.device, progress, options.dummy, precision.weights, most, ranks
        )
    model.pack(device.ops, options.deterministic and target)
    return model
