"""What the kernels of `attention_hopper` and `attention_groups` share."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper


@gluon.jit
def scores(q_smem, k_smem, ROWS: gl.constexpr, UNIT: gl.constexpr, S: gl.constexpr):
    """Begins the product [ROWS, UNIT]."""
    zeros = gl.zeros([ROWS, UNIT], gl.float32, S)
    return hopper.warpgroup_mma(q_smem, k_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def weights(s, scale, top, den):
    """s: scores [ROWS, UNIT], -inf where a key is not the row's -> weights as a factor of values, what is summed so far
    fades by, the new maximum and denominator [ROWS]"""
    new = gl.maximum(top, gl.max(s, 1) * scale)
    fade = gl.exp2(top - new)
    weight = gl.exp2(s * scale - gl.expand_dims(new, 1))
    den = den * fade + gl.sum(weight, 1)
    return weight, fade, new, den


@gluon.jit
def of_piece(parts, stats, place, ROWS: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr):
    """Pointers to a piece's maxima and denominators [ROWS], and its sums [ROWS, DIM]."""
    of_row = stats + place * (2 * ROWS) + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)), gl.arange(0, DIM, gl.SliceLayout(0, ACC))
    return (
        of_row,
        of_row + ROWS,
        parts + place * (ROWS * DIM) + gl.expand_dims(row * DIM, 1) + gl.expand_dims(column, 0),
    )


@gluon.jit
def merged(
    place, pieces, parts, stats,
    STEP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Denominators and sums of all pieces of a tile, of which the first is at `place`, in their order."""
    at_top, at_den, at_acc = of_piece(parts, stats, place, ROWS, DIM, S, ACC)
    top, den = gl.load(at_top, cache_modifier=".cg"), gl.load(at_den, cache_modifier=".cg")
    acc = gl.load(at_acc, cache_modifier=".cg")
    for piece in range(1, pieces):
        at_top, at_den, at_acc = of_piece(parts, stats, place + piece * STEP, ROWS, DIM, S, ACC)
        its_top = gl.load(at_top, cache_modifier=".cg")
        new = gl.maximum(top, its_top)
        fade, its_fade = gl.exp2(top - new), gl.exp2(its_top - new)
        top, den = new, den * fade + gl.load(at_den, cache_modifier=".cg") * its_fade
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, ACC)), 1)
        its = gl.load(at_acc, cache_modifier=".cg")
        acc = acc + its * gl.expand_dims(gl.convert_layout(its_fade, gl.SliceLayout(1, ACC)), 1)
    return den, acc
