// The `selective_scan` kernel: Mamba-1's scan and its gradient. lm/kernels/cpu/scan.py calls it.
//
//   h_t = keep_t exp(dt_t A) h_{t-1} + (dt_t x_t) B_t^T      y_t = h_t C_t
//
// Sizes: b rows, l steps, d channels, n states. A vector holds neighbouring channels: all lanes then do
// the same arithmetic, B and C are broadcast, and only the sums of dB and dC cross lanes. States are
// stored as (n,d) for the same reason. The exponentials, most of the work, are computed again in every
// pass: storing them for a whole solve took 2.4 times as long at (8, 256, 256, 16), and 0.75 times as
// long if they fit the L2 cache.

#include <algorithm>
#include <vector>

#include "vector.h"

// Arguments, packed field by field in scan.py. Arrays have the kernel's type and are contiguous, except
// B and C, whose tokens are B_step and C_step entries apart. "or null" marks arrays that may be missing.
struct Problem {
    int64_t rows, length, channels, states;
    int64_t every;  // steps between checkpoints
    int64_t threads, B_step, C_step;
    const void *x, *dt, *A, *B, *C;  // (b,l,d) (b,l,d) (n,d) (b,l,n) (b,l,n)
    const void *h0, *keep;           // (b,n,d) (b,l), each or null
    void *y, *final;                 // (b,l,d), (b,n,d)
    void *checkpoints;               // (b, ⌈l/every⌉, n, d) or null: the state before each chunk
    const void *grad_y, *grad_final;      // (b,l,d), (b,n,d); this and the following: backward only
    void *dx, *ddt, *dA, *dB, *dC, *dh0;  // contiguous; the last or null
};

namespace {

// Channel blocks of one backward task. The sums of dB and dC over its channels are added across lanes
// only once. The number is fixed, so that results do not depend on the number of threads.
constexpr int64_t GROUP = 4;
// Number of state updates up to which one thread does all: they take a fraction of a millisecond, less
// than waking another thread on a busy machine.
constexpr int64_t SMALL = 1 << 18;

// Load n vectors from an (n,d) array that begins at channel c0; zeros if it is null.
template <class T> void load_state(Vec<T> *to, const T *from, const Problem &p, int64_t lanes) {
    for (int64_t k = 0; k < p.states; ++k)
        to[k] = from ? load<T>(from + k * p.channels, lanes) : Vec<T>{};
}

template <class T> void store_state(T *to, const Vec<T> *from, const Problem &p, int64_t lanes) {
    for (int64_t k = 0; k < p.states; ++k) store<T>(to + k * p.channels, from[k], lanes);
}

// Scan one block of channels of one row. h and A: scratch memory of n vectors.
template <class T>
void scan_block(const Problem &p, int64_t row, int64_t block, Vec<T> *A, Vec<T> *h) {
    const int64_t n = p.states, d = p.channels, c0 = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
    const int64_t index = row * p.length;
    const T *x = in<T>(p.x) + index * d + c0, *dt = in<T>(p.dt) + index * d + c0;
    const T *B = in<T>(p.B) + index * p.B_step, *C = in<T>(p.C) + index * p.C_step;
    const T *keep = p.keep ? in<T>(p.keep) + index : nullptr;
    T *y = out<T>(p.y) + index * d + c0;
    T *checkpoints = out<T>(p.checkpoints);
    if (checkpoints) checkpoints += row * ((p.length + p.every - 1) / p.every) * n * d + c0;

    load_state<T>(A, in<T>(p.A) + c0, p, lanes);
    load_state<T>(h, p.h0 ? in<T>(p.h0) + row * n * d + c0 : nullptr, p, lanes);
    for (int64_t t = 0; t < p.length; ++t) {
        if (checkpoints && t % p.every == 0)
            store_state<T>(checkpoints + t / p.every * n * d, h, p, lanes);
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> u = dt_t * x_t;
        const T *B_t = B + t * p.B_step, *C_t = C + t * p.C_step;
        if (keep && keep[t] != T(1))
            for (int64_t k = 0; k < n; ++k) h[k] *= keep[t];
        Vec<T> sum{};
        for (int64_t k = 0; k < n; ++k) {
            h[k] = exponential<T>(dt_t * A[k]) * h[k] + u * B_t[k];
            sum += h[k] * C_t[k];
        }
        store<T>(y + t * d, sum, lanes);
    }
    store_state<T>(out<T>(p.final) + row * n * d + c0, h, p, lanes);
}

// Scratch memory of one backward task.
template <class T> struct Scratch {
    std::vector<Vec<T>> A, dA, g;    // (GROUP, n); g is the gradient of the state
    std::vector<Vec<T>> decays, h;   // (every, n), (every + 1, n): one chunk of one block
    std::vector<Vec<T>> dB, dC;      // (every, n): sums over the group's blocks
    explicit Scratch(const Problem &p)
        : A(GROUP * p.states), dA(A.size()), g(A.size()), decays(p.every * p.states),
          h(decays.size() + p.states), dB(decays.size()), dC(decays.size()) {}
};

// Backpropagate through one chunk of one block: recompute the states from the checkpoint, then go back.
template <class T>
void backward_chunk(const Problem &p, Scratch<T> &s, int64_t row, int64_t chunk, int64_t block,
                    int64_t slot) {
    const int64_t n = p.states, d = p.channels, c0 = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
    const int64_t first = chunk * p.every, steps = std::min(p.every, p.length - first);
    const int64_t chunks = (p.length + p.every - 1) / p.every, index = row * p.length + first;
    const T *x = in<T>(p.x) + index * d + c0, *dt = in<T>(p.dt) + index * d + c0;
    const T *gy = in<T>(p.grad_y) + index * d + c0;
    const T *B = in<T>(p.B) + index * p.B_step, *C = in<T>(p.C) + index * p.C_step;
    const T *keep = p.keep ? in<T>(p.keep) + index : nullptr;
    T *dx = out<T>(p.dx) + index * d + c0, *ddt = out<T>(p.ddt) + index * d + c0;
    const Vec<T> *A = &s.A[slot * n];
    Vec<T> *dA = &s.dA[slot * n], *g = &s.g[slot * n];

    load_state<T>(&s.h[0], in<T>(p.checkpoints) + (row * chunks + chunk) * n * d + c0, p, lanes);
    for (int64_t t = 0; t < steps; ++t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), u = dt_t * load<T>(x + t * d, lanes);
        const Vec<T> *before = &s.h[t * n];
        Vec<T> *h = &s.h[(t + 1) * n], *a = &s.decays[t * n];
        const T keep_t = keep ? keep[t] : T(1);
        for (int64_t k = 0; k < n; ++k) {
            a[k] = exponential<T>(dt_t * A[k]) * keep_t;
            h[k] = a[k] * before[k] + u * B[t * p.B_step + k];
        }
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> gy_t = load<T>(gy + t * d, lanes), u = dt_t * x_t;
        const Vec<T> *before = &s.h[t * n], *h = &s.h[(t + 1) * n], *a = &s.decays[t * n];
        Vec<T> *dB = &s.dB[t * n], *dC = &s.dC[t * n], du{}, d_dt{};
        for (int64_t k = 0; k < n; ++k) {
            const Vec<T> g_k = g[k] + gy_t * C[t * p.C_step + k];
            dC[k] += h[k] * gy_t;
            dB[k] += g_k * u;
            du += g_k * B[t * p.B_step + k];
            g[k] = g_k * a[k];
            const Vec<T> d_log = g[k] * before[k];
            d_dt += d_log * A[k];
            dA[k] += d_log * dt_t;
        }
        store<T>(ddt + t * d, d_dt + du * x_t, lanes);
        store<T>(dx + t * d, du * dt_t, lanes);
    }
}

template <class T> void scan(const Problem &p) {
    const int64_t blocks = (p.channels + LANES<T> - 1) / LANES<T>;
    const int64_t work = p.rows * p.length * p.channels * p.states;
#pragma omp parallel num_threads(p.threads) if (work > SMALL)
    {
        std::vector<Vec<T>> A(p.states), h(p.states);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.rows * blocks; ++task)
            scan_block<T>(p, task / blocks, task % blocks, A.data(), h.data());
    }
}

template <class T> void backward(const Problem &p) {
    const int64_t n = p.states, d = p.channels, length = p.length;
    const int64_t blocks = (d + LANES<T> - 1) / LANES<T>, groups = (blocks + GROUP - 1) / GROUP;
    const int64_t chunks = (length + p.every - 1) / p.every;
    // Parts of the sums over rows (dA) and over groups (dB, dC) are stored and then added in order.
    std::vector<T> dA(p.rows * n * d);
    std::vector<T> dB(p.rows * groups * length * n), dC(dB.size());
#pragma omp parallel num_threads(p.threads) if (p.rows * length * d * n > SMALL)
    {
        Scratch<T> s(p);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.rows * groups; ++task) {
            const int64_t row = task / groups, first = task % groups * GROUP;
            const int64_t last = std::min(blocks, first + GROUP);
            const auto for_each_block = [&](auto &&body) {
                for (int64_t block = first; block < last; ++block) {
                    const int64_t c0 = block * LANES<T>;
                    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
                    body(block, block - first, row * n * d + c0, c0, lanes);
                }
            };
            std::fill(s.dA.begin(), s.dA.end(), Vec<T>{});
            for_each_block([&](int64_t, int64_t slot, int64_t state, int64_t c0, int64_t lanes) {
                load_state<T>(&s.A[slot * n], in<T>(p.A) + c0, p, lanes);
                load_state<T>(&s.g[slot * n], in<T>(p.grad_final) + state, p, lanes);
            });
            for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
                std::fill(s.dB.begin(), s.dB.end(), Vec<T>{});
                std::fill(s.dC.begin(), s.dC.end(), Vec<T>{});
                for_each_block([&](int64_t block, int64_t slot, int64_t, int64_t, int64_t) {
                    backward_chunk<T>(p, s, row, chunk, block, slot);
                });
                const int64_t index = (task * length + chunk * p.every) * n;
                const int64_t chunk_size = std::min(p.every, length - chunk * p.every) * n;
                for (int64_t i = 0; i < chunk_size; ++i) {
                    dB[index + i] = sum_lanes<T>(s.dB[i]);
                    dC[index + i] = sum_lanes<T>(s.dC[i]);
                }
            }
            for_each_block([&](int64_t, int64_t slot, int64_t state, int64_t, int64_t lanes) {
                store_state<T>(&dA[state], &s.dA[slot * n], p, lanes);
                if (p.dh0) store_state<T>(out<T>(p.dh0) + state, &s.g[slot * n], p, lanes);
            });
        }
    }
    const auto add = [](T *to, const T *from, int64_t parts, int64_t size) {
        std::fill(to, to + size, T(0));
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t i = 0; i < size; ++i) to[i] += from[part * size + i];
    };
    for (int64_t row = 0, size = length * n; row < p.rows; ++row) {
        add(out<T>(p.dB) + row * size, dB.data() + row * groups * size, groups, size);
        add(out<T>(p.dC) + row * size, dC.data() + row * groups * size, groups, size);
    }
    add(out<T>(p.dA), dA.data(), p.rows, n * d);
}

}  // namespace

extern "C" void scan_float(const Problem *p) { scan<float>(*p); }
extern "C" void scan_double(const Problem *p) { scan<double>(*p); }
extern "C" void backward_float(const Problem *p) { backward<float>(*p); }
extern "C" void backward_double(const Problem *p) { backward<double>(*p); }
