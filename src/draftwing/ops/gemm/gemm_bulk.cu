// Follows gemm.cu: bulk copies from global to shared memory, the barriers that report them, and loads of four from another
// block's shared memory (compute capability 9.0).

#ifndef ON_HOST
typedef unsigned long long Barrier;

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(Barrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(count) : "memory");
}

// New barriers become visible to bulk copies, and behind __syncthreads to all.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}

// Arrives, and says how many bytes of bulk copies have to come as well.
__device__ __forceinline__ void expect_bytes(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(bytes) : "memory");
}

// From global to shared memory. bytes: a multiple of 16, which the barrier expects.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_at(to)),
                 "l"(from), "r"(bytes), "r"(shared_at(barrier))
                 : "memory");
}

// Arrives when what this thread copied by `copy_async` is there.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_at(barrier)) : "memory");
}

// Until the barrier has opened an odd (parity 0) or even number of times.
__device__ __forceinline__ void wait_barrier(Barrier* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred open;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n@open bra done;\nbra again;\ndone:\n}" ::"r"(
            shared_at(barrier)),
        "r"(parity)
        : "memory");
}

// From the shared memory of a block of the cluster, at the address that p has in this one.
__device__ __forceinline__ float4 load_four_from_rank(const float* p, int rank) {
    float4 v;
    asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(shared_at(p)), "r"(rank)
                 : "memory");
    return v;
}
#endif

// The barriers of a ring: `filled` and `emptied` threads arrive at those of a stage that is full, or empty again.
__device__ __forceinline__ void init_ring(Barrier* full, Barrier* empty, int stages, int filled, int emptied) {
    for (int s = 0; s < stages; ++s) init_barrier(full + s, filled), init_barrier(empty + s, emptied);
}
