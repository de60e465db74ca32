// Follows gemm.cu: the GEMM of 16 to 128 rows by instructions of a warp group (wgmma, compute capability 9.0 alone).
//
// Each of 4 warps has 16 features in registers, as in mma.sync, and all read x from shared memory, in matrices of 8 rows
// and 8 columns, 128 bytes each. The sums of an instruction have the bits of those of mma.sync for the same 16 columns,
// so x has here the order of columns that a lane's 16 bytes of weights ask for: word i of unit t of a half chunk is word t
// of row g of matrix i.

#ifndef ON_HOST
template <int TOKEN_TILES>
__device__ __forceinline__ unsigned long long descriptor(const u16* matrices) {
    const unsigned long long at = (u32)__cvta_generic_to_shared(matrices);
    // Bytes / 16 of the address, from columns to the next 8, and from rows to the next 8.
    return at >> 4 & 0x3fff | (unsigned long long)(TOKEN_TILES * 8) << 16 | 8ull << 32;
}

// d += a b^T for 16 columns, of which matrices b and b + TOKEN_TILES * 64 are the halves. Is done when waited for. cuda.py
// has one for each number of tiles.
template <int TOKEN_TILES>
__device__ __forceinline__ void wide_mma(float (&d)[TOKEN_TILES][4], u32 a0, u32 a1, u32 a2, u32 a3, const u16* b);
#endif

// As `gemm`, with the same bits, for more rows: WARPS_F * ROW_TILES * 16 features a block, for each of WARPS_K parts of K,
// which are shares or all of K as in `shared_gemm`. AHEAD chunks of weights in flight, in rings in shared memory that each
// lane has for its own, and as many of x, which queues behind weights. From there x goes to one of two panels of PANEL
// chunks, the one that is not read.
template <class WEIGHTS, int TOKEN_TILES, int WARPS_F, int WARPS_K, int ROW_TILES, int AHEAD, int PANEL, int CLUSTER,
          int KIND>
__device__ __forceinline__ void wide_gemm(OPERANDS) {
    constexpr int TOKENS = TOKEN_TILES * 8, ROWS = WARPS_F * ROW_TILES * 16, PITCH = pitch_of(ROWS);
    constexpr int WARPS = WARPS_F * WARPS_K, THREADS = WARPS * 32;
    constexpr bool ONE_PART = WARPS_K * CLUSTER == 1;
    static_assert(ONE_PART || WARPS_K * CLUSTER == SHARES, "a warp sums one share, or all");
    static_assert(WARPS_F % 4 == 0, "four warps have their instructions together");
    constexpr int PART = TOKENS * CHUNK, STAGE = WARPS_K * PART;  // of x, u16
    constexpr int UNITS = WEIGHTS::UNITS * 256, WORDS = WEIGHTS::WORDS * 32;  // of a warp, in u16 and u32
    extern __shared__ float sums[];  // first [2][PANEL][STAGE] of u16 and rings, then [WARPS_K][TOKENS][PITCH]
    u16* const stages = (u16*)sums;
    launch_dependents();
    const int lane = threadIdx.x & 31, warp = held(threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    constexpr int BLOCKS = WARPS_K * TOKEN_TILES * 2, COPIES = (BLOCKS + WARPS - 1) / WARPS;
    u16* const x_rings = stages + 2 * PANEL * STAGE;
    u16* const rings = x_rings + WARPS * AHEAD * COPIES * 256;
    u32* const ring_words = (u32*)(rings + WARPS * AHEAD * ROW_TILES * UNITS);
    // Of this lane: where the next chunks of x and of weights are, and go to behind them.
    const int first_x = held(warp * (AHEAD * COPIES * 256) + lane * 8);
    const int first_unit = held(warp * (AHEAD * ROW_TILES * UNITS) + lane * 8);
    const int first_word = held(warp * (AHEAD * ROW_TILES * WORDS) + lane);
    int x_slot = 0, x_unit = first_x, slot = 0, unit = first_unit, word = first_word;
    const int part = WARPS_K > 1 ? warp / WARPS_F : 0, warp_row = warp % WARPS_F * (ROW_TILES * 16);
    const int row0 = blockIdx.x / CLUSTER * (KIND == SILU_MUL ? ROWS / 2 : ROWS), token0 = blockIdx.y * TOKENS;
    const int chunks = K / CHUNK, first = blockIdx.x % CLUSTER * WARPS_K;
    const int rounds = ONE_PART ? chunks : (chunks - first + SHARES - 1) / SHARES;
    auto after = [&](int c) {  // as in `shared_gemm`
        if (!ONE_PART || c + SHARES < chunks) return c + SHARES;
        return c < chunks && c % SHARES + 1 < SHARES ? c % SHARES + 1 : chunks;
    };

    typename WEIGHTS::template Rows<KIND> rows[ROW_TILES];
    EACH(r, ROW_TILES) rows[r].find(weights, row0, warp_row + r * 16, 0, N, K);
    int weights_ahead = first, asked = 0;
    auto copy_weights = [&] {
        if (asked++ < rounds) {
            const int chunk = min(weights_ahead + part, chunks - 1);  // x is zeros where a part has no chunk left
            EACH(r, ROW_TILES) rows[r].copy(rings + unit + r * UNITS, ring_words + word + r * WORDS, chunk);
        }
        weights_ahead = after(weights_ahead);
        const bool more = ++slot < AHEAD;
        slot = more ? slot : 0;
        unit = more ? unit + ROW_TILES * UNITS : first_unit;
        word = more ? word + ROW_TILES * WORDS : first_word;
    };
    EACH(s, AHEAD) {
        copy_weights();
        end_copies();
    }

    wait_for_earlier_kernels();
    const u16* from[COPIES];
    bool live[COPIES];
    EACH(q, COPIES) {  // this lane's unit of half u % 2 of a chunk, of 8 rows, of one part
        const int u = warp + q * WARPS, row = token0 + u / 2 % TOKEN_TILES * 8 + g;
        live[q] = row < M && u < BLOCKS;
        from[q] = x + (size_t)row * K + u / 2 / TOKEN_TILES * CHUNK + u % 2 * 32 + t * 8;
    }
    int x_ahead = first;
    auto copy_x = [&] {
        EACH(q, COPIES) {
            const bool there = live[q] && x_ahead + (warp + q * WARPS) / 2 / TOKEN_TILES < chunks;
            copy_async(x_rings + x_unit + q * 256, there ? from[q] + x_ahead * CHUNK : x, there);
        }
        x_ahead = after(x_ahead);
        const bool more = ++x_slot < AHEAD;
        x_slot = more ? x_slot : 0;
        x_unit = more ? x_unit + COPIES * 256 : first_x;
    };
    const int word_of_x = held(lane);
    auto place = [&](u16* stage) {
        EACH(q, COPIES) {
            const int u = warp + q * WARPS, m = u / 2 % TOKEN_TILES, matrix = u / 2 / TOKEN_TILES * 8 + u % 2 * 4;
            u32* const to = (u32*)stage + (matrix * TOKEN_TILES + m) * 32 + word_of_x;
            if (BLOCKS % WARPS == 0 || u < BLOCKS) place_x<TOKEN_TILES * 32>(to, load_shared(x_rings + x_unit + q * 256));
        }
    };
    EACH(s, AHEAD) {
        copy_x();
        end_copies();
    }
    EACH(p, PANEL) {
        wait_for_copies<AHEAD - 1>();
        place(stages + p * STAGE);
        copy_x();
        end_copies();
    }

    float d[ROW_TILES][TOKEN_TILES][4], sum[ROW_TILES][TOKEN_TILES][4];
    clear_sums(d, sum);

    u32 top[2][ROW_TILES][4], bottom[2][ROW_TILES][4];
    int c = first;
    u16 *read = stages, *written = stages + PANEL * STAGE;
    for (int i = 0; i < rounds; i += PANEL) {
        show_writes();
        wait_for_products<0>();
        __syncthreads();  // the panel is there for all, and nobody reads the one that is overwritten now
        EACH(p, PANEL) {
            if (i + p >= rounds) break;
            wait_for_copies<AHEAD - 1>();
            typename WEIGHTS::Part a[ROW_TILES];
            EACH(r, ROW_TILES) rows[r].take(a[r], rings + unit + r * UNITS, ring_words + word + r * WORDS);
            const u16* const matrices = read + p * STAGE + part * PART;
            EACH(j, 2) {
                wait_for_products<1>();  // those that read the registers written next have ended
                EACH(r, ROW_TILES) a[r].expand(j, top[j][r], bottom[j][r]);
                begin_products();
                EACH(r, ROW_TILES) EACH(h, 2)
                    wide_mma<TOKEN_TILES>(d[r], top[j][r][2 * h], bottom[j][r][2 * h], top[j][r][2 * h + 1],
                                          bottom[j][r][2 * h + 1], matrices + (j * 4 + h * 2) * (TOKEN_TILES * 64));
                end_products();
            }
            copy_weights();
            place(written + p * STAGE);
            copy_x();
            end_copies();
            if (ONE_PART && c + SHARES >= chunks) {  // a share ends here
                wait_for_products<0>();
                add_share(sum, d);
            }
            c = after(c);
        }
        u16* const now = read;
        read = written, written = now;
    }

    wait_for_products<0>();
    wait_for_copies<0>();
    __syncthreads();
    finish<WEIGHTS, WARPS_K, CLUSTER, ROWS, TOKENS, THREADS, KIND>(
        ONE_PART ? sum : d, sums, part * TOKENS * PITCH + warp_row, bias, extra, y, row0, token0, M, N);
}
