// fabric.h on a CPU, for the tests: each thread of a launch is a fibre, and one thread runs them all.
//
// In a round, every fibre that can continue runs until it waits. A seed determines the order of the
// fibres, and when a sent word arrives: late, and in any order. Shared memory starts as NaN. If no fibre can continue, the launch fails with an error that says
// where one of them waits.

#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define DEVICE inline

namespace fabric {

constexpr uint64_t MAX_PAUSE = 40;  // rounds

struct Barrier {
    int members = 0, arrived = 0;
    long generation = 0;  // how often all members have arrived
};
struct Warp {
    Barrier barrier{32};
    double values[32];                     // of the lanes, in shuffle_xor
    uint32_t left[32][4], right[32][2];    // fragments of the lanes, in multiply
    uint64_t pause = 0;  // rounds in which the warp does not run
};
struct Block {
    std::unique_ptr<char[]> memory;
    std::vector<Warp> warps;
    std::vector<Barrier> crew_barriers;
    Barrier barrier;
};
struct Fibre {
    void *stack_pointer = nullptr;
    std::unique_ptr<char[]> stack;
    int block = 0, thread = 0;
    bool has_ended = false;
    const Barrier *barrier = nullptr;  // if not null, it waits until this barrier leaves `generation`
    long generation = 0;
    long polled_at = -1;  // if not −1, it waits for a word: `events` when it last looked for the word
};
struct Launch {
    std::vector<Fibre> fibres;
    std::vector<Block> blocks;
    std::vector<std::pair<Word *, Word>> words_in_flight;
    std::function<void()> kernel;
    Fibre *current = nullptr;
    void *scheduler_stack_pointer = nullptr;
    long events = 0;  // words sent or delivered, barriers left, fibres ended
    uint64_t random_state = 1;
    int idle_rounds = 0;  // in which no thread could continue

    uint64_t draw_below(uint64_t limit) {
        random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
        return (random_state >> 33) % limit;
    }
    void deliver_word() {
        const size_t i = draw_below(words_in_flight.size());
        *words_in_flight[i].first = words_in_flight[i].second;
        words_in_flight[i] = words_in_flight.back();
        words_in_flight.pop_back();
        ++events;
    }
};
inline Launch *launch = nullptr;
inline bool waits_time_out = false;

// Save the callee-saved registers of x86-64 (System V) on the stack and continue on another stack.
extern "C" void fabric_switch(void **saved_stack_pointer, void *stack_pointer);
#if defined(__x86_64__)
asm(".text\n.weak fabric_switch\nfabric_switch:\n push %rbp\n push %rbx\n push %r12\n push %r13\n"
    " push %r14\n push %r15\n mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
#else
#error "the emulation switches stacks on x86-64 only"
#endif

inline void yield_to_scheduler() {
    fabric_switch(&launch->current->stack_pointer, launch->scheduler_stack_pointer);
}
inline void start_fibre() {
    launch->kernel();
    launch->current->has_ended = true;
    ++launch->events;
    for (;;) yield_to_scheduler();
}
inline void wait_at(Barrier &barrier) {
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        ++barrier.generation;
        ++launch->events;
        return;
    }
    launch->current->barrier = &barrier;
    launch->current->generation = barrier.generation;
    yield_to_scheduler();
}
inline Warp &current_warp() {
    const Fibre *fibre = launch->current;
    return launch->blocks[fibre->block].warps[fibre->thread / 32];
}
inline void prepare_stack(Fibre &fibre) {
    constexpr size_t STACK_BYTES = 64 << 10;
    fibre.stack.reset(new char[STACK_BYTES]);
    void **top = reinterpret_cast<void **>(
        reinterpret_cast<uintptr_t>(fibre.stack.get() + STACK_BYTES) / 16 * 16);
    *--top = nullptr;  // the return address of start_fibre, aligned as after a call
    *--top = reinterpret_cast<void *>(&start_fibre);
    for (int i = 0; i < 6; ++i) *--top = nullptr;  // the registers
    fibre.stack_pointer = top;
}
inline std::string describe_deadlock(const Launch &all) {
    const Fibre *fibre = all.fibres.data();
    while (fibre->has_ended) ++fibre;
    return "no thread can continue: thread " + std::to_string(fibre->thread) + " of block " +
           std::to_string(fibre->block) + (fibre->barrier ? " waits at a barrier" : " waits for a word");
}

// Run a kernel; an error if no fibre can continue.
inline void run(int blocks, int crews, int crew_threads, size_t shared_bytes, uint64_t seed,
                std::function<void()> kernel) {
    Launch all;  // the state of all blocks
    launch = &all;
    all.kernel = std::move(kernel);
    all.random_state = seed * 2 + 1;
    all.blocks.resize(blocks);
    const int threads = crews * crew_threads;
    all.fibres.resize(size_t(blocks) * threads);
    for (int b = 0; b < blocks; ++b) {
        Block &block = all.blocks[b];
        block.memory.reset(new char[shared_bytes]);
        std::memset(block.memory.get(), 0xff, shared_bytes);
        block.warps.resize(threads / 32);
        block.crew_barriers.resize(crews);
        for (Barrier &barrier : block.crew_barriers) barrier.members = crew_threads;
        block.barrier.members = threads;
        for (int t = 0; t < threads; ++t) {
            Fibre &fibre = all.fibres[size_t(b) * threads + t];
            fibre.block = b, fibre.thread = t;
            prepare_stack(fibre);
        }
    }
    size_t running = all.fibres.size();
    while (running) {
        bool has_moved = false, has_paused = false;
        const size_t first = all.draw_below(all.fibres.size());
        // Some warps pause, so that others overtake them.
        for (Block &block : all.blocks)
            for (Warp &warp : block.warps)
                if (warp.pause) --warp.pause;
                else if (all.draw_below(8) == 0) warp.pause = all.draw_below(MAX_PAUSE);
        for (size_t i = 0; i < all.fibres.size(); ++i) {
            Fibre &fibre = all.fibres[(first + i) % all.fibres.size()];
            if (all.blocks[fibre.block].warps[fibre.thread / 32].pause) {
                has_paused = true;
                continue;
            }
            if (fibre.has_ended || (fibre.barrier && fibre.barrier->generation == fibre.generation)) continue;
            if (fibre.polled_at == all.events) continue;  // its word cannot have arrived
            fibre.barrier = nullptr;
            fibre.polled_at = -1;
            all.current = &fibre;
            fabric_switch(&all.scheduler_stack_pointer, fibre.stack_pointer);
            has_moved = true;
            running -= fibre.has_ended;
            if (!all.words_in_flight.empty() && all.draw_below(4) == 0) all.deliver_word();
        }
        if (has_moved || has_paused) continue;
        if (waits_time_out && all.words_in_flight.empty() && running && ++all.idle_rounds < 1000) {
            ++all.events;  // let all waiting threads look again
            continue;
        }
        if (all.words_in_flight.empty() && running) {
            launch = nullptr;
            throw std::runtime_error(describe_deadlock(all));
        }
        while (!all.words_in_flight.empty()) all.deliver_word();
    }
    launch = nullptr;
}

}  // namespace fabric

DEVICE int thread_in_block() { return fabric::launch->current->thread; }
DEVICE int block_index() { return fabric::launch->current->block; }
DEVICE void sync_block() { fabric::wait_at(fabric::launch->blocks[block_index()].barrier); }
template <int THREADS> DEVICE void sync_crew(int crew) {
    fabric::wait_at(fabric::launch->blocks[block_index()].crew_barriers[crew]);
}
DEVICE int uniform(int value) { return value; }
DEVICE void sync_warp() { fabric::wait_at(fabric::current_warp().barrier); }
DEVICE char *shared_memory() { return fabric::launch->blocks[block_index()].memory.get(); }
template <class T> DEVICE T shuffle_xor(T value, int mask) {
    fabric::Warp &warp = fabric::current_warp();
    const int lane = thread_in_block() % 32;
    warp.values[lane] = double(value);
    fabric::wait_at(warp.barrier);
    const T other = T(warp.values[lane ^ mask]);
    fabric::wait_at(warp.barrier);
    return other;
}
DEVICE float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
DEVICE uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float exp2_of(float value) { return std::exp2(value); }
DEVICE void prefetch(const void *) {}
DEVICE Word load_word(const Word *from) { return *from; }
DEVICE void store_word(Word *to, const Word &word) {
    fabric::launch->words_in_flight.emplace_back(to, word);
    ++fabric::launch->events;
}
DEVICE void multiply(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
    fabric::Warp &warp = fabric::current_warp();
    const int lane = thread_in_block() % 32;
    std::memcpy(warp.left[lane], left, sizeof left);
    std::memcpy(warp.right[lane], right, sizeof right);
    fabric::wait_at(warp.barrier);
    const auto unpack = [](uint32_t pair, int k) {
        return bits_to_float(k % 2 ? pair & 0xffff0000u : pair << 16);
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t left_pair = warp.left[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const uint32_t right_pair = warp.right[column * 4 + k % 8 / 2][k / 8];
            sum[i] += unpack(left_pair, k) * unpack(right_pair, k);
        }
    }
    fabric::wait_at(warp.barrier);
}
// By default no wait times out: the scheduler finds deadlocks.
struct Timeout {
    bool check(volatile uint8_t *alarm) {
        fabric::launch->current->polled_at = fabric::launch->events;
        fabric::yield_to_scheduler();
        if (fabric::waits_time_out && fabric::launch->idle_rounds) *alarm = 1;
        return *alarm != 0;
    }
};
