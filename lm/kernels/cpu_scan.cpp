// Mamba-1's selective scan and its gradient on a CPU; lm/kernels/cpu.py compiles and calls it.
//
//   h_t = keep_t exp(dt_t A) h_{t-1} + (dt_t x_t) B_t^T      y_t = h_t C_t + D x_t
//
// Sizes: b rows, l steps, d channels, n states. A vector holds neighbouring channels: every step is
// then the same arithmetic in all lanes, B and C are broadcast, and no sum runs across lanes but
// those of dB and dC. States live in memory as (n,d) for the same reason. The exponentials, most
// of the work, are computed where they are used: kept for a whole solve and read back from memory
// they took 2.4 times as long at (8, 256, 256, 16), and 0.75 times where they fit the L2 cache.
//
// Compiled without -ffast-math: NaN must come out where it went in, and `exponential` rounds to an
// integer by adding and subtracting a large number, which reassociation would remove.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// Mirrored field by field in cpu.py. Arrays are contiguous, of the kernel's type; "or null" marks
// those that may be missing.
struct Problem {
    int64_t rows, length, channels, states;  // of x: `length` is the window's
    int64_t full_rows, full_length;          // of dt and keep; equal to the above outside windows
    int64_t every;                           // steps between checkpoints
    int64_t threads;
    const int64_t *row, *start, *count;  // (b) or null: which row of dt, from which step, how many
    const void *x, *dt, *A, *B;          // (b,l,d) (·,·,d) (n,d) (b,l,n)
    const void *C, *D, *h0, *keep;       // (b,l,n) (d) (b,n,d) (·,·), each or null
    void *y, *final;                     // (b,l,d) or null, (b,n,d) or null
    void *checkpoints;                   // (b, ⌈l/every⌉, n, d) or null: the state entering a chunk
    const void *grad_y, *grad_final;     // (b,l,d), (b,n,d)
    void *dx, *ddt, *dA, *dB, *dC, *dD, *dh0;  // shaped as what they are the gradients of
};

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class T> struct Float;
template <> struct Float<float> {
    typedef float Vec __attribute__((vector_size(BYTES)));
    typedef int32_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 23;
    static constexpr float bias = 127, round = 12582912.0f, low = -88.0f, high = 88.8f;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    // Minimax for (e^r - 1)/r on |r| <= ln 2 / 2, relative error of e^r 2e-9.
    static constexpr int terms = 6;
    static constexpr float series[terms] = {1.00000003f,     0.499999942f,   0.166664308f,
                                            0.0416680047f, 0.00837419571f, 0.00138436068f};
};
template <> struct Float<double> {
    typedef double Vec __attribute__((vector_size(BYTES)));
    typedef int64_t Bits __attribute__((vector_size(BYTES)));
    static constexpr int mantissa = 52;
    static constexpr double bias = 1023, round = 6755399441055744.0, low = -709.0, high = 710.0;
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
    static constexpr int terms = 13;  // Taylor: below the rounding from here on
    static constexpr double series[terms] = {
        1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
        1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
};

template <class T> using Vec = typename Float<T>::Vec;
template <class T> constexpr int LANES = BYTES / sizeof(T);
// Channel blocks that one backward task walks together, so that the sums of dB and dC over their
// channels stay in lanes and cross them once. Fixed: a result never depends on the thread count.
constexpr int64_t GROUP = 4;
// Updates of one state below which one thread does it: a fraction of a millisecond, less than what
// waking a thread can take on a busy machine.
constexpr int64_t SMALL = 1 << 18;

// NaN stays NaN.
template <class T> inline Vec<T> clamp(Vec<T> p) {
    const Vec<T> low = Vec<T>{} + Float<T>::low, high = Vec<T>{} + Float<T>::high;
#ifdef __AVX512F__  // g++ makes four instructions of what these two do, a tenth of the forward
    if constexpr (sizeof(T) == 4) return _mm512_min_ps(high, _mm512_max_ps(low, p));
    if constexpr (sizeof(T) == 8) return _mm512_min_pd(high, _mm512_max_pd(low, p));
#else
    p = low > p ? low : p;
    return high < p ? high : p;
#endif
}

// e^p: 0 below `low` (where it would be denormal), infinity above `high`, NaN for NaN, 1 for 0.
template <class T> inline Vec<T> exponential(Vec<T> p) {
    using F = Float<T>;
    p = clamp<T>(p);
    // The sum's last bits are the biased exponent k of 2^k; 0 and all ones are 0 and infinity.
    const Vec<T> shifted = p * T(1.4426950408889634) + (F::round + F::bias);
    const Vec<T> k = shifted - (F::round + F::bias);
    const Vec<T> r = (p - k * F::ln2_high) - k * F::ln2_low;
    Vec<T> s = Vec<T>{} + F::series[F::terms - 1];
    for (int i = F::terms - 2; i >= 0; --i) s = s * r + F::series[i];
    s = s * r + T(1);
    return s * (Vec<T>)((typename F::Bits)shifted << F::mantissa);
}

// The lanes of the last block beyond d are zero: dt = 0 keeps their state zero.
template <class T> inline Vec<T> load(const T *from, int64_t lanes) {
    Vec<T> v{};
    if (lanes == LANES<T>)
        std::memcpy(&v, from, sizeof v);
    else
        for (int64_t i = 0; i < lanes; ++i) v[i] = from[i];
    return v;
}

template <class T> inline void store(T *to, Vec<T> v, int64_t lanes) {
    if (lanes == LANES<T>)
        std::memcpy(to, &v, sizeof v);
    else
        for (int64_t i = 0; i < lanes; ++i) to[i] = v[i];
}

// (n,d) at channel c0 → n vectors, and back.
template <class T> void load_state(Vec<T> *to, const T *from, const Problem &p, int64_t lanes) {
    for (int64_t k = 0; k < p.states; ++k)
        to[k] = from ? load<T>(from + k * p.channels, lanes) : Vec<T>{};
}

template <class T> void store_state(T *to, const Vec<T> *from, const Problem &p, int64_t lanes) {
    for (int64_t k = 0; k < p.states; ++k) store<T>(to + k * p.channels, from[k], lanes);
}

template <class T> const T *in(const void *p) { return static_cast<const T *>(p); }
template <class T> T *out(void *p) { return static_cast<T *>(p); }

// One row, one block of channels, forwards. h and A: n vectors.
template <class T>
void scan_block(const Problem &p, int64_t row, int64_t block, Vec<T> *A, Vec<T> *h) {
    const int64_t n = p.states, d = p.channels, c0 = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
    const int64_t start = p.start ? p.start[row] : 0;
    const int64_t at = (p.row ? p.row[row] : row) * p.full_length + start;
    const int64_t wanted = p.count ? p.count[row] : p.length;
    const int64_t steps = std::min(wanted, std::max<int64_t>(0, p.full_length - start));
    const T *x = in<T>(p.x) + row * p.length * d + c0, *dt = in<T>(p.dt) + at * d + c0;
    const T *B = in<T>(p.B) + row * p.length * n, *keep = p.keep ? in<T>(p.keep) + at : nullptr;
    const T *C = p.C ? in<T>(p.C) + row * p.length * n : nullptr;
    T *y = p.y ? out<T>(p.y) + row * p.length * d + c0 : nullptr;
    T *checkpoints = out<T>(p.checkpoints);
    if (checkpoints) checkpoints += row * ((p.length + p.every - 1) / p.every) * n * d + c0;
    const Vec<T> D = p.D ? load<T>(in<T>(p.D) + c0, lanes) : Vec<T>{};

    load_state<T>(A, in<T>(p.A) + c0, p, lanes);
    load_state<T>(h, p.h0 ? in<T>(p.h0) + row * n * d + c0 : nullptr, p, lanes);
    for (int64_t t = 0; t < steps; ++t) {
        if (checkpoints && t % p.every == 0)
            store_state<T>(checkpoints + t / p.every * n * d, h, p, lanes);
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> u = dt_t * x_t;
        const T *B_t = B + t * n;
        if (keep && keep[t] != T(1))
            for (int64_t k = 0; k < n; ++k) h[k] *= keep[t];
        if (y) {
            const T *C_t = C + t * n;
            Vec<T> sum = p.D ? D * x_t : Vec<T>{};
            for (int64_t k = 0; k < n; ++k) {
                h[k] = exponential<T>(dt_t * A[k]) * h[k] + u * B_t[k];
                sum += h[k] * C_t[k];
            }
            store<T>(y + t * d, sum, lanes);
        } else {
            for (int64_t k = 0; k < n; ++k)
                h[k] = exponential<T>(dt_t * A[k]) * h[k] + u * B_t[k];
        }
    }
    if (y)
        for (int64_t t = std::max<int64_t>(steps, 0); t < p.length; ++t)
            store<T>(y + t * d, Vec<T>{}, lanes);
    if (p.final) store_state<T>(out<T>(p.final) + row * n * d + c0, h, p, lanes);
}

// What one backward task reads and writes besides the arrays of the problem.
template <class T> struct Scratch {
    std::vector<Vec<T>> A, dA, g;    // (GROUP, n); g is the gradient of the state
    std::vector<Vec<T>> dD;          // (GROUP)
    std::vector<Vec<T>> decays, h;   // (every, n), (every + 1, n): one chunk of one block
    std::vector<Vec<T>> dB, dC;      // (every, n): sums over the group's blocks
    explicit Scratch(const Problem &p)
        : A(GROUP * p.states), dA(A.size()), g(A.size()), dD(GROUP), decays(p.every * p.states),
          h(decays.size() + p.states), dB(decays.size()), dC(decays.size()) {}
};

// One chunk of one block: the states again from its checkpoint, then the gradients backwards.
template <class T>
void backward_chunk(const Problem &p, Scratch<T> &s, int64_t row, int64_t chunk, int64_t block,
                    int64_t slot) {
    const int64_t n = p.states, d = p.channels, c0 = block * LANES<T>;
    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
    const int64_t first = chunk * p.every, steps = std::min(p.every, p.length - first);
    const int64_t chunks = (p.length + p.every - 1) / p.every, at = row * p.length + first;
    const T *x = in<T>(p.x) + at * d + c0, *dt = in<T>(p.dt) + at * d + c0;
    const T *gy = in<T>(p.grad_y) + at * d + c0, *B = in<T>(p.B) + at * n, *C = in<T>(p.C) + at * n;
    const T *keep = p.keep ? in<T>(p.keep) + at : nullptr;
    T *dx = out<T>(p.dx) + at * d + c0, *ddt = out<T>(p.ddt) + at * d + c0;
    const Vec<T> D = p.D ? load<T>(in<T>(p.D) + c0, lanes) : Vec<T>{};
    const Vec<T> *A = &s.A[slot * n];
    Vec<T> *dA = &s.dA[slot * n], *g = &s.g[slot * n];

    load_state<T>(&s.h[0], in<T>(p.checkpoints) + (row * chunks + chunk) * n * d + c0, p, lanes);
    for (int64_t t = 0; t < steps; ++t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), u = dt_t * load<T>(x + t * d, lanes);
        const Vec<T> *before = &s.h[t * n];
        Vec<T> *h = &s.h[(t + 1) * n], *a = &s.decays[t * n];
        const T kept = keep ? keep[t] : T(1);
        for (int64_t k = 0; k < n; ++k) {
            a[k] = exponential<T>(dt_t * A[k]) * kept;
            h[k] = a[k] * before[k] + u * B[t * n + k];
        }
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const Vec<T> dt_t = load<T>(dt + t * d, lanes), x_t = load<T>(x + t * d, lanes);
        const Vec<T> gy_t = load<T>(gy + t * d, lanes), u = dt_t * x_t;
        const Vec<T> *before = &s.h[t * n], *h = &s.h[(t + 1) * n], *a = &s.decays[t * n];
        Vec<T> *dB = &s.dB[t * n], *dC = &s.dC[t * n], du{}, d_dt{};
        for (int64_t k = 0; k < n; ++k) {
            const Vec<T> g_k = g[k] + gy_t * C[t * n + k];
            dC[k] += h[k] * gy_t;
            dB[k] += g_k * u;
            du += g_k * B[t * n + k];
            g[k] = g_k * a[k];
            const Vec<T> d_log = g[k] * before[k];
            d_dt += d_log * A[k];
            dA[k] += d_log * dt_t;
        }
        s.dD[slot] += gy_t * x_t;
        store<T>(ddt + t * d, d_dt + du * x_t, lanes);
        store<T>(dx + t * d, p.D ? du * dt_t + D * gy_t : du * dt_t, lanes);
    }
}

template <class T> T across(Vec<T> v) {
    T sum = 0;
    for (int i = 0; i < LANES<T>; ++i) sum += v[i];
    return sum;
}

template <class T> int scan(const Problem &p) {
    for (int64_t i = 0; i < p.rows; ++i) {
        if (p.row && (p.row[i] < 0 || p.row[i] >= p.full_rows)) return 1;
        if (p.start && p.start[i] < 0) return 2;
        if (p.count && (p.count[i] < 0 || p.count[i] > p.length)) return 3;
    }
    const int64_t blocks = (p.channels + LANES<T> - 1) / LANES<T>;
    const int64_t work = p.rows * p.length * p.channels * p.states;
#pragma omp parallel num_threads(p.threads) if (work > SMALL)
    {
        std::vector<Vec<T>> A(p.states), h(p.states);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.rows * blocks; ++task)
            scan_block<T>(p, task / blocks, task % blocks, A.data(), h.data());
    }
    return 0;
}

template <class T> int backward(const Problem &p) {
    const int64_t n = p.states, d = p.channels, length = p.length;
    const int64_t blocks = (d + LANES<T> - 1) / LANES<T>, groups = (blocks + GROUP - 1) / GROUP;
    const int64_t chunks = (length + p.every - 1) / p.every;
    // Sums over rows (dA, dD) and over groups (dB, dC) are stored apart and added in order.
    std::vector<T> dA(p.rows * n * d), dD(p.rows * d);
    std::vector<T> dB(p.rows * groups * length * n), dC(dB.size());
#pragma omp parallel num_threads(p.threads) if (p.rows * length * d * n > SMALL)
    {
        Scratch<T> s(p);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < p.rows * groups; ++task) {
            const int64_t row = task / groups, first = task % groups * GROUP;
            const int64_t last = std::min(blocks, first + GROUP);
            const auto each = [&](auto &&body) {
                for (int64_t block = first; block < last; ++block) {
                    const int64_t c0 = block * LANES<T>;
                    const int64_t lanes = std::min<int64_t>(LANES<T>, d - c0);
                    body(block, block - first, row * n * d + c0, c0, lanes);
                }
            };
            std::fill(s.dA.begin(), s.dA.end(), Vec<T>{});
            std::fill(s.dD.begin(), s.dD.end(), Vec<T>{});
            each([&](int64_t, int64_t slot, int64_t state, int64_t c0, int64_t lanes) {
                load_state<T>(&s.A[slot * n], in<T>(p.A) + c0, p, lanes);
                load_state<T>(&s.g[slot * n], in<T>(p.grad_final) + state, p, lanes);
            });
            for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
                std::fill(s.dB.begin(), s.dB.end(), Vec<T>{});
                std::fill(s.dC.begin(), s.dC.end(), Vec<T>{});
                each([&](int64_t block, int64_t slot, int64_t, int64_t, int64_t) {
                    backward_chunk<T>(p, s, row, chunk, block, slot);
                });
                const int64_t at = (task * length + chunk * p.every) * n;
                const int64_t here = std::min(p.every, length - chunk * p.every) * n;
                for (int64_t i = 0; i < here; ++i) {
                    dB[at + i] = across<T>(s.dB[i]);
                    dC[at + i] = across<T>(s.dC[i]);
                }
            }
            each([&](int64_t, int64_t slot, int64_t state, int64_t c0, int64_t lanes) {
                store_state<T>(&dA[state], &s.dA[slot * n], p, lanes);
                store<T>(&dD[row * d + c0], s.dD[slot], lanes);
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
    if (p.dD) add(out<T>(p.dD), dD.data(), p.rows, d);
    return 0;
}

}  // namespace

// 0, or which of row (1), start (2), count (3) is out of range.
extern "C" int scan_float(const Problem *p) { return scan<float>(*p); }
extern "C" int scan_double(const Problem *p) { return scan<double>(*p); }
extern "C" int backward_float(const Problem *p) { return backward<float>(*p); }
extern "C" int backward_double(const Problem *p) { return backward<double>(*p); }
