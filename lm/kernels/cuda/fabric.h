// Primitives of the persistent kernels: threads, barriers, warps, tensor cores, words between blocks.
//
// On a GPU they are instructions. For the tests, tests/lm/kernels/emulation/fabric_cpu.h runs each
// thread as a fibre on the CPU, in an order drawn from a seed.

#pragma once

#include <cmath>
#include <cstdint>

// 16 bytes that one block sends to another: three values and the number of the step they belong to.
// A word is read and written in one access of 128 bits, so that values and step arrive
// together. Neither fences nor flags are needed: the reader polls until the step is the expected one.
struct alignas(16) Word {
    uint32_t value[3], step;
};

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

DEVICE int thread_in_block() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE void sync_block() { __syncthreads(); }
// Barrier of a crew, a part of a block (team.h). Barrier 0 of the hardware is that of sync_block.
template <int THREADS> DEVICE void sync_crew(int crew) {
    asm volatile("barrier.sync %0, %1;" ::"r"(crew + 1), "n"(THREADS) : "memory");
}
// Return a value that is equal in all lanes; the compiler then knows that it is.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE char *shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}
// Return the value of lane (own number XOR mask).
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
DEVICE float exp2_of(float value) { return exp2f(value); }

// Start to move a line into the cache.
DEVICE void prefetch(const void *from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// A volatile load: ptxas may split ld.relaxed into loads of the parts that are used, and a word could
// then change between them. tests/lm/kernels/test_cuda_cell.py looks for such loads.
DEVICE Word load_word(const Word *from) {
    union {
        Word word;
        uint64_t half[2];
    } loaded;
    asm volatile("{ .reg .b128 t; ld.volatile.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
                 : "=l"(loaded.half[0]), "=l"(loaded.half[1])
                 : "l"(from)
                 : "memory");
    return loaded.word;
}
DEVICE void store_word(Word *to, const Word &word) {
    union {
        Word word;
        uint64_t half[2];
    } stored = {word};
    asm volatile("{ .reg .b128 t; mov.b128 t, {%0, %1}; st.relaxed.gpu.global.b128 [%2], t; }" ::"l"(
                     stored.half[0]),
                 "l"(stored.half[1]), "l"(to)
                 : "memory");
}
// Compute sum (16,8) += left (16,16) · right (16,8) in a warp: bf16 factors, fp32 sums. The
// fragments are those of mma.m16n8k16.
DEVICE void multiply(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
// Limit of a wait for a word: 2³² cycles, about two seconds. A longer wait means that a block is
// missing, or a bug.
struct Timeout {
    long long start = clock64();
    int attempts = 0;
    // Set the alarm if this wait is too long, and return true if any block has set it, which ends the
    // waits of all blocks. The alarm is in pinned memory of the host, which is slow: only every 1,024th
    // call looks at it.
    DEVICE bool check(volatile uint8_t *alarm) {
        if (++attempts & 1023) return false;
        if (clock64() - start > (1ll << 32)) *alarm = 1;
        return *alarm != 0;
    }
};

#else
#include "fabric_cpu.h"
#endif

// Round to bf16, to nearest even. NaN stays NaN.
DEVICE uint16_t to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE float from_bf16(uint16_t value) { return bits_to_float(uint32_t(value) << 16); }
DEVICE float round_to_bf16(float value) { return from_bf16(to_bf16(value)); }
