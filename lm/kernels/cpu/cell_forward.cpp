// Forward pass of the `cell` kernel: the exact solve of a layer, token by token.
//
// lm/kernels/cpu/cpu_cell.py calls it; lm/kernels/cell_arguments.py has the equations.

#include "cell_token.h"

namespace {

// State of a group of sequences between two tokens, and scratch memory.
template <class T> struct Forward {
    int64_t width;               // entries of a row of y_before, a multiple of a vector
    std::vector<Token<T>> tokens;
    T *rows, *y_before, *h, *inflow, *B_before, *c, *m, *v;
    T *alpha, *read;             // centroids: (sequence, k), (sequence, width)
    T *has_before;               // (sequence): 0 at the first token of a document, else 1
    Arena<T> arena;

    static int64_t size(const Cell &p, int64_t count) {
        const auto round_up = Arena<T>::round_up;
        const int64_t d = round_up(p.channels), state = round_up(p.states * p.channels);
        const int64_t each = round_up(p.columns) + 3 * d + state + round_up(p.groups * p.states) +
                             round_up(p.centroids);
        return count * (each + Token<T>::size(p)) + (p.rank + 2) * d + round_up(count);
    }
    Forward(const Cell &p, int64_t count)
        : width(Arena<T>::round_up(p.channels)), arena(size(p, count)) {
        for (int64_t i = 0; i < count; ++i) tokens.emplace_back(p, arena);
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

// Compute c and m_j (d each) of v = c + Σ_j m_j s_j, and their means (0 unless the norm centres).
template <class T, int R>
void split_v(const Cell &p, int64_t index, const Token<T> &k, Forward<T> &f, T *means) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    double Tux[MAX_REFLECTIONS];
    for (int i = 0; i < r; ++i) {
        Tux[i] = 0;
        for (int j = 0; j <= i; ++j) Tux[i] += k.map[i][j] * k.Ux[j];
    }
    Vec<T> sums[MAX_REFLECTIONS + 1] = {};
    for_each_group_block<T>(p, [&](int64_t c, int64_t lanes, int64_t g) {
        Vec<T> remainder = load<T>(in<T>(p.x) + index * d + c, lanes);
        for (int i = 0; i < r; ++i) remainder -= load<T>(k.u + i * d + c, lanes) * T(Tux[i]);
        Vec<T> gamma = load<T>(k.dt + c, lanes) * k.bc[g] + load_or_default<T>(p.D, c, lanes, 0);
        Vec<T> constant = load<T>(k.past + c, lanes) + gamma * remainder;
        if (p.gate) {
            const Vec<T> gate = load<T>(in<T>(p.gate) + index * d + c, lanes);
            constant *= gate;
            gamma *= gate;
        }
        store<T>(f.c + c, constant, lanes);
        sums[0] += constant;
        for (int j = 0; j < r; ++j) {
            Vec<T> slope{};
            for (int i = j; i < r; ++i) slope += load<T>(k.u + i * d + c, lanes) * T(k.map[i][j]);
            slope *= gamma;
            store<T>(f.m + j * d + c, slope, lanes);
            sums[j + 1] += slope;
        }
    });
    for (int j = 0; j <= r; ++j) means[j] = p.norm == LAYER ? sum_lanes<T>(sums[j]) / T(d) : T(0);
}

// Compute the coefficients of φ.
template <class T, int R>
void compute_coefficients(const Cell &p, const Token<T> &k, const Forward<T> &f, const T *means, Equation &e) {
    const int r = rank_of<R>(p.rank);
    const int64_t d = p.channels;
    constexpr int MAX_R = R ? R : MAX_REFLECTIONS;
    Vec<T> alpha[MAX_R] = {}, delta[MAX_R] = {}, beta[MAX_R][MAX_R] = {};
    Vec<T> gamma0{}, gamma1[MAX_R] = {}, gamma2[MAX_R][MAX_R] = {};
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> constant = zero_padding_lanes<T>(load<T>(f.c + c, lanes) - means[0], lanes);
        const Vec<T> weight = load_or_default<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> bias = load_or_default<T>(p.norm_bias, c, lanes, 0);
        Vec<T> u[MAX_R], slope[MAX_R];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(k.u + i * d + c, lanes);
            delta[i] += u[i] * bias;
            u[i] *= weight;
            alpha[i] += u[i] * constant;
            slope[i] = zero_padding_lanes<T>(load<T>(f.m + i * d + c, lanes) - means[i + 1], lanes);
            gamma1[i] += constant * slope[i];
        }
        gamma0 += constant * constant;
        for (int i = 0; i < r; ++i)
            for (int j = 0; j < r; ++j) {
                beta[i][j] += u[i] * slope[j];
                gamma2[i][j] += slope[i] * slope[j];
            }
    });
    e.gamma0 = double(sum_lanes<T>(gamma0)) / d + p.norm_eps;
    e.floor = p.norm_eps;
    e.rounding = std::numeric_limits<T>::epsilon();
    for (int i = 0; i < r; ++i) {
        e.alpha[i] = sum_lanes<T>(alpha[i]);
        e.delta[i] = sum_lanes<T>(delta[i]);
        e.gamma1[i] = double(sum_lanes<T>(gamma1[i])) / d;
        for (int j = 0; j < r; ++j) {
            e.beta[i][j] = sum_lanes<T>(beta[i][j]);
            e.gamma2[i][j] = double(sum_lanes<T>(gamma2[i][j])) / d;
        }
    }
}

// Return true if the limit of the gradient may take effect at the root s.
template <class T, int R> bool may_limit_gradient(const Cell &p, const Equation &e, const double *s) {
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    if (p.norm == NONE) {
        for (int i = 0; i < p.rank; ++i)
            for (int j = 0; j < p.rank; ++j) M[i][j] = (i == j) - e.beta[i][j];
    } else {
        Point point;
        for (int i = 0; i < p.rank; ++i) point.s[i] = s[i];
        evaluate<R>(e, p.rank, point);
        identity_minus_slope<R>(e, p.rank, point, M);
    }
    return is_gain_limited<R>(M, p.rank);
}

// Solve one token of the i-th sequence of the group: its equation, y, and its addition to the state.
// row: the token's row of projections; index: its place among all tokens.
template <class T, int R>
void solve_token(const Cell &p, int64_t index, int64_t i, const T *row, Forward<T> &f) {
    const int64_t d = p.channels, n = p.states;
    Token<T> &k = f.tokens[i];
    T *h = f.h + i * n * d, *inflow = f.inflow + i * d, *B_before = f.B_before + i * p.groups * n;
    T *y = out<T>(p.y) + index * d;
    prepare_token<T, R>(p, index, row, k);
    advance_state<T>(p, k, p.keep ? in<T>(p.keep)[index] : T(1), inflow, B_before, h, h);
    Equation e;
    T means[MAX_REFLECTIONS + 1], mean, inverse;
    split_v<T, R>(p, index, k, f, means);
    compute_coefficients<T, R>(p, k, f, means, e);
    p.outcome[index] = p.norm == NONE ? solve_linear<R>(e, p.rank, k.root)
                                   : solve<R>(e, p.rank, k.root);
    if (!(p.outcome[index] & FAILED) && may_limit_gradient<T, R>(p, e, k.root)) p.outcome[index] |= GRAD_LIMITED;
    if (p.roots)
        for (int64_t j = 0; j < p.rank; ++j) {
            k.root[j] = T(k.root[j]);
            out<T>(p.roots)[index * p.rank + j] = T(k.root[j]);
        }
    else
        for (int64_t j = 0; j < p.rank; ++j) k.root[j] = T(k.root[j]);
    compute_mixed<T, R>(p, index, k);
    compute_v<T>(p, index, k, f.v, mean, inverse);
    T *before = f.y_before + i * f.width;
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> weight = load_or_default<T>(p.norm_weight, c, lanes, 1);
        const Vec<T> normed = (load<T>(f.v + c, lanes) - mean) * inverse;
        const Vec<T> y_c = normed * weight + load_or_default<T>(p.norm_bias, c, lanes, 0);
        store<T>(y + c, y_c, lanes);
        store<T>(before + c, y_c, lanes);
        if (p.kind == RNN) return store<T>(h + c, y_c, lanes);
        store<T>(inflow + c, load<T>(k.dt + c, lanes) * load<T>(k.mixed + c, lanes), lanes);
    });
    if (p.kind != RNN) std::memcpy(B_before, k.B, p.groups * n * sizeof(T));
}

template <class T> void init_group(const Cell &p, int64_t first, int64_t count, Forward<T> &f) {
    const int64_t d = p.channels, state = p.states * d;
    std::fill(f.y_before, f.y_before + count * f.width, T(0));
    std::fill(f.h, f.h + count * state, T(0));
    std::fill(f.inflow, f.inflow + count * d, T(0));
    std::fill(f.B_before, f.B_before + count * p.groups * p.states, T(0));
    for (int64_t i = 0; i < count && p.y0; ++i)
        std::memcpy(f.y_before + i * f.width, in<T>(p.y0) + (first + i) * d, d * sizeof(T));
    if (p.h0) std::memcpy(f.h, in<T>(p.h0) + first * state, count * state * sizeof(T));
}

// Replace k numbers by `factor` times their softmax.
template <class T> void softmax(int64_t k, T factor, T *alpha) {
    const T maximum = *std::max_element(alpha, alpha + k);
    Vec<T> sums{};
    for_each_block<T>(k, [&](int64_t j, int64_t lanes) {
        const Vec<T> e = exponential<T>(load<T>(alpha + j, lanes) - maximum);
        store<T>(alpha + j, e, lanes);
        sums += zero_padding_lanes<T>(e, lanes);
    });
    const T times = factor / sum_lanes<T>(sums);
    for (int64_t j = 0; j < k; ++j) alpha[j] *= times;
}

// Compute Σ_i α_i c_i, which token t of all sequences reads instead of y_before. It is zero at the
// first token of a document; see Centroids in lm/model/layers.py.
template <class T>
void read_centroids(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
                    Forward<T> &f) {
    const int64_t k = p.centroids, d = p.channels, tokens = first * p.length + t;
    T *alphas = p.alphas ? out<T>(p.alphas) + tokens * k : f.alpha;
    const int64_t step = p.alphas ? p.length * k : k;
    for (int64_t i = 0; i < count; ++i) std::memcpy(alphas + i * step, p.key_bias, k * sizeof(T));
    for_each_tile(count, [&](int64_t i, auto S) {
        const T *y = f.y_before + i * f.width;
        project_some<T, decltype(S)::value>(maps.keys, k, f.width, y, alphas + i * step, step);
    });
    for (int64_t i = 0; i < count; ++i) softmax<T>(k, f.has_before[i], alphas + i * step);
    for_each_tile(count, [&](int64_t i, auto S) {
        T *read = f.read + i * f.width;
        gather_some<T, decltype(S)::value>(maps.values, k, f.width, alphas + i * step, step, read);
    });
    for (int64_t i = 0; i < count && p.reads; ++i)
        std::memcpy(out<T>(p.reads) + (tokens + i * p.length) * d, f.read + i * f.width,
                    d * sizeof(T));
}

// Compute the rows of token t of all sequences: raw plus the product of W_y and y_{t−1}.
template <class T>
void compute_rows(const Cell &p, int64_t first, int64_t count, int64_t t, const Maps<T> &maps,
             Forward<T> &f) {
    T *rows = p.saved_rows ? out<T>(p.saved_rows) + (first * p.length + t) * p.columns : f.rows;
    const int64_t step = p.saved_rows ? p.length * p.columns : p.columns;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t index = (first + i) * p.length + t;
        std::memcpy(rows + i * step, in<T>(p.raw) + index * p.raw_step, p.columns * sizeof(T));
        if (p.keep && in<T>(p.keep)[index] != T(1))
            for (int64_t c = 0; c < p.channels; ++c)
                f.y_before[i * f.width + c] *= in<T>(p.keep)[index];
        if (p.centroids) {
            const T *y = f.y_before + i * f.width;
            f.has_before[i] = std::any_of(y, y + p.channels, [](T value) { return value != 0; });
        }
        for (int64_t c = 0; c < p.channels && p.noise; ++c)
            f.y_before[i * f.width + c] += in<T>(p.noise)[index * p.channels + c];
    }
    if (p.centroids) read_centroids<T>(p, first, count, t, maps, f);
    const T *before = p.centroids ? f.read : f.y_before;
    // A tile of the weight fills a quarter of an L2 cache, so that memory is read once for all
    // sequences.
    const int64_t maximum = std::max<int64_t>(16, (1 << 18) / (f.width * sizeof(T)) / 16 * 16);
    for (int64_t j = 0; j < p.y_columns; j += maximum) {
        const int64_t tile_size = std::min(maximum, p.y_columns - j);
        for_each_tile(count, [&](int64_t i, auto S) {
            const T *y = before + i * f.width, *W = maps.W + j * f.width;
            T *to = rows + i * step + j;
            project_some<T, decltype(S)::value>(W, tile_size, f.width, y, to, step);
        });
    }
}

template <class T, int R>
void solve_group(const Cell &p, int64_t first, int64_t count, const Maps<T> &maps) {
    const int64_t state = p.states * p.channels, chunks = (p.length + p.every - 1) / p.every;
    Forward<T> f(p, count);
    init_group<T>(p, first, count, f);
    const auto store_state = [&](int64_t i, T *to) {
        const T *h = f.h + i * state, *B = f.B_before + i * p.groups * p.states;
        if (p.kind == RNN) return void(std::memcpy(to, h, state * sizeof(T)));
        add_inflow<T>(p, f.inflow + i * p.channels, B, h, to);
    };
    for (int64_t t = 0; t < p.length; ++t) {
        if (p.checkpoints && t % p.every == 0)
            for (int64_t i = 0; i < count; ++i)
                store_state(i, out<T>(p.checkpoints) + ((first + i) * chunks + t / p.every) * state);
        compute_rows<T>(p, first, count, t, maps, f);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t index = (first + i) * p.length + t;
            const T *row = p.saved_rows ? in<T>(p.saved_rows) + index * p.columns : f.rows + i * p.columns;
            solve_token<T, R>(p, index, i, row, f);
        }
    }
    for (int64_t i = 0; i < count; ++i) store_state(i, out<T>(p.final) + (first + i) * state);
}

template <class T> void forward(const Cell &p) {
    const Maps<T> maps(p);
    with_rank(p, [&](auto R) {
        // If the weight exceeds the L2 cache, more sequences share one pass over it.
        const bool large = p.y_columns * p.channels * int64_t(sizeof(T)) > (1 << 19);
        for_each_group(p, large ? 4 * GROUP_SIZE : GROUP_SIZE, [&](int64_t first, int64_t count) {
            solve_group<T, decltype(R)::value>(p, first, count, maps);
        });
    });
}

}  // namespace

extern "C" void cell_float(const Cell *p) { forward<float>(*p); }
extern "C" void cell_double(const Cell *p) { forward<double>(*p); }
