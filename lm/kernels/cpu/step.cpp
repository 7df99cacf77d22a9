// What one fixed-point iteration computes beside its matrix products and its scan, on a CPU;
// lm/kernels/cpu/step.py calls it.
//
// Threads share out the tokens and a token is computed by itself, whatever is around it: no result
// depends on the thread count or on what else is in the batch. A token's rows are read from memory
// once and stay in the L1 cache for the passes over them.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"

// Packed field by field in cpu_step.py. A step is what lies between two tokens of an array, in
// entries; arrays without one are contiguous. "or null" marks those that may be missing.
struct Mix {
    int64_t tokens, channels, rank, act, sequential, threads;
    int64_t gates_step, vectors_step, x_step, y_step;
    const void *gates, *vectors, *x, *y;  // (t,r) (t,r·d) (t,d) (t,d)
    void *mixed;                          // (t,d)
    double scale, eps;
};

struct Normalise {
    int64_t tokens, groups, width, threads, v_step;
    const void *v;  // (t, groups·width)
    void *unit;     // (t, groups·width)
    double eps;
};

struct Finish {
    int64_t tokens, channels, rms, threads, o_step, x_step, z_step, y_step;
    const void *o, *x, *D, *z;           // (t,d) (t,d) (d) (t,d), all but o or null
    const void *weight, *bias, *y;       // (d) (d) (t,d), the last two or null
    const uint8_t *mask;                 // (t) or null: g is zero where it is
    void *g, *residual;                  // (t,d) (t); residual where there is y
    double eps;
};

namespace {

// Entries below which one thread does it, in less than 0.1 ms; waking a thread takes as long where
// the machine is busy.
constexpr int64_t FEW = 1 << 17;

constexpr double RESIDUAL_FLOOR = 1e-8;  // as in lm/model/solver.py

enum Act { SILU, RELU, IDENTITY };  // as in cpu_step.py

// body(c, lanes) for all blocks of d channels; in all but the last `lanes` is a constant.
template <class T, class Body> inline void blocks(int64_t d, Body body) {
    int64_t c = 0;
    for (; c + LANES<T> <= d; c += LANES<T>) body(c, LANES<T>);
    if (c < d) body(c, d - c);
}

// body(first, last) on each thread's share of the tokens.
template <class Body> void share(int64_t tokens, int64_t entries, int64_t threads, Body body) {
    if (threads == 1 || entries < FEW) return body(0, tokens);
    const int64_t parts = std::min(threads, tokens);
#pragma omp parallel for schedule(static) num_threads(parts)
    for (int64_t i = 0; i < parts; ++i) body(tokens * i / parts, tokens * (i + 1) / parts);
}

template <class T> inline Vec<T> sigmoid(Vec<T> v) { return T(1) / (T(1) + exponential<T>(-v)); }
template <class T> inline Vec<T> silu(Vec<T> v) { return v / (T(1) + exponential<T>(-v)); }

template <class T, Act act> inline Vec<T> activate(Vec<T> v) {
    if constexpr (act == SILU) return silu<T>(v);
    if constexpr (act == RELU) return v < T(0) ? Vec<T>{} : v;  // NaN stays NaN
    return v;
}

// max(‖v‖, eps) from ‖v‖²; NaN stays NaN.
template <class T> inline T length_of(Vec<T> squares, double eps) {
    const T length = std::sqrt(across<T>(squares));
    return length < T(eps) ? T(eps) : length;
}

// One token of x̃ = M(x − y) + y = x − Σ c_i u_i, u_i not yet normalised. u: space for d.
template <class T, Act act> void mix_token(const Mix &p, int64_t t, T *u) {
    const int64_t d = p.channels;
    const T *x = in<T>(p.x) + t * p.x_step, *y = in<T>(p.y) + t * p.y_step;
    const T *gates = in<T>(p.gates) + t * p.gates_step;
    const T *vectors = in<T>(p.vectors) + t * p.vectors_step;
    T *mixed = out<T>(p.mixed) + t * d;
    for (int64_t i = 0; i < p.rank; ++i) {
        const T *so_far = i ? mixed : x, *reflected = p.sequential ? so_far : x;
        Vec<T> squares{}, dot{};
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> v = activate<T, act>(load<T>(vectors + i * d + c, lanes));
            store<T>(u + c, v, lanes);
            squares += v * v;
            dot += v * (load<T>(reflected + c, lanes) - load<T>(y + c, lanes));
        });
        const T length = length_of<T>(squares, p.eps);
        const Vec<T> gate = Vec<T>{} + gates[i];
        const T a = T(p.scale) * sigmoid<T>(gate)[0];
        const T coefficient = a * (across<T>(dot) / length) / length;
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> before = load<T>(so_far + c, lanes);
            store<T>(mixed + c, before - coefficient * load<T>(u + c, lanes), lanes);
        });
    }
}

template <class T, Act act> void mix_all(const Mix &p) {
    const int64_t entries = p.tokens * p.channels * p.rank;
    share(p.tokens, entries, p.threads, [&](int64_t first, int64_t last) {
        std::vector<T> u(p.channels);
        for (int64_t t = first; t < last; ++t) mix_token<T, act>(p, t, u.data());
    });
}

template <class T> void mix(const Mix &p) {
    if (p.act == SILU) return mix_all<T, SILU>(p);
    if (p.act == RELU) return mix_all<T, RELU>(p);
    mix_all<T, IDENTITY>(p);
}

template <class T> void normalise(const Normalise &p) {
    const int64_t width = p.width, row = p.groups * width;
    share(p.tokens, p.tokens * row, p.threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first * p.groups; i < last * p.groups; ++i) {
            const int64_t t = i / p.groups, c0 = i % p.groups * width;
            const T *group = in<T>(p.v) + t * p.v_step + c0;
            T *unit = out<T>(p.unit) + t * row + c0;
            Vec<T> squares{};
            blocks<T>(width, [&](int64_t c, int64_t lanes) {
                const Vec<T> v = load<T>(group + c, lanes);
                store<T>(unit + c, v, lanes);
                squares += v * v;
            });
            const T scale = 1 / length_of<T>(squares, p.eps);
            blocks<T>(width, [&](int64_t c, int64_t lanes) {
                store<T>(unit + c, load<T>(unit + c, lanes) * scale, lanes);
            });
        }
    });
}

// w = (o + D x) silu(z) into `w`; the sum of w, of w² if that is the norm's.
template <class T> T gated(const Finish &p, int64_t t, T *w) {
    const T *o = in<T>(p.o) + t * p.o_step, *D = in<T>(p.D);
    const T *x = p.x ? in<T>(p.x) + t * p.x_step : nullptr;
    const T *z = p.z ? in<T>(p.z) + t * p.z_step : nullptr;
    Vec<T> sum{};
    blocks<T>(p.channels, [&](int64_t c, int64_t lanes) {
        Vec<T> v = load<T>(o + c, lanes);
        if (x) v += load<T>(D + c, lanes) * load<T>(x + c, lanes);
        if (z) v *= silu<T>(load<T>(z + c, lanes));
        store<T>(w + c, v, lanes);
        sum += p.rms ? v * v : v;
    });
    return across<T>(sum);
}

// One token of g = norm(w) and of the residual. w: space for d.
template <class T> void finish_token(const Finish &p, int64_t t, T *w) {
    const int64_t d = p.channels;
    const T *weight = in<T>(p.weight), *bias = in<T>(p.bias);
    const T *y = p.y ? in<T>(p.y) + t * p.y_step : nullptr;
    T *g = out<T>(p.g) + t * d;
    const T average = gated<T>(p, t, w) / T(d);
    T mean = 0, mean_square = average;
    if (!p.rms) {  // the variance of what the mean was taken off: w² − mean² would cancel
        Vec<T> squares{};
        mean = average;
        blocks<T>(d, [&](int64_t c, int64_t lanes) {
            const Vec<T> v = first_lanes<T>(load<T>(w + c, lanes) - mean, lanes);
            squares += v * v;
        });
        mean_square = across<T>(squares) / T(d);
    }
    const T scale = 1 / std::sqrt(mean_square + T(p.eps));
    const T kept = p.mask && !p.mask[t] ? T(0) : T(1);
    Vec<T> change{}, size{}, poison{};  // poison: NaN in the lanes that met NaN, else 0
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        Vec<T> v = (load<T>(w + c, lanes) - mean) * scale * load<T>(weight + c, lanes);
        if (bias) v += load<T>(bias + c, lanes);
        v *= kept;
        store<T>(g + c, v, lanes);
        if (!y) return;
        const Vec<T> moved = magnitude<T>(load<T>(y + c, lanes) - v), of = magnitude<T>(v);
        change = moved > change ? moved : change;  // passes over NaN
        size = of > size ? of : size;
        poison = moved == moved ? poison : moved;
    });
    if (!y) return;
    const bool bad = across<T>(poison) != 0;  // true of NaN
    const T residual = largest<T>(change) / (largest<T>(size) + T(RESIDUAL_FLOOR));
    out<T>(p.residual)[t] = bad ? std::numeric_limits<T>::quiet_NaN() : residual;
}

template <class T> void finish(const Finish &p) {
    share(p.tokens, p.tokens * p.channels, p.threads, [&](int64_t first, int64_t last) {
        std::vector<T> w(p.channels);
        for (int64_t t = first; t < last; ++t) finish_token<T>(p, t, w.data());
    });
}

}  // namespace

extern "C" void mix_float(const Mix *p) { mix<float>(*p); }
extern "C" void mix_double(const Mix *p) { mix<double>(*p); }
extern "C" void normalise_float(const Normalise *p) { normalise<float>(*p); }
extern "C" void normalise_double(const Normalise *p) { normalise<double>(*p); }
extern "C" void finish_float(const Finish *p) { finish<float>(*p); }
extern "C" void finish_double(const Finish *p) { finish<double>(*p); }
