// The exact token forwards on a CPU; lm/kernels/cpu/cpu_cell.py calls it and says what it computes.

#include "cell_token.h"

namespace {

// What a group of sequences carries from token to token.
template <class T> struct Forward {
    int64_t width;               // of a row of y_before: whole vectors
    std::vector<Token<T>> token;
    T *rows, *y_before, *h, *inflow, *B_before, *c, *m, *v;
    T *alpha, *read;             // of the centroids: (sequence, k), (sequence, width)
    T *has_before;               // (sequence): 1, and 0 where there is no token before
    Arena<T> arena;

    static int64_t size(const Cell &p, int64_t count) {
        const auto whole = Arena<T>::whole;
        const int64_t d = whole(p.channels), state = whole(p.states * p.channels);
        const int64_t each = whole(p.columns) + 3 * d + state + whole(p.groups * p.states) +
                             whole(p.centroids);
        return count * (each + Token<T>::size(p)) + (p.rank + 2) * d + whole(count);
    }
    Forward(const Cell &p, int64_t count)
        : width(Arena<T>::whole(p.channels)), arena(size(p, count)) {
        for (int64_t i = 0; i < count; ++i) token.emplace_back(p, arena);
        rows = arena.take(count * p.columns);
        y_before = arena.take(count * width);
        h = arena.take(count * p.states * p.channels);
        inflow = arena.take(count * p.channels);
        B_before = arena.take(count * p.groups * p.states);
        c = arena.take(p.channels);
        m = arena.take(p.rank * p.channels);
        v = arena.take(p.channels);
        alpha = arena.take(count * p.centroids);
        read = arena.take(count * width);
        has_before = arena.take(count);
    }
};

// c, m_j (d each): v = c + Σ_j m_j s_j. Their means, 0 without centring.
template <class T, int R>
void parts_of_v(const Cell &p, int64_t at, const Token<T> &k, Forward<T> &f, T *means) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    double reflected[MOST];
    for (int i = 0; i < r; ++i) {
        reflected[i] = 0;
        for (int j = 0; j <= i; ++j) reflected[i] += k.map[i][j] * k.seen[j];
    }
    Vec<T> sums[MOST + 1] = {};
    blocks_of_groups<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        Vec<T> rest = load<T>(in<T>(p.x) + at * d + c, lanes);
        for (int i = 0; i < r; ++i) rest -= load<T>(k.u + i * d + c, lanes) * T(reflected[i]);
        Vec<T> gamma = load<T>(k.dt + c, lanes) * k.bc[g] + load_or<T>(p.D, c, lanes, 0);
        Vec<T> free = load<T>(k.past + c, lanes) + gamma * rest;
        if (p.gate) {
            const Vec<T> gate = load<T>(in<T>(p.gate) + at * d + c, lanes);
            free *= gate;
            gamma *= gate;
        }
        store<T>(f.c + c, free, lanes);
        sums[0] += free;
        for (int j = 0; j < r; ++j) {
            Vec<T> along{};
            for (int i = j; i < r; ++i) along += load<T>(k.u + i * d + c, lanes) * T(k.map[i][j]);
            along *= gamma;
            store<T>(f.m + j * d + c, along, lanes);
            sums[j + 1] += along;
        }
    });
    for (int j = 0; j <= r; ++j) means[j] = p.norm == LAYER ? across<T>(sums[j]) / T(d) : T(0);
}

// The coefficients of φ.
template <class T, int R>
void coefficients(const Cell &p, const Token<T> &k, const Forward<T> &f, const T *means, Equation &e) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    constexpr int MOST_R = R ? R : MOST;
    Vec<T> alpha[MOST_R] = {}, delta[MOST_R] = {}, beta[MOST_R][MOST_R] = {};
    Vec<T> gamma0{}, gamma1[MOST_R] = {}, gamma2[MOST_R][MOST_R] = {};
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> free = first_lanes<T>(load<T>(f.c + c, lanes) - means[0], lanes);
        const Vec<T> weight = load_or<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> bias = load_or<T>(p.norm_bias, c, lanes, 0);
        Vec<T> u[MOST_R], along[MOST_R];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(k.u + i * d + c, lanes);
            delta[i] += u[i] * bias;
            u[i] *= weight;
            alpha[i] += u[i] * free;
            along[i] = first_lanes<T>(load<T>(f.m + i * d + c, lanes) - means[i + 1], lanes);
            gamma1[i] += free * along[i];
        }
        gamma0 += free * free;
        for (int i = 0; i < r; ++i)
            for (int j = 0; j < r; ++j) {
                beta[i][j] += u[i] * along[j];
                gamma2[i][j] += along[i] * along[j];
            }
    });
    e.gamma0 = double(across<T>(gamma0)) / d + p.norm_eps;
    e.floor = p.norm_eps;
    e.rounding = std::numeric_limits<T>::epsilon();
    for (int i = 0; i < r; ++i) {
        e.alpha[i] = across<T>(alpha[i]);
        e.delta[i] = across<T>(delta[i]);
        e.gamma1[i] = double(across<T>(gamma1[i])) / d;
        for (int j = 0; j < r; ++j) {
            e.beta[i][j] = across<T>(beta[i][j]);
            e.gamma2[i][j] = double(across<T>(gamma2[i][j])) / d;
        }
    }
}

// Whether the gradient's limit may take effect at the root s.
template <class T, int R> bool may_be_limited(const Cell &p, const Equation &e, const double *s) {
    double M[MOST][MOST];
    if (p.norm == NONE) {
        for (int i = 0; i < p.rank; ++i)
            for (int j = 0; j < p.rank; ++j) M[i][j] = (i == j) - e.beta[i][j];
    } else {
        Point at;
        for (int i = 0; i < p.rank; ++i) at.s[i] = s[i];
        evaluate<R>(e, p.rank, at);
        rest_of<R>(e, p.rank, at, M);
    }
    return limited<R>(M, p.rank);
}

// One token of one sequence, i-th of the group: its equation, y, and what it adds to the state.
template <class T, int R>
void token(const Cell &p, int64_t at, int64_t i, const T *row, Forward<T> &f) {
    const int64_t d = p.channels, n = p.states;
    Token<T> &k = f.token[i];
    T *h = f.h + i * n * d, *inflow = f.inflow + i * d, *B_before = f.B_before + i * p.groups * n;
    T *y = out<T>(p.y) + at * d;
    prepare<T, R>(p, at, row, k);
    advance<T>(p, k, p.keep ? in<T>(p.keep)[at] : T(1), inflow, B_before, h, h);
    Equation e;
    T means[MOST + 1], mean, inverse;
    parts_of_v<T, R>(p, at, k, f, means);
    coefficients<T, R>(p, k, f, means, e);
    p.outcome[at] = p.norm == NONE ? solve_linear<R>(e, p.rank, k.root)
                                   : solve<R>(e, p.rank, k.root);
    if (!(p.outcome[at] & FAILED) && may_be_limited<T, R>(p, e, k.root)) p.outcome[at] |= LIMITED;
    if (p.roots)
        for (int64_t j = 0; j < p.rank; ++j) {
            k.root[j] = T(k.root[j]);
            out<T>(p.roots)[at * p.rank + j] = T(k.root[j]);
        }
    else
        for (int64_t j = 0; j < p.rank; ++j) k.root[j] = T(k.root[j]);
    mix<T, R>(p, at, k);
    before_norm<T>(p, at, k, f.v, mean, inverse);
    T *before = f.y_before + i * f.width;
    blocks<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> weight = load_or<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> normed = (load<T>(f.v + c, lanes) - mean) * inverse;
        const Vec<T> y_c = normed * weight + load_or<T>(p.norm_bias, c, lanes, 0);
        store<T>(y + c, y_c, lanes);
        store<T>(before + c, y_c, lanes);
        if (p.kind == RNN) return store<T>(h + c, y_c, lanes);
        store<T>(inflow + c, load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes), lanes);
    });
    if (p.kind != RNN) std::memcpy(B_before, k.B, p.groups * n * sizeof(T));
}

template <class T> void start(const Cell &p, int64_t first, int64_t count, Forward<T> &f) {
    const int64_t d = p.channels, state = p.states * d;
    std::fill(f.y_before, f.y_before + count * f.width, T(0));
    std::fill(f.h, f.h + count * state, T(0));
    std::fill(f.inflow, f.inflow + count * d, T(0));
    std::fill(f.B_before, f.B_before + count * p.groups * p.states, T(0));
    for (int64_t i = 0; i < count && p.y0; ++i)
        std::memcpy(f.y_before + i * f.width, in<T>(p.y0) + (first + i) * d, d * sizeof(T));
    if (p.h0) std::memcpy(f.h, in<T>(p.h0) + first * state, count * state * sizeof(T));
}

// softmax of k numbers, in place, times `factor`.
template <class T> void soften(int64_t k, T factor, T *alpha) {
    const T most = *std::max_element(alpha, alpha + k);
    Vec<T> sums{};
    blocks<T>(k, [&](int64_t j, int64_t lanes) {
        const Vec<T> e = exponential<T>(load<T>(alpha + j, lanes) - most);
        store<T>(alpha + j, e, lanes);
        sums += first_lanes<T>(e, lanes);
    });
    const T times = factor / across<T>(sums);
    for (int64_t j = 0; j < k; ++j) alpha[j] *= times;
}

// What token t of all sequences reads through the centroids in the place of y_before: Σ_i α_i c_i;
// zero where there is no token before, so that zero is no centroid (lm/model/layers.py, Centroids).
template <class T>
void read_centroids(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
                    Forward<T> &f) {
    const int64_t k = p.centroids, d = p.channels, tokens = first * p.length + t;
    T *alphas = p.alphas ? out<T>(p.alphas) + tokens * k : f.alpha;
    const int64_t step = p.alphas ? p.length * k : k;
    for (int64_t i = 0; i < count; ++i) std::memcpy(alphas + i * step, p.key_bias, k * sizeof(T));
    by_parts(count, [&](int64_t i, auto S) {
        const T *y = f.y_before + i * f.width;
        project_some<T, decltype(S)::value>(maps.keys, k, f.width, y, alphas + i * step, step);
    });
    for (int64_t i = 0; i < count; ++i) soften<T>(k, f.has_before[i], alphas + i * step);
    by_parts(count, [&](int64_t i, auto S) {
        T *read = f.read + i * f.width;
        gather_some<T, decltype(S)::value>(maps.values, k, f.width, alphas + i * step, step, read);
    });
    for (int64_t i = 0; i < count && p.reads; ++i)
        std::memcpy(out<T>(p.reads) + (tokens + i * p.length) * d, f.read + i * f.width,
                    d * sizeof(T));
}

// The rows of raw of token t of all sequences, with what they read of y.
template <class T>
void rows_of(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
             Forward<T> &f) {
    T *rows = p.kept_rows ? out<T>(p.kept_rows) + (first * p.length + t) * p.columns : f.rows;
    const int64_t step = p.kept_rows ? p.length * p.columns : p.columns;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (first + i) * p.length + t;
        std::memcpy(rows + i * step, in<T>(p.raw) + at * p.raw_step, p.columns * sizeof(T));
        if (p.keep && in<T>(p.keep)[at] != T(1))
            for (int64_t c = 0; c < p.channels; ++c)
                f.y_before[i * f.width + c] *= in<T>(p.keep)[at];
        if (p.centroids) {
            const T *y = f.y_before + i * f.width;
            f.has_before[i] = std::any_of(y, y + p.channels, [](T value) { return value != 0; });
        }
        for (int64_t c = 0; c < p.channels && p.noise; ++c)
            f.y_before[i * f.width + c] += in<T>(p.noise)[at * p.channels + c];
    }
    if (p.centroids) read_centroids<T>(p, first, count, t, maps, f);
    const T *before = p.centroids ? f.read : f.y_before;
    // Rows of the weight by the quarter of an L2 cache: read from memory once for all sequences.
    const int64_t most = std::max<int64_t>(16, (1 << 18) / (f.width * sizeof(T)) / 16 * 16);
    for (int64_t j = 0; j < p.reading; j += most) {
        const int64_t here = std::min(most, p.reading - j);
        by_parts(count, [&](int64_t i, auto S) {
            const T *y = before + i * f.width, *W = maps.W + j * f.width;
            T *to = rows + i * step + j;
            project_some<T, decltype(S)::value>(W, here, f.width, y, to, step);
        });
    }
}

template <class T, int R>
void group(const Cell &p, int64_t first, int64_t count, const Maps<T> &maps) {
    const int64_t state = p.states * p.channels, chunks = (p.length + p.every - 1) / p.every;
    Forward<T> f(p, count);
    start<T>(p, first, count, f);
    const auto settled = [&](int64_t i, T *to) {
        const T *h = f.h + i * state, *B = f.B_before + i * p.groups * p.states;
        if (p.kind == RNN) return void(std::memcpy(to, h, state * sizeof(T)));
        settle<T>(p, f.inflow + i * p.channels, B, h, to);
    };
    for (int64_t t = 0; t < p.length; ++t) {
        if (p.checkpoints && t % p.every == 0)
            for (int64_t i = 0; i < count; ++i)
                settled(i, out<T>(p.checkpoints) + ((first + i) * chunks + t / p.every) * state);
        rows_of<T>(p, first, count, t, maps, f);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = (first + i) * p.length + t;
            const T *row = p.kept_rows ? in<T>(p.kept_rows) + at * p.columns : f.rows + i * p.columns;
            token<T, R>(p, at, i, row, f);
        }
    }
    for (int64_t i = 0; i < count; ++i) settled(i, out<T>(p.final) + (first + i) * state);
}

template <class T> void forward(const Cell &p) {
    const Maps<T> maps(p);
    by_rank(p, [&](auto R) {
        // A weight that the L2 cache cannot hold is read for more sequences at once.
        const bool large = p.reading * p.channels * int64_t(sizeof(T)) > (1 << 19);
        by_groups(p, large ? 4 * TOGETHER : TOGETHER, [&](int64_t first, int64_t count) {
            group<T, decltype(R)::value>(p, first, count, maps);
        });
    });
}

}  // namespace

extern "C" void cell_float(const Cell *p) { forward<float>(*p); }
extern "C" void cell_double(const Cell *p) { forward<double>(*p); }
