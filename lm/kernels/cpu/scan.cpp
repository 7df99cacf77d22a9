// The `selective_scan` kernel: Mamba-1's scan and its gradient. lm/kernels/cpu/scan.py calls it.
//
//   h_t = keep_t exp(dt_t A) h_{t-1} + (dt_t x_t) B_t^T      y_t = h_t C_t
//
// Sizes: b sequences, l steps, d channels, n states. A vector holds neighbouring channels: all lanes then do
// the same arithmetic, B and C are broadcast, and only the sums of dB and dC cross lanes. States are
// stored as (n,d) for the same reason. The exponentials, most of the work, are computed again in every
// pass: storing them took 2.4 times as long for (b,l,d,n) = (8,256,256,16), and 0.75 times as long where
// they fit into the L2 cache.

#include <algorithm>
#include <vector>

#include "vector.h"

// Arguments, packed field by field in scan.py. Arrays have the kernel's type and are contiguous, except
// B and C, whose tokens are B_step and C_step entries apart. "or null" marks arrays that may be missing.
struct Problem {
    int64_t batch, length, channels, states;
    int64_t checkpoint_interval;  // steps
    int64_t threads, B_step, C_step;
    const void *x, *dt, *A, *B, *C;  // (b,l,d) (b,l,d) (n,d) (b,l,n) (b,l,n)
    const void *h0, *keep;           // (b,n,d) (b,l), each or null
    void *y, *final;                 // (b,l,d), (b,n,d)
    void *checkpoints;               // (b,chunks,n,d) or null: the state before each chunk
    const void *grad_y, *grad_final;      // (b,l,d), (b,n,d); this and the following: backward only
    void *dx, *ddt, *dA, *dB, *dC, *dh0;  // contiguous; the last or null
};

namespace {

// Blocks of channels, one vector wide, of one backward task. The sums of dB and dC over the channels of a
// task are added across lanes only once. The number is fixed, so that results do not depend on the number
// of threads.
constexpr int64_t TASK_BLOCKS = 4;
// State updates up to which one thread computes everything: they take a fraction of a millisecond, less
// than waking another thread on a busy machine.
constexpr int64_t MAX_SERIAL_UPDATES = 1 << 18;

inline int64_t count_chunks(const Problem &problem) {
    return (problem.length + problem.checkpoint_interval - 1) / problem.checkpoint_interval;
}

// Load n vectors from an (n,d) array that begins at channel c0; zeros if it is null.
template <class T> void load_state(Vec<T> *to, const T *from, const Problem &problem, int64_t lanes) {
    for (int64_t k = 0; k < problem.states; ++k)
        to[k] = from ? load<T>(from + k * problem.channels, lanes) : Vec<T>{};
}

template <class T> void store_state(T *to, const Vec<T> *from, const Problem &problem, int64_t lanes) {
    for (int64_t k = 0; k < problem.states; ++k) store<T>(to + k * problem.channels, from[k], lanes);
}

// Scan one block of channels of one sequence. h and A: scratch memory of n vectors.
template <class T>
void scan_block(const Problem &problem, int64_t sequence, int64_t block, Vec<T> *A, Vec<T> *h) {
    const int64_t n = problem.states, d = problem.channels, first_channel = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - first_channel);
    const int64_t index = sequence * problem.length, offset = index * d + first_channel;
    const T *x = input<T>(problem.x) + offset, *dt = input<T>(problem.dt) + offset;
    const T *B = input<T>(problem.B) + index * problem.B_step, *C = input<T>(problem.C) + index * problem.C_step;
    const T *keep = problem.keep ? input<T>(problem.keep) + index : nullptr;
    T *y = output<T>(problem.y) + offset;
    T *checkpoints = output<T>(problem.checkpoints);
    if (checkpoints) checkpoints += sequence * count_chunks(problem) * n * d + first_channel;

    load_state<T>(A, input<T>(problem.A) + first_channel, problem, lanes);
    load_state<T>(h, problem.h0 ? input<T>(problem.h0) + sequence * n * d + first_channel : nullptr, problem,
                  lanes);
    for (int64_t t = 0; t < problem.length; ++t) {
        if (checkpoints && t % problem.checkpoint_interval == 0)
            store_state<T>(checkpoints + t / problem.checkpoint_interval * n * d, h, problem, lanes);
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> u = dt_t * x_t;
        const T *B_t = B + t * problem.B_step, *C_t = C + t * problem.C_step;
        if (keep && keep[t] != T(1))
            for (int64_t k = 0; k < n; ++k) h[k] *= keep[t];
        Vec<T> sum{};
        for (int64_t k = 0; k < n; ++k) {
            h[k] = exponential<T>(dt_t * A[k]) * h[k] + u * B_t[k];
            sum += h[k] * C_t[k];
        }
        store<T>(y + t * d, sum, lanes);
    }
    store_state<T>(output<T>(problem.final) + sequence * n * d + first_channel, h, problem, lanes);
}

// Scratch memory of one backward task.
template <class T> struct Scratch {
    std::vector<Vec<T>> A, dA, g;    // (TASK_BLOCKS, n); g is the gradient of the state
    std::vector<Vec<T>> decays, h;   // (steps, n), (steps + 1, n): one chunk of one block
    std::vector<Vec<T>> dB, dC;      // (steps, n): sums over the task's blocks
    explicit Scratch(const Problem &problem)
        : A(TASK_BLOCKS * problem.states), dA(A.size()), g(A.size()),
            decays(problem.checkpoint_interval * problem.states),
          h(decays.size() + problem.states), dB(decays.size()), dC(decays.size()) {}
};

// Backpropagate through one chunk of one block: recompute the states from the checkpoint, then go back.
// slot: the block's place in its task.
template <class T>
void backward_chunk(const Problem &problem, Scratch<T> &scratch, int64_t sequence, int64_t chunk, int64_t block,
                    int64_t slot) {
    const int64_t n = problem.states, d = problem.channels, first_channel = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - first_channel);
    const int64_t interval = problem.checkpoint_interval, first = chunk * interval;
    const int64_t steps = std::min(interval, problem.length - first);
    const int64_t index = sequence * problem.length + first, offset = index * d + first_channel;
    const T *x = input<T>(problem.x) + offset, *dt = input<T>(problem.dt) + offset;
    const T *grad_y = input<T>(problem.grad_y) + offset;
    const T *B = input<T>(problem.B) + index * problem.B_step, *C = input<T>(problem.C) + index * problem.C_step;
    const T *keep = problem.keep ? input<T>(problem.keep) + index : nullptr;
    T *dx = output<T>(problem.dx) + offset, *ddt = output<T>(problem.ddt) + offset;
    const Vec<T> *A = &scratch.A[slot * n];
    Vec<T> *dA = &scratch.dA[slot * n], *g = &scratch.g[slot * n];

    const int64_t checkpoint = (sequence * count_chunks(problem) + chunk) * n * d + first_channel;
    load_state<T>(&scratch.h[0], input<T>(problem.checkpoints) + checkpoint, problem, lanes);
    for (int64_t t = 0; t < steps; ++t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), u = dt_t * load<T>(x + t * d, lanes);
        const Vec<T> *before = &scratch.h[t * n];
        Vec<T> *h = &scratch.h[(t + 1) * n], *a = &scratch.decays[t * n];
        const T keep_t = keep ? keep[t] : T(1);
        for (int64_t k = 0; k < n; ++k) {
            a[k] = exponential<T>(dt_t * A[k]) * keep_t;
            h[k] = a[k] * before[k] + u * B[t * problem.B_step + k];
        }
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> grad_y_t = load<T>(grad_y + t * d, lanes), u = dt_t * x_t;
        const Vec<T> *before = &scratch.h[t * n], *h = &scratch.h[(t + 1) * n], *a = &scratch.decays[t * n];
        Vec<T> *dB = &scratch.dB[t * n], *dC = &scratch.dC[t * n], du{}, d_dt{};
        for (int64_t k = 0; k < n; ++k) {
            const Vec<T> g_k = g[k] + grad_y_t * C[t * problem.C_step + k];
            dC[k] += h[k] * grad_y_t;
            dB[k] += g_k * u;
            du += g_k * B[t * problem.B_step + k];
            g[k] = g_k * a[k];
            const Vec<T> d_log = g[k] * before[k];
            d_dt += d_log * A[k];
            dA[k] += d_log * dt_t;
        }
        store<T>(ddt + t * d, d_dt + du * x_t, lanes);
        store<T>(dx + t * d, du * dt_t, lanes);
    }
}

template <class T> void scan(const Problem &problem) {
    const int64_t blocks = (problem.channels + LANES<T> - 1) / LANES<T>;
    const int64_t work = problem.batch * problem.length * problem.channels * problem.states;
#pragma omp parallel num_threads(problem.threads) if (work > MAX_SERIAL_UPDATES)
    {
        std::vector<Vec<T>> A(problem.states), h(problem.states);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < problem.batch * blocks; ++task)
            scan_block<T>(problem, task / blocks, task % blocks, A.data(), h.data());
    }
}

template <class T> void backward(const Problem &problem) {
    const int64_t n = problem.states, d = problem.channels, length = problem.length;
    const int64_t blocks = (d + LANES<T> - 1) / LANES<T>, interval = problem.checkpoint_interval;
    const int64_t sequence_tasks = (blocks + TASK_BLOCKS - 1) / TASK_BLOCKS;
    // Parts of the sums over sequences (dA) and over tasks (dB, dC) are stored and then added in order.
    std::vector<T> dA(problem.batch * n * d);
    std::vector<T> dB(problem.batch * sequence_tasks * length * n), dC(dB.size());
#pragma omp parallel num_threads(problem.threads) if (problem.batch * length * d * n > MAX_SERIAL_UPDATES)
    {
        Scratch<T> scratch(problem);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < problem.batch * sequence_tasks; ++task) {
            const int64_t sequence = task / sequence_tasks, first = task % sequence_tasks * TASK_BLOCKS;
            const int64_t last = std::min(blocks, first + TASK_BLOCKS);
            // Call body(block, slot, state, first_channel, lanes); state: index of the block's state in (b,n,d).
            const auto for_each_block = [&](auto &&body) {
                for (int64_t block = first; block < last; ++block) {
                    const int64_t first_channel = block * LANES<T>;
                    const int64_t lanes = std::min<int64_t>(LANES<T>, d - first_channel);
                    body(block, block - first, sequence * n * d + first_channel, first_channel, lanes);
                }
            };
            std::fill(scratch.dA.begin(), scratch.dA.end(), Vec<T>{});
            for_each_block([&](int64_t, int64_t slot, int64_t state, int64_t first_channel, int64_t lanes) {
                load_state<T>(&scratch.A[slot * n], input<T>(problem.A) + first_channel, problem, lanes);
                load_state<T>(&scratch.g[slot * n], input<T>(problem.grad_final) + state, problem, lanes);
            });
            for (int64_t chunk = count_chunks(problem) - 1; chunk >= 0; --chunk) {
                std::fill(scratch.dB.begin(), scratch.dB.end(), Vec<T>{});
                std::fill(scratch.dC.begin(), scratch.dC.end(), Vec<T>{});
                for_each_block([&](int64_t block, int64_t slot, int64_t, int64_t, int64_t) {
                    backward_chunk<T>(problem, scratch, sequence, chunk, block, slot);
                });
                const int64_t index = (task * length + chunk * interval) * n;
                for (int64_t i = 0; i < std::min(interval, length - chunk * interval) * n; ++i) {
                    dB[index + i] = sum_lanes<T>(scratch.dB[i]);
                    dC[index + i] = sum_lanes<T>(scratch.dC[i]);
                }
            }
            for_each_block([&](int64_t, int64_t slot, int64_t state, int64_t, int64_t lanes) {
                store_state<T>(&dA[state], &scratch.dA[slot * n], problem, lanes);
                if (problem.dh0) store_state<T>(output<T>(problem.dh0) + state, &scratch.g[slot * n], problem,
                                                lanes);
            });
        }
    }
    const auto add_parts = [](T *to, const T *from, int64_t parts, int64_t size) {
        std::fill(to, to + size, T(0));
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t i = 0; i < size; ++i) to[i] += from[part * size + i];
    };
    for (int64_t sequence = 0, size = length * n; sequence < problem.batch; ++sequence) {
        add_parts(output<T>(problem.dB) + sequence * size, dB.data() + sequence * sequence_tasks * size, sequence_tasks,
            size);
        add_parts(output<T>(problem.dC) + sequence * size, dC.data() + sequence * sequence_tasks * size, sequence_tasks,
            size);
    }
    add_parts(output<T>(problem.dA), dA.data(), problem.batch, n * d);
}

}  // namespace

extern "C" void scan_float(const Problem *problem) { scan<float>(*problem); }
extern "C" void scan_double(const Problem *problem) { scan<double>(*problem); }
extern "C" void scan_backward_float(const Problem *problem) { backward<float>(*problem); }
extern "C" void scan_backward_double(const Problem *problem) { backward<double>(*problem); }
