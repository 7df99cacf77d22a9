// Forward pass of the `cell` kernel: the exact solve of a layer, token by token.
//
// lm/kernels/cpu/cpu_cell.py calls it; lm/kernels/cell_arguments.py has the equations.

#include "cell_token.h"

namespace {

// State of a group of sequences between two tokens, and scratch memory.
template <class T> struct ForwardWork {
    int64_t width;               // entries of a row of y_before, a multiple of a vector
    std::vector<Token<T>> tokens;
    T *rows, *y_before, *h;      // (sequence, K), (sequence, width), (sequence, n, d)
    T *inflow, *B_before;        // (sequence, d), (sequence, groups·n): h lacks inflow B_beforeᵀ
    T *c, *m, *v;                // (d), (r, d), (d) of one token: v = c + Σ_j m_j s_j
    T *alpha, *read;             // α_i (sequence, k) and Σ_i α_i c_i (sequence, width) of centroids c_i
    T *has_before;               // (sequence): 0 at the first token of a document, else 1
    Arena<T> arena;

    static int64_t size(const Cell &cell, int64_t count) {
        const auto round_up = Arena<T>::round_up;
        const int64_t d = round_up(cell.channels), state = round_up(cell.states * cell.channels);
        const int64_t per_sequence = round_up(cell.columns) + 3 * d + state + round_up(cell.groups * cell.states) +
                             round_up(cell.centroids);
        return count * (per_sequence + Token<T>::size(cell)) + (cell.rank + 2) * d + round_up(count);
    }
    ForwardWork(const Cell &cell, int64_t count)
        : width(Arena<T>::round_up(cell.channels)), arena(size(cell, count)) {
        for (int64_t i = 0; i < count; ++i) tokens.emplace_back(cell, arena);
        rows = arena.take(count * cell.columns);
        y_before = arena.take(count * width);
        h = arena.take(count * cell.states * cell.channels);
        inflow = arena.take(count * cell.channels);
        B_before = arena.take(count * cell.groups * cell.states);
        for (T **pointer : {&c, &v}) *pointer = arena.take(cell.channels);
        m = arena.take(cell.rank * cell.channels);
        alpha = arena.take(count * cell.centroids);
        read = arena.take(count * width);
        has_before = arena.take(count);
    }
};

// Compute c and m_j (d each) of v = c + Σ_j m_j s_j, and their means (0 unless the norm centres).
template <class T, int R>
void split_v(const Cell &cell, int64_t token_index, const Token<T> &token, ForwardWork<T> &work, T *means) {
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    double T_Ux[MAX_REFLECTIONS];
    for (int i = 0; i < r; ++i) {
        T_Ux[i] = 0;
        for (int j = 0; j <= i; ++j) T_Ux[i] += token.map[i][j] * token.Ux[j];
    }
    Vec<T> sums[MAX_REFLECTIONS + 1] = {};
    for_each_group_block<T>(cell, [&](int64_t c, int64_t lanes, int64_t g) {
        Vec<T> remainder = load<T>(input<T>(cell.x) + token_index * d + c, lanes);
        for (int i = 0; i < r; ++i) remainder -= load<T>(token.u + i * d + c, lanes) * T(T_Ux[i]);
        Vec<T> gamma = load<T>(token.dt + c, lanes) * token.bc[g] + load_or_default<T>(cell.D, c, lanes, 0);
        Vec<T> constant = load<T>(token.past + c, lanes) + gamma * remainder;
        if (cell.gate) {
            const Vec<T> gate = load<T>(input<T>(cell.gate) + token_index * d + c, lanes);
            constant *= gate;
            gamma *= gate;
        }
        store<T>(work.c + c, constant, lanes);
        sums[0] += constant;
        for (int j = 0; j < r; ++j) {
            Vec<T> slope{};
            for (int i = j; i < r; ++i) slope += load<T>(token.u + i * d + c, lanes) * T(token.map[i][j]);
            slope *= gamma;
            store<T>(work.m + j * d + c, slope, lanes);
            sums[j + 1] += slope;
        }
    });
    for (int j = 0; j <= r; ++j) means[j] = cell.norm == LAYER ? sum_lanes<T>(sums[j]) / T(d) : T(0);
}

// Compute the coefficients of φ.
template <class T, int R>
void compute_coefficients(const Cell &cell, const Token<T> &token, const ForwardWork<T> &work, const T *means,
                          Equation &eq) {
    const int r = rank_of<R>(cell.rank);
    const int64_t d = cell.channels;
    constexpr int MAX_R = R ? R : MAX_REFLECTIONS;
    Vec<T> alpha[MAX_R] = {}, delta[MAX_R] = {}, beta[MAX_R][MAX_R] = {};
    Vec<T> gamma0{}, gamma1[MAX_R] = {}, gamma2[MAX_R][MAX_R] = {};
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> constant = zero_padding_lanes<T>(load<T>(work.c + c, lanes) - means[0], lanes);
        const Vec<T> weight = load_or_default<T>(cell.norm_weight, c, lanes, 1);
        const Vec<T> bias = load_or_default<T>(cell.norm_bias, c, lanes, 0);
        Vec<T> u[MAX_R], slope[MAX_R];
        for (int i = 0; i < r; ++i) {
            u[i] = load<T>(token.u + i * d + c, lanes);
            delta[i] += u[i] * bias;
            u[i] *= weight;
            alpha[i] += u[i] * constant;
            slope[i] = zero_padding_lanes<T>(load<T>(work.m + i * d + c, lanes) - means[i + 1], lanes);
            gamma1[i] += constant * slope[i];
        }
        gamma0 += constant * constant;
        for (int i = 0; i < r; ++i)
            for (int j = 0; j < r; ++j) {
                beta[i][j] += u[i] * slope[j];
                gamma2[i][j] += slope[i] * slope[j];
            }
    });
    eq.gamma0 = double(sum_lanes<T>(gamma0)) / d + cell.norm_eps;
    eq.floor = cell.norm_eps;
    eq.rounding = std::numeric_limits<T>::epsilon();
    for (int i = 0; i < r; ++i) {
        eq.alpha[i] = sum_lanes<T>(alpha[i]);
        eq.delta[i] = sum_lanes<T>(delta[i]);
        eq.gamma1[i] = double(sum_lanes<T>(gamma1[i])) / d;
        for (int j = 0; j < r; ++j) {
            eq.beta[i][j] = sum_lanes<T>(beta[i][j]);
            eq.gamma2[i][j] = double(sum_lanes<T>(gamma2[i][j])) / d;
        }
    }
}

// Return true if the backward pass may limit the gradient at the root s: if the gain is above MAX_GAIN.
template <class T, int R> bool may_limit_gradient(const Cell &cell, const Equation &eq, const double *s) {
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    if (cell.norm == NONE) {
        for (int i = 0; i < cell.rank; ++i)
            for (int j = 0; j < cell.rank; ++j) M[i][j] = (i == j) - eq.beta[i][j];
    } else {
        Point point;
        for (int i = 0; i < cell.rank; ++i) point.s[i] = s[i];
        evaluate<R>(eq, cell.rank, point);
        identity_minus_slope<R>(eq, cell.rank, point, M);
    }
    return is_gain_limited<R>(M, cell.rank);
}

// Solve one token of the i-th sequence of the group: its equation, y, and its addition to the state.
template <class T, int R>
void solve_token(const Cell &cell, int64_t token_index, int64_t i, const T *row, ForwardWork<T> &work) {
    const int64_t d = cell.channels, n = cell.states;
    Token<T> &token = work.tokens[i];
    T *h = work.h + i * n * d, *inflow = work.inflow + i * d, *B_before = work.B_before + i * cell.groups * n;
    T *y = output<T>(cell.y) + token_index * d;
    prepare_token<T, R>(cell, token_index, row, token);
    advance_state<T>(cell, token, cell.keep ? input<T>(cell.keep)[token_index] : T(1), inflow, B_before, h, h);
    Equation eq;
    T means[MAX_REFLECTIONS + 1], mean, inverse;
    split_v<T, R>(cell, token_index, token, work, means);
    compute_coefficients<T, R>(cell, token, work, means, eq);
    uint8_t outcome = cell.norm == NONE ? solve_linear<R>(eq, cell.rank, token.root)
                                        : solve<R>(eq, cell.rank, token.root);
    if (!(outcome & FAILED) && may_limit_gradient<T, R>(cell, eq, token.root)) outcome |= GRAD_LIMITED;
    cell.outcome[token_index] = outcome;
    for (int64_t j = 0; j < cell.rank; ++j) {
        token.root[j] = T(token.root[j]);  // rounded as it is saved for the backward pass
        if (cell.roots) output<T>(cell.roots)[token_index * cell.rank + j] = T(token.root[j]);
    }
    compute_mixed<T, R>(cell, token_index, token);
    compute_v<T>(cell, token_index, token, work.v, mean, inverse);
    T *before = work.y_before + i * work.width;
    for_each_block<T>(d, [&](int64_t c, int64_t lanes) {
        const Vec<T> weight = load_or_default<T>(cell.norm_weight, c, lanes, 1);
        const Vec<T> normed = (load<T>(work.v + c, lanes) - mean) * inverse;
        const Vec<T> y_c = normed * weight + load_or_default<T>(cell.norm_bias, c, lanes, 0);
        store<T>(y + c, y_c, lanes);
        store<T>(before + c, y_c, lanes);
        if (cell.kind == RNN) return store<T>(h + c, y_c, lanes);
        store<T>(inflow + c, load<T>(token.dt + c, lanes) * load<T>(token.mixed + c, lanes), lanes);
    });
    if (cell.kind != RNN) std::memcpy(B_before, token.B, cell.groups * n * sizeof(T));
}

// Set the state before the first token.
template <class T> void init_group(const Cell &cell, int64_t first, int64_t count, ForwardWork<T> &work) {
    const int64_t d = cell.channels, state = cell.states * d;
    std::fill(work.y_before, work.y_before + count * work.width, T(0));
    std::fill(work.h, work.h + count * state, T(0));
    std::fill(work.inflow, work.inflow + count * d, T(0));
    std::fill(work.B_before, work.B_before + count * cell.groups * cell.states, T(0));
    for (int64_t i = 0; i < count && cell.y0; ++i)
        std::memcpy(work.y_before + i * work.width, input<T>(cell.y0) + (first + i) * d, d * sizeof(T));
    if (cell.h0) std::memcpy(work.h, input<T>(cell.h0) + first * state, count * state * sizeof(T));
}

// Replace `count` numbers by `factor` times their softmax.
template <class T> void softmax(int64_t count, T factor, T *alpha) {
    const T maximum = *std::max_element(alpha, alpha + count);
    Vec<T> sums{};
    for_each_block<T>(count, [&](int64_t j, int64_t lanes) {
        const Vec<T> power = exponential<T>(load<T>(alpha + j, lanes) - maximum);
        store<T>(alpha + j, power, lanes);
        sums += zero_padding_lanes<T>(power, lanes);
    });
    const T scale = factor / sum_lanes<T>(sums);
    for (int64_t j = 0; j < count; ++j) alpha[j] *= scale;
}

// Compute Σ_i α_i c_i, which token t of all sequences reads instead of y_before. It is zero at the
// first token of a document; see Centroids in lm/model/layers.py.
template <class T>
void read_centroids(const Cell &cell, int64_t first, int64_t count, int64_t t, const PaddedWeights<T> &weights,
                    ForwardWork<T> &work) {
    const int64_t centroids = cell.centroids, d = cell.channels, tokens = first * cell.length + t;
    T *alphas = cell.alphas ? output<T>(cell.alphas) + tokens * centroids : work.alpha;
    const int64_t step = cell.alphas ? cell.length * centroids : centroids;
    for (int64_t i = 0; i < count; ++i) std::memcpy(alphas + i * step, cell.key_bias, centroids * sizeof(T));
    for_each_tile(count, [&](int64_t i, auto S) {
        const T *y = work.y_before + i * work.width;
        project_tile<T, decltype(S)::value>(weights.keys, centroids, work.width, y, alphas + i * step, step);
    });
    for (int64_t i = 0; i < count; ++i) softmax<T>(centroids, work.has_before[i], alphas + i * step);
    for_each_tile(count, [&](int64_t i, auto S) {
        T *read = work.read + i * work.width;
        combine_weight_rows<T, decltype(S)::value>(weights.values, centroids, work.width, alphas + i * step,
                                                   step, read);
    });
    for (int64_t i = 0; i < count && cell.reads; ++i)
        std::memcpy(output<T>(cell.reads) + (tokens + i * cell.length) * d, work.read + i * work.width,
                    d * sizeof(T));
}

// Compute the rows of token t of all sequences: raw plus the product of W_y and y_{t−1}.
template <class T>
void compute_rows(const Cell &cell, int64_t first, int64_t count, int64_t t, const PaddedWeights<T> &weights,
             ForwardWork<T> &work) {
    T *rows = cell.saved_rows ? output<T>(cell.saved_rows) + (first * cell.length + t) * cell.columns : work.rows;
    const int64_t step = cell.saved_rows ? cell.length * cell.columns : cell.columns;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token_index = (first + i) * cell.length + t;
        std::memcpy(rows + i * step, input<T>(cell.raw) + token_index * cell.raw_step, cell.columns * sizeof(T));
        if (cell.keep && input<T>(cell.keep)[token_index] != T(1))
            for (int64_t c = 0; c < cell.channels; ++c)
                work.y_before[i * work.width + c] *= input<T>(cell.keep)[token_index];
        if (cell.centroids) {
            const T *y = work.y_before + i * work.width;
            work.has_before[i] = std::any_of(y, y + cell.channels, [](T value) { return value != 0; });
        }
        for (int64_t c = 0; c < cell.channels && cell.noise; ++c)
            work.y_before[i * work.width + c] += input<T>(cell.noise)[token_index * cell.channels + c];
    }
    if (cell.centroids) read_centroids<T>(cell, first, count, t, weights, work);
    const T *before = cell.centroids ? work.read : work.y_before;
    // A tile of W_y fills 256 KiB, a quarter of an L2 cache, so that memory is read once for all sequences.
    const int64_t max_tile_rows = std::max<int64_t>(16, (1 << 18) / (work.width * sizeof(T)) / 16 * 16);
    for (int64_t j = 0; j < cell.y_columns; j += max_tile_rows) {
        const int64_t tile_size = std::min(max_tile_rows, cell.y_columns - j);
        for_each_tile(count, [&](int64_t i, auto S) {
            const T *y = before + i * work.width, *W = weights.W_y + j * work.width;
            T *to = rows + i * step + j;
            project_tile<T, decltype(S)::value>(W, tile_size, work.width, y, to, step);
        });
    }
}

// Solve all tokens of a group of sequences.
template <class T, int R>
void solve_group(const Cell &cell, int64_t first, int64_t count, const PaddedWeights<T> &weights) {
    const int64_t state = cell.states * cell.channels, interval = cell.checkpoint_interval;
    ForwardWork<T> work(cell, count);
    init_group<T>(cell, first, count, work);
    const auto store_state = [&](int64_t i, T *to) {
        const T *h = work.h + i * state, *B = work.B_before + i * cell.groups * cell.states;
        if (cell.kind == RNN) return void(std::memcpy(to, h, state * sizeof(T)));
        add_inflow<T>(cell, work.inflow + i * cell.channels, B, h, to);
    };
    for (int64_t t = 0; t < cell.length; ++t) {
        const bool is_checkpoint = cell.checkpoints && t % interval == 0;
        for (int64_t i = 0; i < count && is_checkpoint; ++i) {
            const int64_t checkpoint = (first + i) * count_chunks(cell) + t / interval;
            store_state(i, output<T>(cell.checkpoints) + checkpoint * state);
        }
        compute_rows<T>(cell, first, count, t, weights, work);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t token_index = (first + i) * cell.length + t;
            const T *row = cell.saved_rows ? find_row<T>(cell, token_index) : work.rows + i * cell.columns;
            solve_token<T, R>(cell, token_index, i, row, work);
        }
    }
    for (int64_t i = 0; i < count; ++i) store_state(i, output<T>(cell.final) + (first + i) * state);
}

template <class T> void forward(const Cell &cell) {
    const PaddedWeights<T> weights(cell);
    with_rank(cell, [&](auto R) {
        // If the weight exceeds the L2 cache, more sequences share one pass over it.
        const bool is_large = cell.y_columns * cell.channels * int64_t(sizeof(T)) > (1 << 19);
        for_each_sequence_group(cell, is_large ? 4 * GROUP_SIZE : GROUP_SIZE, [&](int64_t first, int64_t count) {
            solve_group<T, decltype(R)::value>(cell, first, count, weights);
        });
    });
}

}  // namespace

extern "C" void cell_float(const Cell *cell) { forward<float>(*cell); }
extern "C" void cell_double(const Cell *cell) { forward<double>(*cell); }
